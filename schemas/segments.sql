-- One row is one segment in the final state that a snapshot shows.

CREATE TABLE segments (
  run_id VARCHAR NOT NULL,
  rank INTEGER NOT NULL,
  segment_id BIGINT NOT NULL,
  device_type VARCHAR NOT NULL,
  device_index INTEGER NOT NULL,
  address UBIGINT NOT NULL,
  total_bytes BIGINT NOT NULL,
  allocated_bytes BIGINT NOT NULL,
  active_bytes BIGINT NOT NULL,
  requested_bytes BIGINT,
  stream BIGINT,
  segment_type VARCHAR,
  pool_id VARCHAR,
  is_expandable BOOLEAN,
  stack_id BIGINT
);
COMMENT ON TABLE segments IS 'Segments at the end of the recording; reserved memory is the sum of total_bytes.';
COMMENT ON COLUMN segments.run_id IS 'Run, see runs.';
COMMENT ON COLUMN segments.rank IS 'Rank, see runs.';
COMMENT ON COLUMN segments.segment_id IS 'Number of the segment within run and rank, in order of device and address.';
COMMENT ON COLUMN segments.device_type IS 'Device type, see devices.';
COMMENT ON COLUMN segments.device_index IS 'Device index, see devices.';
COMMENT ON COLUMN segments.address IS 'Start address.';
COMMENT ON COLUMN segments.total_bytes IS 'Size of the segment, bytes.';
COMMENT ON COLUMN segments.allocated_bytes IS 'Bytes of blocks in state active_allocated.';
COMMENT ON COLUMN segments.active_bytes IS 'Bytes of blocks in state active_allocated or active_pending_free.';
COMMENT ON COLUMN segments.requested_bytes IS 'Bytes asked for in active blocks; null in old forms.';
COMMENT ON COLUMN segments.stream IS 'Stream handle that the segment belongs to.';
COMMENT ON COLUMN segments.segment_type IS 'small or large: the pool it serves.';
COMMENT ON COLUMN segments.pool_id IS 'Memory pool as a:b, 0:0 is the default pool; null where unknown.';
COMMENT ON COLUMN segments.is_expandable IS 'True for a mapped range of an expandable segment; null where unknown.';
COMMENT ON COLUMN segments.stack_id IS 'Stack that made the segment, see stacks.';
