-- One row is one change of the number of operations that wait on a stream (`xmem ingest --hta`).

CREATE TABLE hta_queue_length (
  run_id VARCHAR NOT NULL,
  rank INTEGER NOT NULL,
  ts_ns BIGINT NOT NULL,
  stream BIGINT NOT NULL,
  queue_length BIGINT NOT NULL
);
COMMENT ON TABLE hta_queue_length IS 'Launched and not yet finished operations of each stream over time, by holistic-trace-analysis.';
COMMENT ON COLUMN hta_queue_length.run_id IS 'Run, see runs.';
COMMENT ON COLUMN hta_queue_length.rank IS 'Rank, see runs.';
COMMENT ON COLUMN hta_queue_length.ts_ns IS 'Time, ns, same base as events.ts_ns; to the microsecond.';
COMMENT ON COLUMN hta_queue_length.stream IS 'Stream, see spans.';
COMMENT ON COLUMN hta_queue_length.queue_length IS 'Operations that wait or run from this time on.';
