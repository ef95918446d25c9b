-- One row for each step and kind of allocation that outlived it: what each step leaves behind.
-- example: SELECT step, category, op, left_bytes, kept_bytes FROM growth ORDER BY run_id, rank, step, left_bytes DESC, category, op LIMIT 20

CREATE VIEW growth AS
SELECT
  l.run_id,
  l.rank,
  l.device_type,
  l.device_index,
  l.step,
  l.category,
  n.op,
  n.module,
  l.stack_id,
  count(*) AS left_allocations,
  CAST(sum(l.bytes) AS BIGINT) AS left_bytes,
  CAST(coalesce(sum(l.bytes) FILTER (WHERE l.end_seq IS NULL), 0) AS BIGINT) AS kept_bytes
FROM lifetimes AS l
JOIN (
  SELECT run_id, rank, device_type, device_index, step, max(seq) AS last_seq
  FROM events
  WHERE step IS NOT NULL
  GROUP BY ALL
) AS s
  ON s.run_id = l.run_id AND s.rank = l.rank AND s.step = l.step
  AND s.device_type = l.device_type AND s.device_index = l.device_index
LEFT JOIN places AS n ON n.run_id = l.run_id AND n.rank = l.rank AND n.span_id = l.span_id
WHERE l.end_seq IS NULL OR l.end_seq > s.last_seq
GROUP BY ALL;

COMMENT ON VIEW growth IS 'Allocations made in a step and alive after its last event.';
COMMENT ON COLUMN growth.run_id IS 'Run, see runs.';
COMMENT ON COLUMN growth.rank IS 'Rank, see runs.';
COMMENT ON COLUMN growth.device_type IS 'Device type, see devices.';
COMMENT ON COLUMN growth.device_index IS 'Device index, see devices.';
COMMENT ON COLUMN growth.step IS 'Step that made them, see events.';
COMMENT ON COLUMN growth.category IS 'What they are for, see the type category.';
COMMENT ON COLUMN growth.op IS 'What the program called, see allocations.';
COMMENT ON COLUMN growth.module IS 'Innermost module call around them.';
COMMENT ON COLUMN growth.stack_id IS 'Stack that allocated them, see stacks.';
COMMENT ON COLUMN growth.left_allocations IS 'Allocations that outlived the step.';
COMMENT ON COLUMN growth.left_bytes IS 'Their bytes.';
COMMENT ON COLUMN growth.kept_bytes IS 'Of these, bytes that were not freed before the end of the recording.';
