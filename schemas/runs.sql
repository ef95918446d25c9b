-- One row for each source file: one run with one rank, or one rank of a run that has several.

CREATE TABLE runs (
  run_id VARCHAR NOT NULL,
  rank INTEGER NOT NULL,
  name VARCHAR NOT NULL,
  source_file VARCHAR NOT NULL,
  source_sha256 VARCHAR NOT NULL,
  source_bytes BIGINT NOT NULL,
  adapter VARCHAR NOT NULL,
  schema_version INTEGER NOT NULL,
  xmem_version VARCHAR NOT NULL,
  ingested_ns BIGINT NOT NULL,
  torch_version VARCHAR,
  alloc_conf VARCHAR,
  allocator_settings VARCHAR,
  time_base VARCHAR NOT NULL,
  first_ts_ns BIGINT,
  last_ts_ns BIGINT,
  baseline_bytes BIGINT NOT NULL,
  ring_buffer BOOLEAN NOT NULL,
  truncated BOOLEAN NOT NULL,
  source_entries BIGINT NOT NULL,
  event_count BIGINT NOT NULL,
  memory_event_count BIGINT NOT NULL,
  span_count BIGINT NOT NULL,
  stack_count BIGINT NOT NULL,
  metadata VARCHAR,
  filters VARCHAR
);
COMMENT ON TABLE runs IS 'Where each run came from, what recorded it, and how much there is of it.';
COMMENT ON COLUMN runs.run_id IS 'Short stable hash of the content; also the partition key of every table.';
COMMENT ON COLUMN runs.rank IS 'Rank of the process in its job; 0 where the source does not say.';
COMMENT ON COLUMN runs.name IS 'Readable name: stem of the file, or the name of the folder of ranks.';
COMMENT ON COLUMN runs.source_file IS 'File name of the source, without its folder; - for standard input.';
COMMENT ON COLUMN runs.source_sha256 IS 'SHA-256 of the source''s bytes as they lay on disk, in hexadecimal.';
COMMENT ON COLUMN runs.source_bytes IS 'Size of the source on disk, bytes.';
COMMENT ON COLUMN runs.adapter IS 'Name of the adapter that read it.';
COMMENT ON COLUMN runs.schema_version IS 'Version of this schema that the rows were written with.';
COMMENT ON COLUMN runs.xmem_version IS 'Version of xmem that wrote the rows.';
COMMENT ON COLUMN runs.ingested_ns IS 'When it was ingested, Unix time in nanoseconds.';
COMMENT ON COLUMN runs.torch_version IS 'torch version as the source states it; null where it does not.';
COMMENT ON COLUMN runs.alloc_conf IS 'PYTORCH_ALLOC_CONF text in force while recording; null where unknown.';
COMMENT ON COLUMN runs.allocator_settings IS 'Allocator settings of a snapshot as JSON text; null elsewhere.';
COMMENT ON COLUMN runs.time_base IS 'Meaning of ts_ns: unix (Unix time), relative (to an unknown start) or index (the source has no times: the entry''s number stands in).';
COMMENT ON COLUMN runs.first_ts_ns IS 'Time of the first recorded event, ns.';
COMMENT ON COLUMN runs.last_ts_ns IS 'Time of the last recorded event, ns.';
COMMENT ON COLUMN runs.baseline_bytes IS 'Memory that was allocated before the recording, all devices, bytes; its rows in events are marked inferred.';
COMMENT ON COLUMN runs.ring_buffer IS 'True where the recording kept only its newest entries.';
COMMENT ON COLUMN runs.truncated IS 'True where the end of the file is missing.';
COMMENT ON COLUMN runs.source_entries IS 'Records in the source that speak of memory, unknown and broken ones included: [memory] and [OutOfMemory] events of a trace, device trace entries of a snapshot, rows of a timeline or log.';
COMMENT ON COLUMN runs.event_count IS 'Rows in events, inferred ones included.';
COMMENT ON COLUMN runs.memory_event_count IS 'Records read as allocations and frees: [memory] events of a trace, alloc and free entries elsewhere.';
COMMENT ON COLUMN runs.span_count IS 'Rows in spans.';
COMMENT ON COLUMN runs.stack_count IS 'Rows in stacks.';
COMMENT ON COLUMN runs.metadata IS 'Other header fields of the source as JSON text (host name, distributedInfo, profiler switches).';
COMMENT ON COLUMN runs.filters IS 'Filters given at ingest as JSON text; null where the whole file was read.';
