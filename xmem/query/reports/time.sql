-- Time beside memory for each step: how long it took, how long the device worked, how much it held.
WITH busy AS (
  SELECT
    ts_ns + dur_ns AS end_ns,
    greatest(ts_ns, coalesce(max(ts_ns + dur_ns) OVER (
      ORDER BY ts_ns, dur_ns ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING
    ), ts_ns)) AS start_ns
  FROM kernels
  WHERE run_id = $run AND rank = $rank AND device_index = $device_index
),
bounds AS (
  SELECT
    CAST(regexp_extract(name, '^ProfilerStep#([0-9]+)$', 1) AS BIGINT) AS step,
    min(ts_ns) AS start_ns,
    max(ts_ns + dur_ns) AS end_ns
  FROM spans
  WHERE run_id = $run AND rank = $rank AND kind = 'step' AND regexp_matches(name, '^ProfilerStep#[0-9]+$')
  GROUP BY ALL
),
worked AS (
  SELECT
    b.step, b.start_ns, b.end_ns,
    CAST(coalesce(sum(least(k.end_ns, b.end_ns) - greatest(k.start_ns, b.start_ns)) FILTER (WHERE k.end_ns IS NOT NULL), 0) AS BIGINT) AS busy_ns
  FROM bounds AS b
  LEFT JOIN busy AS k ON k.start_ns < b.end_ns AND k.end_ns > b.start_ns AND k.end_ns > k.start_ns
  GROUP BY ALL
)
SELECT
  w.step,
  w.end_ns - w.start_ns AS duration_ns,
  w.busy_ns,
  w.end_ns - w.start_ns - w.busy_ns AS idle_ns,
  s.peak_allocated_bytes,
  s.peak_reserved_bytes
FROM worked AS w
LEFT JOIN steps AS s
  ON s.run_id = $run AND s.rank = $rank AND s.device_type = $device_type
  AND s.device_index = $device_index AND s.step = w.step
ORDER BY w.step
LIMIT $top
