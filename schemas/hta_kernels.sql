-- One row is one kernel name with its times, by holistic-trace-analysis (`xmem ingest --hta`).

CREATE TABLE hta_kernels (
  run_id VARCHAR NOT NULL,
  rank INTEGER NOT NULL,
  name VARCHAR NOT NULL,
  kernel_type VARCHAR NOT NULL,
  total_ns BIGINT NOT NULL,
  min_ns BIGINT NOT NULL,
  max_ns BIGINT NOT NULL,
  mean_ns DOUBLE NOT NULL,
  stddev_ns DOUBLE
);
COMMENT ON TABLE hta_kernels IS 'Kernel breakdown of a GPU trace by holistic-trace-analysis; total_ns / mean_ns is the number of kernels.';
COMMENT ON COLUMN hta_kernels.run_id IS 'Run, see runs.';
COMMENT ON COLUMN hta_kernels.rank IS 'Rank, see runs.';
COMMENT ON COLUMN hta_kernels.name IS 'Name of the kernel, copy or memset.';
COMMENT ON COLUMN hta_kernels.kernel_type IS 'COMPUTATION, COMMUNICATION or MEMORY.';
COMMENT ON COLUMN hta_kernels.total_ns IS 'Sum of the durations, ns.';
COMMENT ON COLUMN hta_kernels.min_ns IS 'Shortest, ns.';
COMMENT ON COLUMN hta_kernels.max_ns IS 'Longest, ns.';
COMMENT ON COLUMN hta_kernels.mean_ns IS 'Mean, ns.';
COMMENT ON COLUMN hta_kernels.stddev_ns IS 'Standard deviation, ns; null for a single kernel.';
