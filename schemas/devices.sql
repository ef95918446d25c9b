-- One row for each device that a run saw.

CREATE TABLE devices (
  run_id VARCHAR NOT NULL,
  rank INTEGER NOT NULL,
  device_type VARCHAR NOT NULL,
  device_index INTEGER NOT NULL,
  name VARCHAR,
  total_bytes BIGINT,
  compute_major INTEGER,
  compute_minor INTEGER,
  multiprocessors INTEGER,
  baseline_bytes BIGINT NOT NULL,
  baseline_reserved_bytes BIGINT,
  complete_history BOOLEAN NOT NULL
);
COMMENT ON TABLE devices IS 'Devices of a run: what they are, and what they held before the recording.';
COMMENT ON COLUMN devices.run_id IS 'Run, see runs.';
COMMENT ON COLUMN devices.rank IS 'Rank, see runs.';
COMMENT ON COLUMN devices.device_type IS 'c10 device type in lower case: cpu, cuda, hip, xpu, mps, privateuseone, ...; unknownN for a number that no torch checked here knows.';
COMMENT ON COLUMN devices.device_index IS 'Index of the device; -1 for the CPU.';
COMMENT ON COLUMN devices.name IS 'Name as the source states it.';
COMMENT ON COLUMN devices.total_bytes IS 'Total memory as torch reports it, bytes (deviceProperties.totalGlobalMem).';
COMMENT ON COLUMN devices.compute_major IS 'Compute capability, major number.';
COMMENT ON COLUMN devices.compute_minor IS 'Compute capability, minor number.';
COMMENT ON COLUMN devices.multiprocessors IS 'Streaming multiprocessors.';
COMMENT ON COLUMN devices.baseline_bytes IS 'Allocated before the recording, bytes: inferred from totals, unmatched frees or final segments.';
COMMENT ON COLUMN devices.baseline_reserved_bytes IS 'Reserved before the recording, bytes; null where unknown.';
COMMENT ON COLUMN devices.complete_history IS 'True where the recording holds the device''s first allocation, so that a replay starts from an empty device.';
