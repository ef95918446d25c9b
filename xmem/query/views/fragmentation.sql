-- One row for each device: how much of what the allocator reserved nobody could use.
-- example: SELECT device_type, device_index, peak_reserved_bytes, unused_bytes, fragmentation FROM fragmentation ORDER BY ALL

CREATE VIEW fragmentation AS
WITH grown AS (
  SELECT
    run_id, rank, device_type, device_index,
    count(*) AS segment_allocs,
    count(*) FILTER (WHERE unused_bytes - bytes >= bytes) AS avoidable_segment_allocs,
    CAST(coalesce(sum(bytes) FILTER (WHERE unused_bytes - bytes >= bytes), 0) AS BIGINT) AS avoidable_bytes
  FROM segments_over_time
  WHERE action IN ('segment_alloc', 'segment_map') AND NOT preexisting
  GROUP BY ALL
),
free AS (
  SELECT
    s.run_id, s.rank, s.device_type, s.device_index,
    CAST(sum(b.block_bytes) AS BIGINT) AS free_end_bytes,
    count(*) AS free_end_blocks,
    max(b.block_bytes) AS largest_free_end_bytes
  FROM blocks AS b
  JOIN segments AS s USING (run_id, rank, segment_id)
  WHERE b.state = 'inactive'
  GROUP BY ALL
)
SELECT
  p.run_id,
  p.rank,
  p.device_type,
  p.device_index,
  p.peak_reserved_bytes,
  p.peak_allocated_bytes,
  e.active_bytes AS active_at_peak_bytes,
  p.peak_reserved_bytes - e.active_bytes AS unused_bytes,
  CASE WHEN p.peak_reserved_bytes > 0 THEN (p.peak_reserved_bytes - e.active_bytes) / p.peak_reserved_bytes END AS fragmentation,
  p.peak_reserved_bytes - p.peak_allocated_bytes AS cache_bytes,
  g.segment_allocs,
  g.avoidable_segment_allocs,
  g.avoidable_bytes,
  f.free_end_bytes,
  f.free_end_blocks,
  f.largest_free_end_bytes
FROM peaks AS p
JOIN events AS e ON e.run_id = p.run_id AND e.rank = p.rank AND e.seq = p.peak_reserved_seq
LEFT JOIN grown AS g
  ON g.run_id = p.run_id AND g.rank = p.rank AND g.device_type = p.device_type AND g.device_index = p.device_index
LEFT JOIN free AS f
  ON f.run_id = p.run_id AND f.rank = p.rank AND f.device_type = p.device_type AND f.device_index = p.device_index
WHERE p.peak_reserved_bytes IS NOT NULL;

COMMENT ON VIEW fragmentation IS 'Fragmentation is the unused share of reserved memory at the moment when reserved memory first reached its peak.';
COMMENT ON COLUMN fragmentation.run_id IS 'Run, see runs.';
COMMENT ON COLUMN fragmentation.rank IS 'Rank, see runs.';
COMMENT ON COLUMN fragmentation.device_type IS 'Device type, see devices.';
COMMENT ON COLUMN fragmentation.device_index IS 'Device index, see devices.';
COMMENT ON COLUMN fragmentation.peak_reserved_bytes IS 'Largest reserved bytes.';
COMMENT ON COLUMN fragmentation.peak_allocated_bytes IS 'Largest allocated bytes, whenever that was.';
COMMENT ON COLUMN fragmentation.active_at_peak_bytes IS 'Active bytes when reserved first reached its peak.';
COMMENT ON COLUMN fragmentation.unused_bytes IS 'Reserved and not active bytes at that moment.';
COMMENT ON COLUMN fragmentation.fragmentation IS 'unused_bytes as a share of peak_reserved_bytes, 0 to 1.';
COMMENT ON COLUMN fragmentation.cache_bytes IS 'Peak reserved less peak allocated: what the allocator kept beyond what was ever needed at once.';
COMMENT ON COLUMN fragmentation.segment_allocs IS 'Times the allocator asked the device for memory; null where the source records totals only.';
COMMENT ON COLUMN fragmentation.avoidable_segment_allocs IS 'Of these, times when as many bytes or more lay unused, but in the wrong pieces, pool or stream.';
COMMENT ON COLUMN fragmentation.avoidable_bytes IS 'Bytes asked for at those times.';
COMMENT ON COLUMN fragmentation.free_end_bytes IS 'Bytes of inactive blocks at the end of the recording; null without a snapshot.';
COMMENT ON COLUMN fragmentation.free_end_blocks IS 'How many pieces these are.';
COMMENT ON COLUMN fragmentation.largest_free_end_bytes IS 'Largest piece.';
