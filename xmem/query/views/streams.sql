-- One row for each stream on each device: what each stream holds, and strands.
-- example: SELECT stream, at_peak_bytes, reserved_end_bytes, unused_end_bytes FROM streams ORDER BY at_peak_bytes DESC, stream

CREATE VIEW streams AS
WITH several AS (
  SELECT run_id, rank, device_type, device_index
  FROM lifetimes
  GROUP BY ALL
  HAVING min(coalesce(stream, -1)) < max(coalesce(stream, -1))
),
changes AS (
  SELECT l.run_id, l.rank, l.device_type, l.device_index, l.stream, l.start_seq AS seq, l.bytes
  FROM lifetimes AS l SEMI JOIN several USING (run_id, rank, device_type, device_index)
  UNION ALL
  SELECT l.run_id, l.rank, l.device_type, l.device_index, l.stream, l.end_seq, -l.bytes
  FROM lifetimes AS l SEMI JOIN several USING (run_id, rank, device_type, device_index)
  WHERE l.end_seq IS NOT NULL
),
own AS (
  SELECT run_id, rank, device_type, device_index, stream, CAST(max(level) AS BIGINT) AS peak_bytes
  FROM (
    SELECT *, sum(bytes) OVER (
      PARTITION BY run_id, rank, device_type, device_index, stream ORDER BY seq ROWS UNBOUNDED PRECEDING
    ) AS level
    FROM changes
  )
  GROUP BY ALL
),
held AS (
  SELECT
    l.run_id,
    l.rank,
    l.device_type,
    l.device_index,
    l.stream AS stream,
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
    run_id, rank, device_type, device_index, stream,
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
  coalesce(h.stream, k.stream) AS stream,
  coalesce(h.allocations, 0) AS allocations,
  coalesce(h.total_bytes, 0) AS total_bytes,
  coalesce(h.largest_bytes, 0) AS largest_bytes,
  coalesce(o.peak_bytes, p.peak_allocated_bytes) AS peak_bytes,
  coalesce(h.at_peak_bytes, 0) AS at_peak_bytes,
  coalesce(h.at_peak_allocations, 0) AS at_peak_allocations,
  coalesce(h.at_end_bytes, 0) AS at_end_bytes,
  coalesce(h.at_end_allocations, 0) AS at_end_allocations,
  k.reserved_end_bytes,
  k.unused_end_bytes
FROM held AS h
FULL JOIN kept AS k
  ON k.run_id = h.run_id AND k.rank = h.rank AND k.device_type = h.device_type
  AND k.device_index = h.device_index AND k.stream IS NOT DISTINCT FROM h.stream
LEFT JOIN own AS o
  ON o.run_id = h.run_id AND o.rank = h.rank AND o.device_type = h.device_type
  AND o.device_index = h.device_index AND o.stream IS NOT DISTINCT FROM h.stream
LEFT JOIN peaks AS p
  ON p.run_id = h.run_id AND p.rank = h.rank AND p.device_type = h.device_type AND p.device_index = h.device_index;

COMMENT ON VIEW streams IS 'Memory by stream: everything allocated, alive at the peak, alive at the end.';
COMMENT ON COLUMN streams.run_id IS 'Run, see runs.';
COMMENT ON COLUMN streams.rank IS 'Rank, see runs.';
COMMENT ON COLUMN streams.device_type IS 'Device type, see devices.';
COMMENT ON COLUMN streams.device_index IS 'Device index, see devices.';
COMMENT ON COLUMN streams.stream IS 'Stream handle, 0 is the default stream; null where unknown.';
COMMENT ON COLUMN streams.allocations IS 'Allocations made, memory that was there before included.';
COMMENT ON COLUMN streams.total_bytes IS 'Sum of their bytes, however short they lived.';
COMMENT ON COLUMN streams.largest_bytes IS 'Largest single allocation, bytes.';
COMMENT ON COLUMN streams.peak_bytes IS 'Largest sum of bytes that the stream itself held at once; null where it made no allocation.';
COMMENT ON COLUMN streams.at_peak_bytes IS 'Bytes alive at the allocated peak of the device; over all rows of a device they add up to it.';
COMMENT ON COLUMN streams.at_peak_allocations IS 'Allocations alive there.';
COMMENT ON COLUMN streams.at_end_bytes IS 'Bytes alive at the end of the recording.';
COMMENT ON COLUMN streams.at_end_allocations IS 'Allocations alive at the end.';
COMMENT ON COLUMN streams.reserved_end_bytes IS 'Segment bytes of the stream at the end of the recording; null where the source holds no segments.';
COMMENT ON COLUMN streams.unused_end_bytes IS 'Of these, bytes that no allocation uses: stranded in the stream while others ask the device; null where unknown.';
