-- One row for each memory pool on each device: what private pools (CUDA graphs) hold.
-- example: SELECT pool_id, at_peak_bytes, reserved_end_bytes FROM pools ORDER BY at_peak_bytes DESC, pool_id

CREATE VIEW pools AS
WITH held AS (
  SELECT
    l.run_id,
    l.rank,
    l.device_type,
    l.device_index,
    l.pool_id AS pool_id,
    count(*) AS allocations,
    CAST(sum(l.bytes) AS BIGINT) AS total_bytes,
    max(l.bytes) AS largest_bytes,
    CAST(coalesce(sum(l.bytes) FILTER (WHERE l.start_seq <= p.peak_allocated_seq AND (l.end_seq IS NULL OR l.end_seq > p.peak_allocated_seq)), 0) AS BIGINT) AS at_peak_bytes,
    count(*) FILTER (WHERE l.start_seq <= p.peak_allocated_seq AND (l.end_seq IS NULL OR l.end_seq > p.peak_allocated_seq)) AS at_peak_allocations,
    CAST(coalesce(sum(l.bytes) FILTER (WHERE l.end_seq IS NULL), 0) AS BIGINT) AS at_end_bytes,
    count(*) FILTER (WHERE l.end_seq IS NULL) AS at_end_allocations
  FROM lifetimes AS l
  JOIN peaks AS p
    ON p.run_id = l.run_id AND p.rank = l.rank
    AND p.device_type = l.device_type AND p.device_index = l.device_index
  GROUP BY ALL
),
kept AS (
  SELECT
    run_id, rank, device_type, device_index, pool_id,
    CAST(sum(total_bytes) AS BIGINT) AS reserved_end_bytes,
    CAST(sum(total_bytes - active_bytes) AS BIGINT) AS unused_end_bytes
  FROM segments
  GROUP BY ALL
)
SELECT
  coalesce(h.run_id, k.run_id) AS run_id,
  coalesce(h.rank, k.rank) AS rank,
  coalesce(h.device_type, k.device_type) AS device_type,
  coalesce(h.device_index, k.device_index) AS device_index,
  coalesce(h.pool_id, k.pool_id) AS pool_id,
  coalesce(h.allocations, 0) AS allocations,
  coalesce(h.total_bytes, 0) AS total_bytes,
  coalesce(h.largest_bytes, 0) AS largest_bytes,
  coalesce(h.at_peak_bytes, 0) AS at_peak_bytes,
  coalesce(h.at_peak_allocations, 0) AS at_peak_allocations,
  coalesce(h.at_end_bytes, 0) AS at_end_bytes,
  coalesce(h.at_end_allocations, 0) AS at_end_allocations,
  k.reserved_end_bytes,
  k.unused_end_bytes
FROM held AS h
FULL JOIN kept AS k
  ON k.run_id = h.run_id AND k.rank = h.rank AND k.device_type = h.device_type
  AND k.device_index = h.device_index AND k.pool_id IS NOT DISTINCT FROM h.pool_id;

COMMENT ON VIEW pools IS 'Memory by pool: everything allocated, alive at the peak, alive at the end.';
COMMENT ON COLUMN pools.run_id IS 'Run, see runs.';
COMMENT ON COLUMN pools.rank IS 'Rank, see runs.';
COMMENT ON COLUMN pools.device_type IS 'Device type, see devices.';
COMMENT ON COLUMN pools.device_index IS 'Device index, see devices.';
COMMENT ON COLUMN pools.pool_id IS 'Memory pool as a:b, 0:0 is the default pool; null where unknown.';
COMMENT ON COLUMN pools.allocations IS 'Allocations made, memory that was there before included.';
COMMENT ON COLUMN pools.total_bytes IS 'Sum of their bytes, however short they lived.';
COMMENT ON COLUMN pools.largest_bytes IS 'Largest single allocation, bytes.';
COMMENT ON COLUMN pools.at_peak_bytes IS 'Bytes alive at the allocated peak of the device; over all rows of a device they add up to it.';
COMMENT ON COLUMN pools.at_peak_allocations IS 'Allocations alive there.';
COMMENT ON COLUMN pools.at_end_bytes IS 'Bytes alive at the end of the recording.';
COMMENT ON COLUMN pools.at_end_allocations IS 'Allocations alive at the end.';
COMMENT ON COLUMN pools.reserved_end_bytes IS 'Segment bytes of the pool at the end of the recording; null where the source holds no segments.';
COMMENT ON COLUMN pools.unused_end_bytes IS 'Of these, bytes that no allocation uses: stranded in the pool while others ask the device; null where unknown.';
