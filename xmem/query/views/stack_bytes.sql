-- One row for each call stack on each device: which code allocates (`stacks` is the table of frames).
-- example: SELECT frame, filename, line, at_peak_bytes FROM stack_bytes ORDER BY at_peak_bytes DESC, stack_id, device_type LIMIT 10

CREATE VIEW stack_bytes AS
WITH sums AS (
  SELECT
    l.run_id, l.rank, l.device_type, l.device_index, l.stack_id,
    count(*) AS allocations,
    CAST(sum(l.bytes) AS BIGINT) AS total_bytes,
    CAST(coalesce(sum(l.bytes) FILTER (WHERE l.start_seq <= p.peak_allocated_seq AND (l.end_seq IS NULL OR l.end_seq > p.peak_allocated_seq)), 0) AS BIGINT) AS at_peak_bytes,
    count(*) FILTER (WHERE l.start_seq <= p.peak_allocated_seq AND (l.end_seq IS NULL OR l.end_seq > p.peak_allocated_seq)) AS at_peak_allocations,
    CAST(coalesce(sum(l.bytes) FILTER (WHERE l.end_seq IS NULL), 0) AS BIGINT) AS at_end_bytes
  FROM lifetimes AS l
  JOIN peaks AS p
    ON p.run_id = l.run_id AND p.rank = l.rank
    AND p.device_type = l.device_type AND p.device_index = l.device_index
  GROUP BY ALL
)
SELECT
  s.run_id,
  s.rank,
  s.device_type,
  s.device_index,
  s.stack_id,
  n.frame,
  n.filename,
  n.line,
  s.allocations,
  s.total_bytes,
  s.at_peak_bytes,
  s.at_peak_allocations,
  s.at_end_bytes,
  f.frames
FROM sums AS s
LEFT JOIN own_frames AS n ON n.run_id = s.run_id AND n.rank = s.rank AND n.stack_id = s.stack_id
LEFT JOIN stacks AS f ON f.run_id = s.run_id AND f.rank = s.rank AND f.stack_id = s.stack_id;

COMMENT ON VIEW stack_bytes IS 'Memory by call stack, with the innermost frame of the program''s own code.';
COMMENT ON COLUMN stack_bytes.run_id IS 'Run, see runs.';
COMMENT ON COLUMN stack_bytes.rank IS 'Rank, see runs.';
COMMENT ON COLUMN stack_bytes.device_type IS 'Device type, see devices.';
COMMENT ON COLUMN stack_bytes.device_index IS 'Device index, see devices.';
COMMENT ON COLUMN stack_bytes.stack_id IS 'Stack, see stacks; null for allocations without one.';
COMMENT ON COLUMN stack_bytes.frame IS 'Function of the program''s own innermost frame, see own_frames.';
COMMENT ON COLUMN stack_bytes.filename IS 'File of that frame.';
COMMENT ON COLUMN stack_bytes.line IS 'Line of that frame.';
COMMENT ON COLUMN stack_bytes.allocations IS 'Allocations made there.';
COMMENT ON COLUMN stack_bytes.total_bytes IS 'Sum of their bytes, however short they lived.';
COMMENT ON COLUMN stack_bytes.at_peak_bytes IS 'Bytes alive at the allocated peak of the device.';
COMMENT ON COLUMN stack_bytes.at_peak_allocations IS 'Allocations alive there.';
COMMENT ON COLUMN stack_bytes.at_end_bytes IS 'Bytes alive at the end of the recording.';
COMMENT ON COLUMN stack_bytes.frames IS 'All frames, innermost first.';
