-- One row is one block of a segment in the final state that a snapshot shows.

CREATE TABLE blocks (
  run_id VARCHAR NOT NULL,
  rank INTEGER NOT NULL,
  segment_id BIGINT NOT NULL,
  address UBIGINT NOT NULL,
  block_bytes BIGINT NOT NULL,
  requested_bytes BIGINT,
  state VARCHAR NOT NULL,
  alloc_id BIGINT,
  stack_id BIGINT
);
COMMENT ON TABLE blocks IS 'Blocks at the end of the recording; they tile their segment in address order.';
COMMENT ON COLUMN blocks.run_id IS 'Run, see runs.';
COMMENT ON COLUMN blocks.rank IS 'Rank, see runs.';
COMMENT ON COLUMN blocks.segment_id IS 'Segment, see segments.';
COMMENT ON COLUMN blocks.address IS 'Start address.';
COMMENT ON COLUMN blocks.block_bytes IS 'Size of the block, bytes.';
COMMENT ON COLUMN blocks.requested_bytes IS 'Bytes asked for; null for inactive blocks (the source''s figure is stale there) and in old forms.';
COMMENT ON COLUMN blocks.state IS 'See the type block_state.';
COMMENT ON COLUMN blocks.alloc_id IS 'Allocation that holds it, see events; null for inactive blocks.';
COMMENT ON COLUMN blocks.stack_id IS 'Stack recorded with it, see stacks.';
