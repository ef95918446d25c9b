-- One row for each category on each device: what memory is for.
-- example: SELECT category, at_peak_bytes, allocations FROM categories ORDER BY at_peak_bytes DESC, category

CREATE VIEW categories AS
SELECT
  l.run_id,
  l.rank,
  l.device_type,
  l.device_index,
  l.category AS category,
  count(*) AS allocations,
  CAST(sum(l.bytes) AS BIGINT) AS total_bytes,
  max(l.bytes) AS largest_bytes,
  CAST(coalesce(sum(l.bytes) FILTER (WHERE l.start_seq <= p.peak_allocated_seq AND (l.end_seq IS NULL OR l.end_seq > p.peak_allocated_seq)), 0) AS BIGINT) AS at_peak_bytes,
  count(*) FILTER (WHERE l.start_seq <= p.peak_allocated_seq AND (l.end_seq IS NULL OR l.end_seq > p.peak_allocated_seq)) AS at_peak_allocations,
  CAST(coalesce(sum(l.bytes) FILTER (WHERE l.end_seq IS NULL), 0) AS BIGINT) AS at_end_bytes,
  count(*) FILTER (WHERE l.end_seq IS NULL) AS at_end_allocations
FROM lifetimes AS l
JOIN peaks AS p
  ON p.run_id = l.run_id AND p.rank = l.rank
  AND p.device_type = l.device_type AND p.device_index = l.device_index
GROUP BY ALL;

COMMENT ON VIEW categories IS 'Memory by category: everything allocated, alive at the peak, alive at the end.';
COMMENT ON COLUMN categories.run_id IS 'Run, see runs.';
COMMENT ON COLUMN categories.rank IS 'Rank, see runs.';
COMMENT ON COLUMN categories.device_type IS 'Device type, see devices.';
COMMENT ON COLUMN categories.device_index IS 'Device index, see devices.';
COMMENT ON COLUMN categories.category IS 'What it is for, see the type category.';
COMMENT ON COLUMN categories.allocations IS 'Allocations made, memory that was there before included.';
COMMENT ON COLUMN categories.total_bytes IS 'Sum of their bytes, however short they lived.';
COMMENT ON COLUMN categories.largest_bytes IS 'Largest single allocation, bytes.';
COMMENT ON COLUMN categories.at_peak_bytes IS 'Bytes alive at the allocated peak of the device; over all rows of a device they add up to it.';
COMMENT ON COLUMN categories.at_peak_allocations IS 'Allocations alive there.';
COMMENT ON COLUMN categories.at_end_bytes IS 'Bytes alive at the end of the recording.';
COMMENT ON COLUMN categories.at_end_allocations IS 'Allocations alive at the end.';
