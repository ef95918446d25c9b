-- Why each stream was idle, and the time and memory beside it (needs xmem ingest --hta).
SELECT
  i.stream,
  i.idle_category,
  i.idle_ns,
  i.share,
  k.busy_ns,
  k.launches,
  p.peak_allocated_bytes
FROM hta_idle_time AS i
LEFT JOIN (
  SELECT stream, CAST(sum(dur_ns) AS BIGINT) AS busy_ns, count(*) AS launches
  FROM kernels
  WHERE run_id = $run AND rank = $rank AND device_index = $device_index
  GROUP BY stream
) AS k ON k.stream = i.stream
LEFT JOIN peaks AS p
  ON p.run_id = i.run_id AND p.rank = i.rank AND p.device_type = $device_type AND p.device_index = $device_index
WHERE i.run_id = $run AND i.rank = $rank
ORDER BY i.idle_ns DESC, i.stream, i.idle_category
LIMIT $top
