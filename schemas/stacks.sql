-- One row is one distinct call stack.

CREATE TABLE stacks (
  run_id VARCHAR NOT NULL,
  rank INTEGER NOT NULL,
  stack_id BIGINT NOT NULL,
  frames STRUCT(name VARCHAR, filename VARCHAR, line INTEGER)[] NOT NULL
);
COMMENT ON TABLE stacks IS 'Distinct call stacks; events, segments and blocks name them by stack_id.';
COMMENT ON COLUMN stacks.run_id IS 'Run, see runs.';
COMMENT ON COLUMN stacks.rank IS 'Rank, see runs.';
COMMENT ON COLUMN stacks.stack_id IS 'Number of the stack within run and rank.';
COMMENT ON COLUMN stacks.frames IS 'Frames, innermost first: function, file and line (0 where unknown).';
