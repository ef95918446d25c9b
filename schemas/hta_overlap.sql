-- One row is how much communication one rank hides behind computation (`xmem ingest --hta`).

CREATE TABLE hta_overlap (
  run_id VARCHAR NOT NULL,
  rank INTEGER NOT NULL,
  overlap_share DOUBLE
);
COMMENT ON TABLE hta_overlap IS 'Overlap of communication with computation, by holistic-trace-analysis.';
COMMENT ON COLUMN hta_overlap.run_id IS 'Run, see runs.';
COMMENT ON COLUMN hta_overlap.rank IS 'Rank, see runs.';
COMMENT ON COLUMN hta_overlap.overlap_share IS 'Share of the communication time in which computation ran too, 0 to 1; null where nothing was communicated.';
