-- One row for each time the allocator took memory from the device or gave it back.
-- example: SELECT seq, action, bytes, reserved_bytes, unused_bytes FROM segments_over_time ORDER BY run_id, rank, seq LIMIT 20

CREATE VIEW segments_over_time AS
SELECT
  run_id,
  rank,
  device_type,
  device_index,
  seq,
  ts_ns,
  step,
  action,
  address,
  coalesce(block_bytes, requested_bytes) AS bytes,
  stream,
  pool_id,
  reserved_bytes,
  reserved_bytes - active_bytes AS unused_bytes,
  CASE
    WHEN action = 'segment_alloc' THEN min(CASE WHEN action = 'segment_free' THEN seq END) OVER (
      PARTITION BY run_id, rank, device_type, device_index, address ORDER BY seq
      ROWS BETWEEN 1 FOLLOWING AND UNBOUNDED FOLLOWING
    )
  END AS end_seq,
  inferred AS preexisting,
  stack_id
FROM events
WHERE action IN ('segment_alloc', 'segment_free', 'segment_map', 'segment_unmap');

COMMENT ON VIEW segments_over_time IS 'Segments as they come and go; empty where the source records totals only.';
COMMENT ON COLUMN segments_over_time.run_id IS 'Run, see runs.';
COMMENT ON COLUMN segments_over_time.rank IS 'Rank, see runs.';
COMMENT ON COLUMN segments_over_time.device_type IS 'Device type, see devices.';
COMMENT ON COLUMN segments_over_time.device_index IS 'Device index, see devices.';
COMMENT ON COLUMN segments_over_time.seq IS 'Position of the event, see events.';
COMMENT ON COLUMN segments_over_time.ts_ns IS 'Time of the event, ns, see runs.time_base.';
COMMENT ON COLUMN segments_over_time.step IS 'Training step, see events.';
COMMENT ON COLUMN segments_over_time.action IS 'segment_alloc, segment_free, segment_map or segment_unmap.';
COMMENT ON COLUMN segments_over_time.address IS 'Start address of the segment or the mapped range.';
COMMENT ON COLUMN segments_over_time.bytes IS 'Bytes taken or given back.';
COMMENT ON COLUMN segments_over_time.stream IS 'Stream that the segment belongs to.';
COMMENT ON COLUMN segments_over_time.pool_id IS 'Memory pool as a:b; null where unknown.';
COMMENT ON COLUMN segments_over_time.reserved_bytes IS 'Reserved bytes of the device afterwards.';
COMMENT ON COLUMN segments_over_time.unused_bytes IS 'Reserved bytes afterwards that no allocation used yet.';
COMMENT ON COLUMN segments_over_time.end_seq IS 'For segment_alloc: the event that freed the segment; null where it was kept, and for other actions.';
COMMENT ON COLUMN segments_over_time.preexisting IS 'True for segments that were there before the recording.';
COMMENT ON COLUMN segments_over_time.stack_id IS 'Stack that made the allocator ask, see stacks.';
