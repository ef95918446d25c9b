-- One row for each event: how much memory each device held just after it.
-- example: SELECT ts_ns, allocated_bytes, reserved_bytes FROM timeline WHERE device_type = 'cuda' ORDER BY seq LIMIT 20

CREATE VIEW timeline AS
SELECT
  run_id,
  rank,
  device_type,
  device_index,
  seq,
  ts_ns,
  action,
  alloc_id,
  coalesce(block_bytes, requested_bytes) AS bytes,
  step,
  phase,
  category,
  allocated_bytes,
  active_bytes,
  reserved_bytes
FROM events;

COMMENT ON VIEW timeline IS 'Memory of each device after each event: allocated, active and reserved.';
COMMENT ON COLUMN timeline.run_id IS 'Run, see runs.';
COMMENT ON COLUMN timeline.rank IS 'Rank, see runs.';
COMMENT ON COLUMN timeline.device_type IS 'Device type, see devices.';
COMMENT ON COLUMN timeline.device_index IS 'Device index, see devices.';
COMMENT ON COLUMN timeline.seq IS 'Position of the event, see events.';
COMMENT ON COLUMN timeline.ts_ns IS 'Time of the event, ns, see runs.time_base.';
COMMENT ON COLUMN timeline.action IS 'What happened, see the type action.';
COMMENT ON COLUMN timeline.alloc_id IS 'Allocation, see events; null for other actions.';
COMMENT ON COLUMN timeline.bytes IS 'Bytes of the allocation or segment that the event is about.';
COMMENT ON COLUMN timeline.step IS 'Training step, see events.';
COMMENT ON COLUMN timeline.phase IS 'Part of the step, see the type phase.';
COMMENT ON COLUMN timeline.category IS 'What the allocation is for, see the type category.';
COMMENT ON COLUMN timeline.allocated_bytes IS 'Bytes that the program held after the event: allocated and not yet let go (blocks where the source tells them, else what was asked for).';
COMMENT ON COLUMN timeline.active_bytes IS 'Bytes in use after the event: allocated, or let go and waiting for another stream.';
COMMENT ON COLUMN timeline.reserved_bytes IS 'Bytes that the allocator held from the device after the event; null where the source does not say.';
