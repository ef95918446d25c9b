-- One row is one block in the state that a replay ended in, with its segment.

CREATE TABLE simulation_segments (
  run_id VARCHAR NOT NULL,
  rank INTEGER NOT NULL,
  simulation_id VARCHAR NOT NULL,
  segment_id BIGINT NOT NULL,
  segment_address UBIGINT NOT NULL,
  segment_bytes BIGINT NOT NULL,
  segment_type VARCHAR NOT NULL,
  stream BIGINT NOT NULL,
  pool_id VARCHAR NOT NULL,
  is_expandable BOOLEAN NOT NULL,
  address UBIGINT NOT NULL,
  block_bytes BIGINT NOT NULL,
  requested_bytes BIGINT,
  state VARCHAR NOT NULL,
  alloc_id BIGINT
);
COMMENT ON TABLE simulation_segments IS 'Segments and blocks at the end of a replay (at the failed request, where it ran out of memory).';
COMMENT ON COLUMN simulation_segments.run_id IS 'Run, see runs.';
COMMENT ON COLUMN simulation_segments.rank IS 'Rank, see runs.';
COMMENT ON COLUMN simulation_segments.simulation_id IS 'Simulation, see simulations.';
COMMENT ON COLUMN simulation_segments.segment_id IS 'Number of the segment within the simulation, in address order.';
COMMENT ON COLUMN simulation_segments.segment_address IS 'Simulated start address of the segment.';
COMMENT ON COLUMN simulation_segments.segment_bytes IS 'Size of the segment, bytes.';
COMMENT ON COLUMN simulation_segments.segment_type IS 'small or large: the pool it serves.';
COMMENT ON COLUMN simulation_segments.stream IS 'Stream that the segment belongs to.';
COMMENT ON COLUMN simulation_segments.pool_id IS 'Memory pool as a:b.';
COMMENT ON COLUMN simulation_segments.is_expandable IS 'True for a mapped range of an expandable segment.';
COMMENT ON COLUMN simulation_segments.address IS 'Simulated start address of the block.';
COMMENT ON COLUMN simulation_segments.block_bytes IS 'Size of the block, bytes.';
COMMENT ON COLUMN simulation_segments.requested_bytes IS 'Bytes asked for; null for inactive blocks.';
COMMENT ON COLUMN simulation_segments.state IS 'See the type block_state.';
COMMENT ON COLUMN simulation_segments.alloc_id IS 'Allocation that holds it, see events; null for inactive blocks.';
