-- One row for each module on each device: which modules allocate.
-- example: SELECT module, at_peak_bytes, total_bytes, allocations FROM modules ORDER BY at_peak_bytes DESC, module LIMIT 10

-- Sums are made by span first: names are then joined to fewer rows.
CREATE VIEW modules AS
WITH sums AS (
  SELECT
    l.run_id, l.rank, l.device_type, l.device_index, l.span_id,
    count(*) AS allocations,
    sum(l.bytes) AS total_bytes,
    max(l.bytes) AS largest_bytes,
    coalesce(sum(l.bytes) FILTER (WHERE l.start_seq <= p.peak_allocated_seq
      AND (l.end_seq IS NULL OR l.end_seq > p.peak_allocated_seq)), 0) AS at_peak_bytes,
    count(*) FILTER (WHERE l.start_seq <= p.peak_allocated_seq
      AND (l.end_seq IS NULL OR l.end_seq > p.peak_allocated_seq)) AS at_peak_allocations,
    coalesce(sum(l.bytes) FILTER (WHERE l.end_seq IS NULL), 0) AS at_end_bytes,
    count(*) FILTER (WHERE l.end_seq IS NULL) AS at_end_allocations
  FROM lifetimes AS l
  JOIN peaks AS p
    ON p.run_id = l.run_id AND p.rank = l.rank
    AND p.device_type = l.device_type AND p.device_index = l.device_index
  GROUP BY ALL
)
SELECT
  l.run_id,
  l.rank,
  l.device_type,
  l.device_index,
  n.module,
  CAST(sum(l.allocations) AS BIGINT) AS allocations,
  CAST(sum(l.total_bytes) AS BIGINT) AS total_bytes,
  max(l.largest_bytes) AS largest_bytes,
  CAST(sum(l.at_peak_bytes) AS BIGINT) AS at_peak_bytes,
  CAST(sum(l.at_peak_allocations) AS BIGINT) AS at_peak_allocations,
  CAST(sum(l.at_end_bytes) AS BIGINT) AS at_end_bytes,
  CAST(sum(l.at_end_allocations) AS BIGINT) AS at_end_allocations
FROM sums AS l
LEFT JOIN places AS n ON n.run_id = l.run_id AND n.rank = l.rank AND n.span_id = l.span_id
GROUP BY ALL;

COMMENT ON VIEW modules IS 'Memory by module: everything allocated, alive at the peak, alive at the end.';
COMMENT ON COLUMN modules.run_id IS 'Run, see runs.';
COMMENT ON COLUMN modules.rank IS 'Rank, see runs.';
COMMENT ON COLUMN modules.device_type IS 'Device type, see devices.';
COMMENT ON COLUMN modules.device_index IS 'Device index, see devices.';
COMMENT ON COLUMN modules.module IS 'Innermost module call around the allocation; null where modules were not recorded.';
COMMENT ON COLUMN modules.allocations IS 'Allocations made, memory that was there before included.';
COMMENT ON COLUMN modules.total_bytes IS 'Sum of their bytes, however short they lived.';
COMMENT ON COLUMN modules.largest_bytes IS 'Largest single allocation, bytes.';
COMMENT ON COLUMN modules.at_peak_bytes IS 'Bytes alive at the allocated peak of the device; over all rows of a device they add up to it.';
COMMENT ON COLUMN modules.at_peak_allocations IS 'Allocations alive there.';
COMMENT ON COLUMN modules.at_end_bytes IS 'Bytes alive at the end of the recording.';
COMMENT ON COLUMN modules.at_end_allocations IS 'Allocations alive at the end.';
