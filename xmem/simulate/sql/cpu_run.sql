-- A CPU run of the store as lifetimes and operators, the form in which rules and extrapolation see it.
CREATE OR REPLACE TEMP TABLE {allocations} AS
WITH chosen AS (SELECT * FROM events WHERE run_id = $run_id AND rank = $rank AND device_type = 'cpu' AND alloc_id IS NOT NULL)
SELECT made.alloc_id, coalesce(made.requested_bytes, made.block_bytes) AS bytes, made.ts_ns AS from_ns, made.seq AS from_seq,
  ended.ts_ns AS until_ns, ended.seq AS until_seq, made.span_id, made.step, made.phase, made.category
FROM (FROM chosen WHERE action = 'alloc') made
LEFT JOIN (SELECT alloc_id, min(ts_ns) AS ts_ns, min(seq) AS seq FROM chosen WHERE action = 'free_requested' GROUP BY alloc_id) ended USING (alloc_id);

CREATE OR REPLACE TEMP TABLE {operators} AS
SELECT s.span_id, s.name, s.ts_ns AS from_ns, s.ts_ns + s.dur_ns AS until_ns, made.phase, made.step,
  from_json(s.input_shapes, '[["BIGINT"]]') AS shapes, from_json(s.input_strides, '[["BIGINT"]]') AS strides,
  from_json(s.input_types, '["VARCHAR"]') AS types, from_json(s.concrete_inputs, '["VARCHAR"]') AS concrete
FROM (FROM spans WHERE run_id = $run_id AND rank = $rank AND kind = 'operator') s
LEFT JOIN (SELECT span_id, max(phase) AS phase, max(step) AS step FROM {allocations} GROUP BY span_id) made USING (span_id);
