-- Requests of one device, as the program made them: what a replay feeds to an allocator.
--
-- Frees: an allocator completes a free by itself. Only where the recording shows the completion later than the request
-- (another stream held the block) a record_stream on the unknown stream (-1) keeps the block until free_completed.
-- empty_cache is in no recording. A run of segment_free entries is one where its stack says so, or where it neither makes
-- room for a segment nor ends in an out-of-memory error, or, without stacks, where the segment that follows would have
-- fitted without it.
WITH chosen AS MATERIALIZED (
  SELECT *
  FROM events
  WHERE run_id = $run_id AND rank = $rank AND device_type = $device_type AND device_index = $device_index
    AND action IN ('alloc', 'free_requested', 'free_completed', 'oom',
                   'segment_alloc', 'segment_map', 'segment_free', 'segment_unmap')
),
facts AS (
  SELECT count(*) FILTER (action = 'free_completed') > 0 AS shows_completions, max(reserved_bytes) AS peak_reserved
  FROM chosen
),
frees AS (
  SELECT
    alloc_id,
    min(seq) FILTER (action = 'free_requested') AS requested_seq,
    min(seq) FILTER (action = 'free_completed') AS completed_seq
  FROM chosen
  WHERE action IN ('free_requested', 'free_completed') AND alloc_id IS NOT NULL
  GROUP BY alloc_id
),
neighbours AS (
  SELECT
    *,
    lag(action) OVER entry IN ('segment_free', 'segment_unmap') AS goes_on,
    lead(seq) OVER entry AS next_seq
  FROM chosen
  WINDOW entry AS (ORDER BY seq)
),
frames AS (
  SELECT
    stack_id,
    coalesce(
      list_filter(stacks.frames, lambda f: ends_with(f.filename, '.py') AND NOT contains(f.filename, '/torch/'))[1],
      list_filter(stacks.frames, lambda f: f.line > 0)[1]
    ) AS place,
    len(list_filter(stacks.frames, lambda f: f.name ILIKE '%empty%cache%')) > 0 AS empties
  FROM stacks
  WHERE run_id = $run_id AND rank = $rank
),
releases AS (
  SELECT *, sum(CASE WHEN coalesce(goes_on, false) THEN 0 ELSE 1 END) OVER (ORDER BY seq) AS burst
  FROM neighbours
  WHERE action IN ('segment_free', 'segment_unmap') AND NOT inferred
),
bursts AS (
  SELECT
    min(seq) AS seq,
    max(next_seq) AS next_seq,
    arg_min(reserved_bytes + requested_bytes, seq) AS reserved_before,
    arg_min(stack_id, seq) AS stack_id,
    list(DISTINCT pool_id) FILTER (pool_id <> '0:0') AS pools
  FROM releases
  GROUP BY burst
),
emptied AS (
  SELECT bursts.seq, bursts.pools
  FROM bursts
  CROSS JOIN facts
  LEFT JOIN frames ON frames.stack_id = bursts.stack_id
  LEFT JOIN chosen AS following ON following.seq = bursts.next_seq
  WHERE frames.empties
    OR following.action IS NULL
    OR following.action NOT IN ('oom', 'segment_alloc', 'segment_map')
    OR (
      frames.empties IS NULL AND following.action <> 'oom'
      AND reserved_before + following.requested_bytes <= peak_reserved
    )
),
requests AS (
  SELECT seq, 2 AS part, 'alloc' AS action, alloc_id, coalesce(requested_bytes, block_bytes) AS bytes, stream, pool_id
  FROM chosen
  WHERE action = 'alloc'
  UNION ALL
  SELECT seq, 0, 'record_stream', alloc_id, NULL, -1, pool_id
  FROM neighbours
  JOIN frees USING (alloc_id)
  CROSS JOIN facts
  WHERE action = 'free_requested' AND shows_completions
    AND (completed_seq IS NULL OR completed_seq <> next_seq)
  UNION ALL
  SELECT seq, 1, 'free_requested', alloc_id, NULL, stream, pool_id
  FROM chosen
  JOIN frees USING (alloc_id)
  WHERE action = 'free_requested' OR (action = 'free_completed' AND requested_seq IS NULL)
  UNION ALL
  SELECT chosen.seq, 1, 'free_completed', alloc_id, NULL, chosen.stream, chosen.pool_id
  FROM chosen
  JOIN frees USING (alloc_id)
  JOIN neighbours AS request ON request.seq = frees.requested_seq
  WHERE chosen.action = 'free_completed' AND request.next_seq <> chosen.seq
  UNION ALL
  SELECT seq, 1, 'oom', NULL, coalesce(requested_bytes, block_bytes), stream, pool_id
  FROM chosen
  WHERE action = 'oom'
  UNION ALL
  SELECT seq, 0, CASE WHEN pool LIKE '0:%' THEN 'delete_pool' ELSE 'delete_graph' END, NULL, NULL, NULL, pool
  FROM (SELECT seq, unnest(pools) AS pool FROM emptied)
  UNION ALL
  SELECT seq, 1, 'empty_cache', NULL, NULL, NULL, NULL
  FROM emptied
)
SELECT
  requests.seq,
  requests.action,
  requests.alloc_id,
  requests.bytes,
  requests.stream,
  requests.pool_id,
  chosen.step,
  chosen.phase,
  chosen.category,
  coalesce(
    op.name,
    span.name,
    place.name || ' (' || regexp_extract(place.filename, '[^/\\]*$') || ':' || place.line || ')'
  ) AS op
FROM requests
JOIN chosen ON chosen.seq = requests.seq
LEFT JOIN spans AS span
  ON span.run_id = $run_id AND span.rank = $rank AND span.span_id = chosen.span_id
LEFT JOIN spans AS op ON op.run_id = $run_id AND op.rank = $rank AND op.span_id = span.op_id
LEFT JOIN frames ON frames.stack_id = chosen.stack_id
ORDER BY requests.seq, requests.part
