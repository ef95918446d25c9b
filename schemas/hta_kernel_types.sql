-- One row is the time of one kind of kernel, by holistic-trace-analysis (`xmem ingest --hta`).

CREATE TABLE hta_kernel_types (
  run_id VARCHAR NOT NULL,
  rank INTEGER NOT NULL,
  kernel_type VARCHAR NOT NULL,
  total_ns BIGINT NOT NULL,
  share DOUBLE
);
COMMENT ON TABLE hta_kernel_types IS 'Kernel time by kind: computation, communication, memory, and their overlaps.';
COMMENT ON COLUMN hta_kernel_types.run_id IS 'Run, see runs.';
COMMENT ON COLUMN hta_kernel_types.rank IS 'Rank, see runs.';
COMMENT ON COLUMN hta_kernel_types.kernel_type IS 'Kind as holistic-trace-analysis names it.';
COMMENT ON COLUMN hta_kernel_types.total_ns IS 'Time, ns.';
COMMENT ON COLUMN hta_kernel_types.share IS 'Share of the busy time, 0 to 1.';
