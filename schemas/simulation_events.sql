-- One row is the allocator's state after one request of a replay.

CREATE TABLE simulation_events (
  run_id VARCHAR NOT NULL,
  rank INTEGER NOT NULL,
  simulation_id VARCHAR NOT NULL,
  seq BIGINT NOT NULL,
  action VARCHAR NOT NULL,
  alloc_id BIGINT,
  address UBIGINT,
  bytes BIGINT,
  block_bytes BIGINT,
  allocated_bytes BIGINT NOT NULL,
  active_bytes BIGINT NOT NULL,
  reserved_bytes BIGINT NOT NULL
);
COMMENT ON TABLE simulation_events IS 'Predicted memory request by request; joins with events on run_id, rank and seq.';
COMMENT ON COLUMN simulation_events.run_id IS 'Run, see runs.';
COMMENT ON COLUMN simulation_events.rank IS 'Rank, see runs.';
COMMENT ON COLUMN simulation_events.simulation_id IS 'Simulation, see simulations.';
COMMENT ON COLUMN simulation_events.seq IS 'Position of the request: events.seq for a recorded stream.';
COMMENT ON COLUMN simulation_events.action IS 'Action of the request; oom where it failed; segment_alloc, segment_free, segment_map and segment_unmap rows are the allocator''s own calls during it.';
COMMENT ON COLUMN simulation_events.alloc_id IS 'Allocation, see events.';
COMMENT ON COLUMN simulation_events.address IS 'Simulated address; null where a long replay (over 50,000 requests) did not keep it.';
COMMENT ON COLUMN simulation_events.bytes IS 'Bytes asked for, or segment bytes.';
COMMENT ON COLUMN simulation_events.block_bytes IS 'Bytes of the simulated block.';
COMMENT ON COLUMN simulation_events.allocated_bytes IS 'Allocated bytes afterwards.';
COMMENT ON COLUMN simulation_events.active_bytes IS 'Active bytes afterwards.';
COMMENT ON COLUMN simulation_events.reserved_bytes IS 'Reserved bytes afterwards.';
