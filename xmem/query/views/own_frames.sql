-- One row for each call stack: the innermost frame that is the program's own.
-- example: SELECT stack_id, frame, filename, line FROM own_frames ORDER BY run_id, rank, stack_id LIMIT 10

CREATE VIEW own_frames AS
WITH chosen AS (
  SELECT
    run_id, rank, stack_id,
    coalesce(
      list_filter(frames, lambda f: f.filename LIKE '%.py' AND NOT regexp_matches(
        f.filename, '(^|[/\\])(torch|torchvision|site-packages|dist-packages|python[0-9.]*)[/\\]'
      ))[1],
      list_filter(frames, lambda f: f.filename LIKE '%.py')[1],
      frames[1]
    ) AS own
  FROM stacks
)
SELECT run_id, rank, stack_id, own.name AS frame, own.filename AS filename, own.line AS line
FROM chosen;

COMMENT ON VIEW own_frames IS 'The line of the program''s own code behind each call stack.';
COMMENT ON COLUMN own_frames.run_id IS 'Run, see runs.';
COMMENT ON COLUMN own_frames.rank IS 'Rank, see runs.';
COMMENT ON COLUMN own_frames.stack_id IS 'Stack, see stacks.';
COMMENT ON COLUMN own_frames.frame IS 'Function of the innermost Python frame outside of torch and installed packages, else of the innermost Python frame, else of the innermost frame.';
COMMENT ON COLUMN own_frames.filename IS 'File of that frame.';
COMMENT ON COLUMN own_frames.line IS 'Line of that frame.';
