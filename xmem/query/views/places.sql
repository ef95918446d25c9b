-- One row for each span: the operator and the module that memory allocated in it belongs to.
-- example: SELECT op, module, count(*) AS spans FROM places GROUP BY ALL ORDER BY spans DESC, op, module LIMIT 10

CREATE VIEW places AS
SELECT
  s.run_id,
  s.rank,
  s.span_id,
  coalesce(o.name, s.name) AS op,
  CASE WHEN s.kind = 'operator' THEN s.name END AS leaf_op,
  m.name AS module
FROM spans AS s
LEFT JOIN spans AS o ON o.run_id = s.run_id AND o.rank = s.rank AND o.span_id = s.op_id
LEFT JOIN spans AS m ON m.run_id = s.run_id AND m.rank = s.rank AND m.span_id = s.module_id;

COMMENT ON VIEW places IS 'Names for events.span_id: outermost operator, innermost operator, innermost module.';
COMMENT ON COLUMN places.run_id IS 'Run, see runs.';
COMMENT ON COLUMN places.rank IS 'Rank, see runs.';
COMMENT ON COLUMN places.span_id IS 'Span, see spans.';
COMMENT ON COLUMN places.op IS 'Outermost operator at or above the span, else the span''s own name.';
COMMENT ON COLUMN places.leaf_op IS 'Name of the span where it is an operator.';
COMMENT ON COLUMN places.module IS 'Innermost module call at or above the span; null where modules were not recorded.';
