-- One row is one replay of a run's requests through an allocator on a device.

CREATE TABLE simulations (
  run_id VARCHAR NOT NULL,
  rank INTEGER NOT NULL,
  simulation_id VARCHAR NOT NULL,
  device_type VARCHAR NOT NULL,
  device_index INTEGER NOT NULL,
  allocator VARCHAR NOT NULL,
  alloc_conf VARCHAR NOT NULL,
  torch_version VARCHAR NOT NULL,
  gpu VARCHAR NOT NULL,
  usable_bytes BIGINT NOT NULL,
  fits BOOLEAN NOT NULL,
  peak_requested_bytes BIGINT NOT NULL,
  peak_allocated_bytes BIGINT NOT NULL,
  peak_active_bytes BIGINT NOT NULL,
  peak_reserved_bytes BIGINT NOT NULL,
  num_alloc_retries BIGINT NOT NULL,
  num_ooms BIGINT NOT NULL,
  simulated_ns BIGINT NOT NULL
);
COMMENT ON TABLE simulations IS 'Replays kept in the store, with the answer of each.';
COMMENT ON COLUMN simulations.run_id IS 'Run, see runs.';
COMMENT ON COLUMN simulations.rank IS 'Rank, see runs.';
COMMENT ON COLUMN simulations.simulation_id IS 'Short stable hash of run, device, allocator and settings.';
COMMENT ON COLUMN simulations.device_type IS 'Recorded device whose requests were replayed.';
COMMENT ON COLUMN simulations.device_index IS 'Recorded device whose requests were replayed.';
COMMENT ON COLUMN simulations.allocator IS 'Name of the allocator.';
COMMENT ON COLUMN simulations.alloc_conf IS 'PYTORCH_ALLOC_CONF text that the replay used.';
COMMENT ON COLUMN simulations.torch_version IS 'torch version whose rules the replay used.';
COMMENT ON COLUMN simulations.gpu IS 'Device as asked for.';
COMMENT ON COLUMN simulations.usable_bytes IS 'Bytes the allocator could reserve.';
COMMENT ON COLUMN simulations.fits IS 'True where no request failed.';
COMMENT ON COLUMN simulations.peak_requested_bytes IS 'Largest sum of bytes asked for and live.';
COMMENT ON COLUMN simulations.peak_allocated_bytes IS 'Largest allocated bytes (blocks).';
COMMENT ON COLUMN simulations.peak_active_bytes IS 'Largest active bytes (allocated and pending free).';
COMMENT ON COLUMN simulations.peak_reserved_bytes IS 'Largest reserved bytes.';
COMMENT ON COLUMN simulations.num_alloc_retries IS 'Allocations that first emptied the cache and tried again.';
COMMENT ON COLUMN simulations.num_ooms IS 'Out-of-memory errors.';
COMMENT ON COLUMN simulations.simulated_ns IS 'When it was simulated, Unix time in nanoseconds.';
