-- One row for each allocation that was alive when its device held most: what the peak is made of.
-- example: SELECT category, op, sum(bytes) AS bytes, count(*) AS allocations FROM at_peak GROUP BY ALL ORDER BY bytes DESC, category, op LIMIT 10

CREATE VIEW at_peak AS
SELECT
  l.run_id,
  l.rank,
  l.device_type,
  l.device_index,
  p.peak_allocated_seq AS peak_seq,
  l.alloc_id,
  l.bytes,
  n.op,
  n.leaf_op,
  n.module,
  l.step,
  l.phase,
  l.category,
  l.start_seq,
  l.start_ns,
  l.end_seq,
  l.preexisting,
  l.stream,
  l.pool_id,
  l.stack_id
FROM lifetimes AS l
JOIN peaks AS p
  ON p.run_id = l.run_id AND p.rank = l.rank
  AND p.device_type = l.device_type AND p.device_index = l.device_index
  AND l.start_seq <= p.peak_allocated_seq AND (l.end_seq IS NULL OR l.end_seq > p.peak_allocated_seq)
LEFT JOIN places AS n ON n.run_id = l.run_id AND n.rank = l.rank AND n.span_id = l.span_id;

COMMENT ON VIEW at_peak IS 'Allocations alive at the allocated peak of their device; their bytes add up to peaks.peak_allocated_bytes.';
COMMENT ON COLUMN at_peak.run_id IS 'Run, see runs.';
COMMENT ON COLUMN at_peak.rank IS 'Rank, see runs.';
COMMENT ON COLUMN at_peak.device_type IS 'Device type, see devices.';
COMMENT ON COLUMN at_peak.device_index IS 'Device index, see devices.';
COMMENT ON COLUMN at_peak.peak_seq IS 'Event that reached the peak first, see peaks.peak_allocated_seq.';
COMMENT ON COLUMN at_peak.alloc_id IS 'Number of the allocation within run and rank, see events.';
COMMENT ON COLUMN at_peak.bytes IS 'Size of the block, or the bytes asked for where the source knows only that.';
COMMENT ON COLUMN at_peak.op IS 'What the program called, see allocations.';
COMMENT ON COLUMN at_peak.leaf_op IS 'Innermost operator around the allocation.';
COMMENT ON COLUMN at_peak.module IS 'Innermost module call around the allocation.';
COMMENT ON COLUMN at_peak.step IS 'Training step in which it was allocated.';
COMMENT ON COLUMN at_peak.phase IS 'Part of the step in which it was allocated, see the type phase.';
COMMENT ON COLUMN at_peak.category IS 'What it is for, see the type category.';
COMMENT ON COLUMN at_peak.start_seq IS 'Position of its alloc row, see events.seq.';
COMMENT ON COLUMN at_peak.start_ns IS 'When it was allocated, ns.';
COMMENT ON COLUMN at_peak.end_seq IS 'Position of the row that freed it; null where it was alive at the end.';
COMMENT ON COLUMN at_peak.preexisting IS 'True for memory that was there before the recording.';
COMMENT ON COLUMN at_peak.stream IS 'Stream that it was allocated on; null where unknown.';
COMMENT ON COLUMN at_peak.pool_id IS 'Memory pool as a:b; null where unknown.';
COMMENT ON COLUMN at_peak.stack_id IS 'Stack that allocated it, see stacks.';
