-- One row for each training step on each device: its peak, and the memory before and after it.
-- example: SELECT step, peak_allocated_bytes, start_allocated_bytes, end_allocated_bytes FROM steps ORDER BY run_id, rank, device_type, device_index, step

CREATE VIEW steps AS
WITH found AS (
  SELECT
    run_id, rank, device_type, device_index, step,
    min(seq) AS first_seq,
    max(seq) AS last_seq,
    min(ts_ns) AS start_ns,
    max(ts_ns) AS end_ns,
    max(allocated_bytes) AS peak_allocated_bytes,
    max(active_bytes) AS peak_active_bytes,
    max(reserved_bytes) AS peak_reserved_bytes,
    count(*) FILTER (WHERE action = 'alloc') AS allocations,
    CAST(sum(coalesce(block_bytes, requested_bytes)) FILTER (WHERE action = 'alloc') AS BIGINT) AS allocated_in_step_bytes
  FROM events
  WHERE step IS NOT NULL
  GROUP BY ALL
),
first_peak AS (
  SELECT e.run_id, e.rank, e.device_type, e.device_index, e.step, min(e.seq) AS seq
  FROM events AS e
  JOIN found AS f
    ON f.run_id = e.run_id AND f.rank = e.rank AND f.device_type = e.device_type
    AND f.device_index = e.device_index AND f.step = e.step AND f.peak_allocated_bytes = e.allocated_bytes
  GROUP BY ALL
)
SELECT
  f.run_id,
  f.rank,
  f.device_type,
  f.device_index,
  f.step,
  f.first_seq,
  f.last_seq,
  f.start_ns,
  f.end_ns,
  coalesce(b.allocated_bytes, 0) AS start_allocated_bytes,
  z.allocated_bytes AS end_allocated_bytes,
  z.allocated_bytes - coalesce(b.allocated_bytes, 0) AS growth_bytes,
  f.peak_allocated_bytes,
  h.seq AS peak_seq,
  h.phase AS peak_phase,
  f.peak_active_bytes,
  f.peak_reserved_bytes,
  f.allocations,
  coalesce(f.allocated_in_step_bytes, 0) AS allocated_in_step_bytes
FROM found AS f
JOIN events AS z ON z.run_id = f.run_id AND z.rank = f.rank AND z.seq = f.last_seq
LEFT JOIN first_peak AS fp
  ON fp.run_id = f.run_id AND fp.rank = f.rank AND fp.step = f.step
  AND fp.device_type = f.device_type AND fp.device_index = f.device_index
LEFT JOIN events AS h ON h.run_id = f.run_id AND h.rank = f.rank AND h.seq = fp.seq
LEFT JOIN events AS b
  ON b.run_id = f.run_id AND b.rank = f.rank AND b.seq = f.first_seq - 1
  AND b.device_type = f.device_type AND b.device_index = f.device_index;

COMMENT ON VIEW steps IS 'Memory of each training step: before, at its peak, after.';
COMMENT ON COLUMN steps.run_id IS 'Run, see runs.';
COMMENT ON COLUMN steps.rank IS 'Rank, see runs.';
COMMENT ON COLUMN steps.device_type IS 'Device type, see devices.';
COMMENT ON COLUMN steps.device_index IS 'Device index, see devices.';
COMMENT ON COLUMN steps.step IS 'Training step, see events.';
COMMENT ON COLUMN steps.first_seq IS 'First event of the step on the device.';
COMMENT ON COLUMN steps.last_seq IS 'Last event of the step on the device.';
COMMENT ON COLUMN steps.start_ns IS 'Time of its first event, ns.';
COMMENT ON COLUMN steps.end_ns IS 'Time of its last event, ns.';
COMMENT ON COLUMN steps.start_allocated_bytes IS 'Allocated bytes before its first event.';
COMMENT ON COLUMN steps.end_allocated_bytes IS 'Allocated bytes after its last event.';
COMMENT ON COLUMN steps.growth_bytes IS 'What the step left behind: end less start, bytes.';
COMMENT ON COLUMN steps.peak_allocated_bytes IS 'Largest allocated bytes in the step.';
COMMENT ON COLUMN steps.peak_seq IS 'Event of the step that reached it first.';
COMMENT ON COLUMN steps.peak_phase IS 'Part of the step in which that was.';
COMMENT ON COLUMN steps.peak_active_bytes IS 'Largest active bytes in the step.';
COMMENT ON COLUMN steps.peak_reserved_bytes IS 'Largest reserved bytes in the step; null where the source does not say.';
COMMENT ON COLUMN steps.allocations IS 'Allocations made in the step.';
COMMENT ON COLUMN steps.allocated_in_step_bytes IS 'Sum of the bytes of these allocations, however short they lived.';
