-- One row for each kernel, copy or fill that ran on a device, with the operator that launched it.
-- example: SELECT name, count(*) AS launches, sum(dur_ns) AS dur_ns FROM kernels GROUP BY name ORDER BY dur_ns DESC, name LIMIT 10

CREATE VIEW kernels AS
WITH launches AS (
  SELECT run_id, rank, correlation_id, min(span_id) AS span_id
  FROM spans
  WHERE kind = 'runtime' AND correlation_id IS NOT NULL AND correlation_id <> 0
  GROUP BY ALL
),
highest AS (
  SELECT p.run_id, p.rank, p.device_index, p.peak_allocated_ns AS ns, s.op_id
  FROM peaks AS p
  JOIN events AS e ON e.run_id = p.run_id AND e.rank = p.rank AND e.seq = p.peak_allocated_seq
  LEFT JOIN spans AS s ON s.run_id = e.run_id AND s.rank = e.rank AND s.span_id = e.span_id
  WHERE p.device_type <> 'cpu'
)
SELECT
  k.run_id,
  k.rank,
  k.span_id,
  k.kind,
  k.name,
  k.device_index,
  k.stream,
  k.ts_ns,
  k.dur_ns,
  n.op,
  n.module,
  r.ts_ns AS launched_ns,
  coalesce(k.ts_ns <= p.ns AND k.ts_ns + k.dur_ns > p.ns OR r.op_id = p.op_id, false) AS at_peak
FROM spans AS k
LEFT JOIN launches AS l ON l.run_id = k.run_id AND l.rank = k.rank AND l.correlation_id = k.correlation_id
LEFT JOIN spans AS r ON r.run_id = l.run_id AND r.rank = l.rank AND r.span_id = l.span_id
LEFT JOIN places AS n ON n.run_id = l.run_id AND n.rank = l.rank AND n.span_id = l.span_id
LEFT JOIN highest AS p ON p.run_id = k.run_id AND p.rank = k.rank AND p.device_index = k.device_index
WHERE k.kind IN ('kernel', 'memcpy', 'memset');

COMMENT ON VIEW kernels IS 'Device activity with the operator behind it; empty for traces without a GPU.';
COMMENT ON COLUMN kernels.run_id IS 'Run, see runs.';
COMMENT ON COLUMN kernels.rank IS 'Rank, see runs.';
COMMENT ON COLUMN kernels.span_id IS 'Span of the activity, see spans.';
COMMENT ON COLUMN kernels.kind IS 'kernel, memcpy or memset.';
COMMENT ON COLUMN kernels.name IS 'Name as recorded.';
COMMENT ON COLUMN kernels.device_index IS 'Device on which it ran.';
COMMENT ON COLUMN kernels.stream IS 'Stream on which it ran.';
COMMENT ON COLUMN kernels.ts_ns IS 'Start on the device, ns.';
COMMENT ON COLUMN kernels.dur_ns IS 'Duration on the device, ns.';
COMMENT ON COLUMN kernels.op IS 'Operator that launched it; null where the launch was not recorded.';
COMMENT ON COLUMN kernels.module IS 'Module around the launch; null where modules were not recorded.';
COMMENT ON COLUMN kernels.launched_ns IS 'When the host launched it, ns.';
COMMENT ON COLUMN kernels.at_peak IS 'True where it was running when the allocated peak of its device was reached, or was launched by the operator that reached it.';
