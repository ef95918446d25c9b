-- One row for each allocation: how many bytes, who asked for them, what for, from when to when.
-- example: SELECT category, count(*) AS allocations, sum(bytes) AS bytes FROM allocations GROUP BY category ORDER BY bytes DESC, category

CREATE VIEW allocations AS
SELECT
  a.run_id,
  a.rank,
  a.alloc_id,
  a.device_type,
  a.device_index,
  coalesce(a.block_bytes, a.requested_bytes) AS bytes,
  a.requested_bytes,
  a.block_bytes,
  coalesce(o.name, s.name) AS op,
  CASE WHEN s.kind = 'operator' THEN s.name END AS leaf_op,
  m.name AS module,
  a.step,
  a.phase,
  a.category,
  a.seq AS start_seq,
  coalesce(r.seq, c.seq) AS end_seq,
  a.ts_ns AS start_ns,
  coalesce(r.ts_ns, c.ts_ns) AS end_ns,
  c.ts_ns AS completed_ns,
  coalesce(r.seq, c.seq) IS NOT NULL AS freed,
  a.inferred AS preexisting,
  coalesce(r.inferred, c.inferred, false) AS free_inferred,
  a.address,
  a.stream,
  a.pool_id,
  a.thread_id,
  a.stack_id
FROM events AS a
LEFT JOIN events AS r
  ON r.run_id = a.run_id AND r.rank = a.rank AND r.alloc_id = a.alloc_id AND r.action = 'free_requested'
LEFT JOIN events AS c
  ON c.run_id = a.run_id AND c.rank = a.rank AND c.alloc_id = a.alloc_id AND c.action = 'free_completed'
LEFT JOIN spans AS s ON s.run_id = a.run_id AND s.rank = a.rank AND s.span_id = a.span_id
LEFT JOIN spans AS o ON o.run_id = s.run_id AND o.rank = s.rank AND o.span_id = s.op_id
LEFT JOIN spans AS m ON m.run_id = s.run_id AND m.rank = s.rank AND m.span_id = s.module_id
WHERE a.action = 'alloc';

COMMENT ON VIEW allocations IS 'Lifetimes: one row for each allocation, memory that was there before the recording included.';
COMMENT ON COLUMN allocations.run_id IS 'Run, see runs.';
COMMENT ON COLUMN allocations.rank IS 'Rank, see runs.';
COMMENT ON COLUMN allocations.alloc_id IS 'Number of the allocation within run and rank, see events.';
COMMENT ON COLUMN allocations.device_type IS 'Device type, see devices.';
COMMENT ON COLUMN allocations.device_index IS 'Device index, see devices.';
COMMENT ON COLUMN allocations.bytes IS 'Size of the block, or the bytes asked for where the source knows only that.';
COMMENT ON COLUMN allocations.requested_bytes IS 'Bytes asked for; null where the source knows only the block.';
COMMENT ON COLUMN allocations.block_bytes IS 'Size of the allocator''s block, bytes; null where the source knows only the request.';
COMMENT ON COLUMN allocations.op IS 'What the program called: the outermost operator around the allocation, else the innermost span of any kind; null where there is none.';
COMMENT ON COLUMN allocations.leaf_op IS 'Innermost operator around the allocation; null where the innermost span is none.';
COMMENT ON COLUMN allocations.module IS 'Innermost module call around the allocation; null where modules were not recorded.';
COMMENT ON COLUMN allocations.step IS 'Training step in which it was allocated, see events.';
COMMENT ON COLUMN allocations.phase IS 'Part of the step in which it was allocated, see the type phase.';
COMMENT ON COLUMN allocations.category IS 'What it is for, see the type category.';
COMMENT ON COLUMN allocations.start_seq IS 'Position of its alloc row, see events.seq.';
COMMENT ON COLUMN allocations.end_seq IS 'Position of its free row; null where it was not freed.';
COMMENT ON COLUMN allocations.start_ns IS 'When it was allocated, ns, see runs.time_base.';
COMMENT ON COLUMN allocations.end_ns IS 'When the program let go of it, ns (when the free was completed, where the source knows only that); null where it was not freed.';
COMMENT ON COLUMN allocations.completed_ns IS 'When the allocator could reuse it, ns; null where unknown or not freed.';
COMMENT ON COLUMN allocations.freed IS 'False where it was alive at the end of the recording.';
COMMENT ON COLUMN allocations.preexisting IS 'True where the allocation was inferred: memory that was there before the recording.';
COMMENT ON COLUMN allocations.free_inferred IS 'True where its free was lost and inferred.';
COMMENT ON COLUMN allocations.address IS 'Address as the source states it.';
COMMENT ON COLUMN allocations.stream IS 'Stream that it was allocated on; null where unknown.';
COMMENT ON COLUMN allocations.pool_id IS 'Memory pool as a:b; null where unknown.';
COMMENT ON COLUMN allocations.thread_id IS 'Thread that allocated it; null where unknown.';
COMMENT ON COLUMN allocations.stack_id IS 'Stack that allocated it, see stacks; null where there is none.';
