-- What the highest memory is made of: every byte that was alive at the peak, by cause.
WITH parts AS (
  SELECT p.category, p.op, p.module, p.phase, s.frame, s.filename, s.line, sum(p.bytes) AS bytes, count(*) AS allocations
  FROM at_peak AS p
  LEFT JOIN own_frames AS s ON s.run_id = p.run_id AND s.rank = p.rank AND s.stack_id = p.stack_id
  WHERE p.run_id = $run AND p.rank = $rank AND p.device_type = $device_type AND p.device_index = $device_index
  GROUP BY ALL
),
ranked AS (
  SELECT *, row_number() OVER (ORDER BY bytes DESC, category, op, module, phase, frame, filename, line) AS place
  FROM parts
),
shown AS (
  SELECT
    CASE WHEN place <= $top THEN category ELSE '(others)' END AS category,
    CASE WHEN place <= $top THEN op END AS op,
    CASE WHEN place <= $top THEN module END AS module,
    CASE WHEN place <= $top THEN phase END AS phase,
    CASE WHEN place <= $top THEN frame || coalesce(' (' || parse_filename(filename) || ':' || line || ')', '') END AS code,
    CAST(sum(bytes) AS BIGINT) AS at_peak_bytes,
    CAST(sum(allocations) AS BIGINT) AS allocations,
    min(place) AS place
  FROM ranked
  GROUP BY least(place, $top + 1), 1, 2, 3, 4, 5
)
SELECT
  category, op, module, phase, code, at_peak_bytes,
  at_peak_bytes / sum(at_peak_bytes) OVER () AS share,
  allocations
FROM shown
ORDER BY place
