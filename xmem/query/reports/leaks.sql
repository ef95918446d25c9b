-- Memory that steps leave behind: allocations that outlive their step and are never freed, those of many steps first.
WITH last_step AS (
  SELECT max(step) AS step FROM growth
  WHERE run_id = $run AND rank = $rank AND device_type = $device_type AND device_index = $device_index
)
SELECT
  count(DISTINCT g.step) AS steps,
  g.category, g.op, g.module,
  s.frame || coalesce(' (' || parse_filename(s.filename) || ':' || s.line || ')', '') AS code,
  CAST(sum(g.kept_bytes) AS BIGINT) AS kept_bytes,
  CAST(sum(g.kept_bytes) // count(DISTINCT g.step) AS BIGINT) AS per_step_bytes,
  min(g.step) AS first_step,
  max(g.step) AS last_step
FROM growth AS g
CROSS JOIN last_step AS z
LEFT JOIN own_frames AS s ON s.run_id = g.run_id AND s.rank = g.rank AND s.stack_id = g.stack_id
WHERE g.run_id = $run AND g.rank = $rank AND g.device_type = $device_type AND g.device_index = $device_index
  AND g.kept_bytes > 0 AND g.step < z.step
GROUP BY g.category, g.op, g.module, code
ORDER BY steps DESC, kept_bytes DESC, category, op, module, code
LIMIT $top
