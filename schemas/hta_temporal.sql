-- One row is how one rank's device time divides, by holistic-trace-analysis (`xmem ingest --hta`).

CREATE TABLE hta_temporal (
  run_id VARCHAR NOT NULL,
  rank INTEGER NOT NULL,
  idle_ns BIGINT NOT NULL,
  compute_ns BIGINT NOT NULL,
  non_compute_ns BIGINT NOT NULL,
  kernel_ns BIGINT NOT NULL
);
COMMENT ON TABLE hta_temporal IS 'Temporal breakdown of a GPU trace by holistic-trace-analysis; it rounds to microseconds.';
COMMENT ON COLUMN hta_temporal.run_id IS 'Run, see runs.';
COMMENT ON COLUMN hta_temporal.rank IS 'Rank, see runs.';
COMMENT ON COLUMN hta_temporal.idle_ns IS 'Time in which no kernel ran, ns.';
COMMENT ON COLUMN hta_temporal.compute_ns IS 'Time in which a computation kernel ran, ns.';
COMMENT ON COLUMN hta_temporal.non_compute_ns IS 'Time in which only communication or memory kernels ran, ns.';
COMMENT ON COLUMN hta_temporal.kernel_ns IS 'From the first kernel''s start to the last one''s end, ns.';
