-- One row for each operator on each device: which operators allocate.
-- example: SELECT op, at_peak_bytes, total_bytes, allocations FROM operators ORDER BY at_peak_bytes DESC, op LIMIT 10

CREATE VIEW operators AS
SELECT
  l.run_id,
  l.rank,
  l.device_type,
  l.device_index,
  coalesce(n.name, s.name) AS op,
  count(*) AS allocations,
  CAST(sum(l.bytes) AS BIGINT) AS total_bytes,
  max(l.bytes) AS largest_bytes,
  CAST(coalesce(sum(l.bytes) FILTER (WHERE l.start_seq <= p.peak_allocated_seq
      AND (l.end_seq IS NULL OR l.end_seq > p.peak_allocated_seq)), 0) AS BIGINT) AS at_peak_bytes,
  count(*) FILTER (WHERE l.start_seq <= p.peak_allocated_seq
      AND (l.end_seq IS NULL OR l.end_seq > p.peak_allocated_seq)) AS at_peak_allocations,
  CAST(coalesce(sum(l.bytes) FILTER (WHERE l.end_seq IS NULL), 0) AS BIGINT) AS at_end_bytes,
  count(*) FILTER (WHERE l.end_seq IS NULL) AS at_end_allocations
FROM lifetimes AS l
JOIN peaks AS p
  ON p.run_id = l.run_id AND p.rank = l.rank
  AND p.device_type = l.device_type AND p.device_index = l.device_index
LEFT JOIN spans AS s ON s.run_id = l.run_id AND s.rank = l.rank AND s.span_id = l.span_id
LEFT JOIN spans AS n ON n.run_id = s.run_id AND n.rank = s.rank AND n.span_id = s.op_id
GROUP BY ALL;

COMMENT ON VIEW operators IS 'Memory by operator: everything allocated, alive at the peak, alive at the end.';
COMMENT ON COLUMN operators.run_id IS 'Run, see runs.';
COMMENT ON COLUMN operators.rank IS 'Rank, see runs.';
COMMENT ON COLUMN operators.device_type IS 'Device type, see devices.';
COMMENT ON COLUMN operators.device_index IS 'Device index, see devices.';
COMMENT ON COLUMN operators.op IS 'What the program called: outermost operator, see allocations; null where none was recorded.';
COMMENT ON COLUMN operators.allocations IS 'Allocations made, memory that was there before included.';
COMMENT ON COLUMN operators.total_bytes IS 'Sum of their bytes, however short they lived.';
COMMENT ON COLUMN operators.largest_bytes IS 'Largest single allocation, bytes.';
COMMENT ON COLUMN operators.at_peak_bytes IS 'Bytes alive at the allocated peak of the device; over all rows of a device they add up to it.';
COMMENT ON COLUMN operators.at_peak_allocations IS 'Allocations alive there.';
COMMENT ON COLUMN operators.at_end_bytes IS 'Bytes alive at the end of the recording.';
COMMENT ON COLUMN operators.at_end_allocations IS 'Allocations alive at the end.';
