-- The answer in five seconds: how much, when, who holds it, and what would help.
WITH device AS MATERIALIZED (
  SELECT p.*, d.total_bytes
  FROM peaks AS p
  LEFT JOIN devices AS d USING (run_id, rank, device_type, device_index)
  WHERE p.run_id = $run AND p.rank = $rank AND p.device_type = $device_type AND p.device_index = $device_index
),
alive AS MATERIALIZED (
  SELECT l.category, l.span_id, l.bytes
  FROM lifetimes AS l
  JOIN device AS p ON l.start_seq <= p.peak_allocated_seq AND (l.end_seq IS NULL OR l.end_seq > p.peak_allocated_seq)
  WHERE l.run_id = $run AND l.rank = $rank AND l.device_type = $device_type AND l.device_index = $device_index
),
held AS (
  SELECT coalesce(category, 'unknown') AS category, CAST(sum(bytes) AS BIGINT) AS bytes, count(*) AS allocations
  FROM alive GROUP BY 1
),
biggest AS (
  SELECT coalesce(o.name, s.name) AS op, CAST(sum(a.bytes) AS BIGINT) AS bytes
  FROM alive AS a
  JOIN spans AS s ON s.run_id = $run AND s.rank = $rank AND s.span_id = a.span_id
  LEFT JOIN spans AS o ON o.run_id = $run AND o.rank = $rank AND o.span_id = s.op_id
  GROUP BY 1 ORDER BY 2 DESC, 1 LIMIT 3
),
broken AS (
  SELECT d.peak_reserved_bytes - e.active_bytes AS unused_bytes, (d.peak_reserved_bytes - e.active_bytes) / d.peak_reserved_bytes AS fragmentation
  FROM device AS d
  JOIN events AS e ON e.run_id = $run AND e.rank = $rank AND e.seq = d.peak_reserved_seq
  WHERE d.peak_reserved_bytes > 0
),
marched AS (
  SELECT
    count(*) AS steps,
    min(step) AS first_step,
    arg_min(peak_allocated_bytes, step) AS first_bytes,
    max(peak_allocated_bytes) FILTER (WHERE place > 1) AS steady_bytes,
    count(*) FILTER (WHERE place > 2 AND growth_bytes > 0) AS growing,
    CAST(coalesce(sum(growth_bytes) FILTER (WHERE place > 2), 0) AS BIGINT) AS grown_bytes
  FROM (
    SELECT
      step, peak_allocated_bytes,
      end_bytes - lag(end_bytes) OVER (ORDER BY step) AS growth_bytes,
      row_number() OVER (ORDER BY step) AS place
    FROM (
      SELECT step, max(allocated_bytes) AS peak_allocated_bytes, arg_max(allocated_bytes, seq) AS end_bytes
      FROM events
      WHERE run_id = $run AND rank = $rank AND device_type = $device_type AND device_index = $device_index
        AND step IS NOT NULL
      GROUP BY step
    )
  )
),
failed AS (
  SELECT count(*) AS ooms, max(coalesce(requested_bytes, block_bytes)) AS largest_bytes FROM events
  WHERE run_id = $run AND rank = $rank AND device_type = $device_type AND device_index = $device_index AND action = 'oom'
),
listed AS (
  SELECT 10 AS place, 'peak allocated' AS what, peak_allocated_bytes AS bytes,
    concat_ws(', ', 'step ' || peak_allocated_step, peak_allocated_phase,
      CASE WHEN total_bytes > 0 THEN format('{:.0f} % of the device', 100.0 * peak_allocated_bytes / total_bytes) END) AS detail
  FROM device
  UNION ALL
  SELECT 11, 'peak reserved', peak_reserved_bytes,
    (SELECT format('{:.0f} % of it unused when it was reached', 100.0 * fragmentation) FROM broken)
  FROM device WHERE peak_reserved_bytes IS NOT NULL
  UNION ALL
  SELECT 12, 'first step', first_bytes, 'peak of step ' || first_step FROM marched WHERE steady_bytes IS NOT NULL
  UNION ALL
  SELECT 13, 'later steps', steady_bytes, 'highest peak of the ' || (steps - 1) || ' after it' FROM marched WHERE steady_bytes IS NOT NULL
  UNION ALL
  SELECT 14, 'out of memory', largest_bytes, ooms || ' in all; the largest request (xmem report oom)' FROM failed WHERE ooms > 0
  UNION ALL
  SELECT 20 + row_number() OVER (ORDER BY bytes DESC, category), category, bytes,
    format('{:.1f} % of the peak, {} allocations', 100.0 * bytes / nullif((SELECT peak_allocated_bytes FROM device), 0), allocations)
  FROM held
  UNION ALL
  SELECT 40 + row_number() OVER (ORDER BY bytes DESC, op), 'in ' || op, bytes,
    format('{:.1f} % of the peak', 100.0 * bytes / nullif((SELECT peak_allocated_bytes FROM device), 0))
  FROM biggest
  UNION ALL
  SELECT 60, 'would help', unused_bytes, 'PYTORCH_ALLOC_CONF=expandable_segments:True gives pieces back (xmem report fragmentation)'
  FROM broken WHERE fragmentation >= 0.1 AND unused_bytes >= 64 << 20
  UNION ALL
  SELECT 61, 'would help', bytes, 'activation checkpointing, a smaller batch or shorter sequences: activations lead'
  FROM held WHERE category = 'activation' AND bytes >= 0.4 * (SELECT peak_allocated_bytes FROM device)
  UNION ALL
  SELECT 62, 'would help', bytes, 'an optimizer with less state (8-bit Adam, Adafactor, SGD) or sharded state'
  FROM held WHERE category = 'optimizer_state' AND bytes >= 0.2 * (SELECT peak_allocated_bytes FROM device)
  UNION ALL
  SELECT 63, 'would help', bytes, 'zero_grad(set_to_none=True) before forward, or gradients in bf16'
  FROM held WHERE category = 'gradient' AND bytes >= 0.25 * (SELECT peak_allocated_bytes FROM device)
  UNION ALL
  SELECT 64, 'would help', first_bytes - steady_bytes, 'the first step needs more than the rest: cudnn.benchmark=False, or warm up with a small batch (xmem report first-step)'
  FROM marched WHERE first_bytes > 1.1 * steady_bytes
  UNION ALL
  SELECT 65, 'would help', grown_bytes, 'memory grows step by step: something keeps tensors alive (xmem report leaks)'
  FROM marched WHERE steps >= 4 AND growing >= steps - 2 AND grown_bytes > 0
)
SELECT what, bytes, detail FROM listed ORDER BY place, bytes DESC
