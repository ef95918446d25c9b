-- A CPU run of the store as lifetimes and operators, the form in which rules and extrapolation see it.
-- An allocation belongs to the innermost operator that is no mere factory: aten::empty inside aten::addmm belongs to aten::addmm.
CREATE OR REPLACE TEMP TABLE {operators}_owner AS
WITH RECURSIVE up AS (
  SELECT span_id AS start_id, span_id, parent_id, kind, name FROM spans WHERE run_id = $run_id AND rank = $rank AND kind = 'operator'
  UNION ALL
  SELECT up.start_id, s.span_id, s.parent_id, s.kind, s.name FROM up
  JOIN spans s ON s.run_id = $run_id AND s.rank = $rank AND s.span_id = up.parent_id
  WHERE s.kind = 'operator' AND up.name IN ('aten::empty', 'aten::empty_strided', 'aten::empty_like', 'aten::resize_', 'aten::new_empty',
    'aten::zeros', 'aten::zeros_like', 'aten::new_zeros', 'aten::new_empty_strided', 'aten::empty_permuted', 'aten::full', 'aten::ones')
)
SELECT start_id, arg_min(span_id, -depth) AS span_id FROM (
  SELECT start_id, span_id, row_number() OVER (PARTITION BY start_id ORDER BY span_id DESC) AS depth FROM up
) GROUP BY start_id;

CREATE OR REPLACE TEMP TABLE {allocations} AS
WITH chosen AS (SELECT * FROM events WHERE run_id = $run_id AND rank = $rank AND device_type = 'cpu' AND alloc_id IS NOT NULL)
SELECT made.alloc_id, coalesce(made.requested_bytes, made.block_bytes) AS bytes, made.ts_ns AS from_ns, made.seq AS from_seq,
  ended.ts_ns AS until_ns, ended.seq AS until_seq, coalesce(owner.span_id, made.span_id) AS span_id, made.step, made.phase, made.category
FROM (FROM chosen WHERE action = 'alloc') made
LEFT JOIN (SELECT alloc_id, min(ts_ns) AS ts_ns, min(seq) AS seq FROM chosen WHERE action = 'free_requested' GROUP BY alloc_id) ended USING (alloc_id)
LEFT JOIN {operators}_owner owner ON owner.start_id = made.span_id;

CREATE OR REPLACE TEMP TABLE {operators} AS
SELECT s.span_id, s.name, coalesce(outer_op.name, s.name) AS op, s.ts_ns AS from_ns, s.ts_ns + s.dur_ns AS until_ns, made.phase, made.step,
  from_json(s.input_shapes, '[["BIGINT"]]') AS shapes, from_json(s.input_strides, '[["BIGINT"]]') AS strides,
  from_json(s.input_types, '["VARCHAR"]') AS types, from_json(s.concrete_inputs, '["VARCHAR"]') AS concrete
FROM (FROM spans WHERE run_id = $run_id AND rank = $rank AND (kind = 'operator' OR name LIKE 'Optimizer.step#%')) s
LEFT JOIN (FROM spans WHERE run_id = $run_id AND rank = $rank) outer_op ON outer_op.span_id = s.op_id
LEFT JOIN (SELECT span_id, max(phase) AS phase, max(step) AS step FROM {allocations} GROUP BY span_id) made ON made.span_id = s.span_id;
