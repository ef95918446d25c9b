-- The peak of the first step against that of the steps after it: one-time memory (autotuning, lazy state) stands out.
WITH chosen AS (
  SELECT *, row_number() OVER (ORDER BY step) AS place
  FROM steps
  WHERE run_id = $run AND rank = $rank AND device_type = $device_type AND device_index = $device_index
),
first_peak AS (SELECT peak_seq AS seq, peak_allocated_bytes, peak_reserved_bytes FROM chosen WHERE place = 1),
steady_peak AS (
  SELECT peak_seq AS seq, peak_allocated_bytes, peak_reserved_bytes FROM chosen
  WHERE place > 1 ORDER BY peak_allocated_bytes DESC, step LIMIT 1
),
alive AS (
  SELECT
    l.category,
    coalesce(sum(l.bytes) FILTER (WHERE l.start_seq <= f.seq AND (l.end_seq IS NULL OR l.end_seq > f.seq)), 0) AS first_step_bytes,
    coalesce(sum(l.bytes) FILTER (WHERE l.start_seq <= z.seq AND (l.end_seq IS NULL OR l.end_seq > z.seq)), 0) AS steady_bytes
  FROM lifetimes AS l CROSS JOIN first_peak AS f CROSS JOIN steady_peak AS z
  WHERE l.run_id = $run AND l.rank = $rank AND l.device_type = $device_type AND l.device_index = $device_index
  GROUP BY l.category
),
listed AS (
  SELECT 0 AS part, 'peak allocated' AS what, f.peak_allocated_bytes AS first_step_bytes, z.peak_allocated_bytes AS steady_bytes
  FROM first_peak AS f CROSS JOIN steady_peak AS z
  UNION ALL
  SELECT 1, 'peak reserved', f.peak_reserved_bytes, z.peak_reserved_bytes FROM first_peak AS f CROSS JOIN steady_peak AS z
  UNION ALL
  SELECT 2, coalesce(category, 'unknown'), first_step_bytes, steady_bytes FROM alive
  WHERE first_step_bytes > 0 OR steady_bytes > 0
)
SELECT
  what,
  CAST(first_step_bytes AS BIGINT) AS first_step_bytes,
  CAST(steady_bytes AS BIGINT) AS steady_bytes,
  CAST(first_step_bytes - steady_bytes AS BIGINT) AS difference_bytes
FROM listed
ORDER BY part, steady_bytes DESC, what
