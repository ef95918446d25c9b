-- One row for each allocation with its begin and end only: `allocations` without names, for sums over millions.
-- example: SELECT device_type, device_index, count(*) AS allocations, count(*) FILTER (WHERE end_seq IS NULL) AS alive_at_end FROM lifetimes GROUP BY ALL ORDER BY ALL

CREATE VIEW lifetimes AS
SELECT
  a.run_id,
  a.rank,
  a.alloc_id,
  a.device_type,
  a.device_index,
  coalesce(a.block_bytes, a.requested_bytes, 0) AS bytes,
  a.step,
  a.phase,
  a.category,
  a.seq AS start_seq,
  coalesce(r.seq, c.seq) AS end_seq,
  a.ts_ns AS start_ns,
  coalesce(r.ts_ns, c.ts_ns) AS end_ns,
  c.ts_ns AS completed_ns,
  a.inferred AS preexisting,
  a.stream,
  a.pool_id,
  a.span_id,
  a.stack_id
FROM events AS a
LEFT JOIN events AS r
  ON r.run_id = a.run_id AND r.rank = a.rank AND r.alloc_id = a.alloc_id AND r.action = 'free_requested'
LEFT JOIN events AS c
  ON c.run_id = a.run_id AND c.rank = a.rank AND c.alloc_id = a.alloc_id AND c.action = 'free_completed'
WHERE a.action = 'alloc';

COMMENT ON VIEW lifetimes IS 'Begin and end of every allocation; allocations adds operator and module names.';
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
COMMENT ON COLUMN lifetimes.end_ns IS 'When the program let go of it, ns (when the free was completed, where the source knows only that); null where it was not freed.';
COMMENT ON COLUMN lifetimes.completed_ns IS 'When the allocator could reuse it, ns; null where unknown or not freed.';
COMMENT ON COLUMN lifetimes.preexisting IS 'True where the allocation was inferred: memory that was there before the recording.';
COMMENT ON COLUMN lifetimes.stream IS 'Stream that it was allocated on; null where unknown.';
COMMENT ON COLUMN lifetimes.pool_id IS 'Memory pool as a:b; null where unknown.';
COMMENT ON COLUMN lifetimes.span_id IS 'Innermost span around the allocation, see spans.';
COMMENT ON COLUMN lifetimes.stack_id IS 'Stack that allocated it, see stacks; null where there is none.';
