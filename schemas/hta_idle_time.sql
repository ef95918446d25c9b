-- One row is why one stream was idle, by holistic-trace-analysis (`xmem ingest --hta`).

CREATE TABLE hta_idle_time (
  run_id VARCHAR NOT NULL,
  rank INTEGER NOT NULL,
  stream BIGINT NOT NULL,
  idle_category VARCHAR NOT NULL,
  idle_ns BIGINT NOT NULL,
  share DOUBLE
);
COMMENT ON TABLE hta_idle_time IS 'Idle time of each stream by cause.';
COMMENT ON COLUMN hta_idle_time.run_id IS 'Run, see runs.';
COMMENT ON COLUMN hta_idle_time.rank IS 'Rank, see runs.';
COMMENT ON COLUMN hta_idle_time.stream IS 'Stream, see spans.';
COMMENT ON COLUMN hta_idle_time.idle_category IS 'host_wait (the CPU was late), kernel_wait (between kernels that were queued) or other.';
COMMENT ON COLUMN hta_idle_time.idle_ns IS 'Idle time, ns.';
COMMENT ON COLUMN hta_idle_time.share IS 'Share of the stream''s idle time, 0 to 1.';
