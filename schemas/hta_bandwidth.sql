-- One row is one change of the bandwidth of copies and memsets (`xmem ingest --hta`).

CREATE TABLE hta_bandwidth (
  run_id VARCHAR NOT NULL,
  rank INTEGER NOT NULL,
  ts_ns BIGINT NOT NULL,
  name VARCHAR NOT NULL,
  gigabytes_per_second DOUBLE
);
COMMENT ON TABLE hta_bandwidth IS 'Memory bandwidth over time, by holistic-trace-analysis.';
COMMENT ON COLUMN hta_bandwidth.run_id IS 'Run, see runs.';
COMMENT ON COLUMN hta_bandwidth.rank IS 'Rank, see runs.';
COMMENT ON COLUMN hta_bandwidth.ts_ns IS 'Time, ns, same base as events.ts_ns; to the microsecond.';
COMMENT ON COLUMN hta_bandwidth.name IS 'Kind of transfer: Memcpy HtoD, Memset, ...';
COMMENT ON COLUMN hta_bandwidth.gigabytes_per_second IS 'Bandwidth from this time on, 10^9 bytes per second.';
