-- Device time by kernel, and which kernels ran when memory was highest.
SELECT
  name, kind, any_value(op ORDER BY op) AS op, count(*) AS launches,
  CAST(sum(dur_ns) AS BIGINT) AS duration_ns,
  sum(dur_ns) / nullif(sum(sum(dur_ns)) OVER (), 0) AS share,
  bool_or(at_peak) AS at_peak
FROM kernels
WHERE run_id = $run AND rank = $rank AND device_index = $device_index
GROUP BY name, kind
ORDER BY at_peak DESC, duration_ns DESC, name
LIMIT $top
