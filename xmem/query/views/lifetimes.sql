-- One row for each allocation with its begin and end only: `allocations` without names, for sums over millions.
-- example: SELECT device_type, device_index, count(*) AS allocations, count(*) FILTER (WHERE end_seq IS NULL) AS alive_at_end FROM lifetimes GROUP BY ALL ORDER BY ALL

CREATE VIEW lifetimes AS
SELECT
  run_id,
  rank,
  alloc_id,
  device_type,
  device_index,
  coalesce(block_bytes, requested_bytes, 0) AS bytes,
  step,
  phase,
  category,
  seq AS start_seq,
  end_seq,
  ts_ns AS start_ns,
  inferred AS preexisting,
  stream,
  pool_id,
  span_id,
  stack_id
FROM events
WHERE action = 'alloc';

COMMENT ON VIEW lifetimes IS 'Begin and end of every allocation; allocations adds times and the names of operator and module.';
COMMENT ON COLUMN lifetimes.run_id IS 'Run, see runs.';
COMMENT ON COLUMN lifetimes.rank IS 'Rank, see runs.';
COMMENT ON COLUMN lifetimes.alloc_id IS 'Number of the allocation within run and rank, see events.';
COMMENT ON COLUMN lifetimes.device_type IS 'Device type, see devices.';
COMMENT ON COLUMN lifetimes.device_index IS 'Device index, see devices.';
COMMENT ON COLUMN lifetimes.bytes IS 'Size of the block, or the bytes asked for where the source knows only that.';
COMMENT ON COLUMN lifetimes.step IS 'Training step in which it was allocated, see events.';
COMMENT ON COLUMN lifetimes.phase IS 'Part of the step in which it was allocated, see the type phase.';
COMMENT ON COLUMN lifetimes.category IS 'What it is for, see the type category.';
COMMENT ON COLUMN lifetimes.start_seq IS 'Position of its alloc row, see events.seq.';
COMMENT ON COLUMN lifetimes.end_seq IS 'Position of the row that freed it; null where it was alive at the end.';
COMMENT ON COLUMN lifetimes.start_ns IS 'When it was allocated, ns, see runs.time_base.';
COMMENT ON COLUMN lifetimes.preexisting IS 'True where the allocation was inferred: memory that was there before the recording.';
COMMENT ON COLUMN lifetimes.stream IS 'Stream that it was allocated on; null where unknown.';
COMMENT ON COLUMN lifetimes.pool_id IS 'Memory pool as a:b; null where unknown.';
COMMENT ON COLUMN lifetimes.span_id IS 'Innermost span around the allocation, see spans.';
COMMENT ON COLUMN lifetimes.stack_id IS 'Stack that allocated it, see stacks; null where there is none.';
