-- One row for each device of each rank: its highest memory and when that was.
-- example: SELECT run_id, rank, device_type, device_index, peak_allocated_bytes, peak_allocated_step FROM peaks ORDER BY ALL

-- The first event at the highest level comes from one scan: level * 2^62 - seq is greatest there.

CREATE VIEW peaks AS
WITH scanned AS (
  SELECT
    run_id, rank, device_type, device_index,
    max(allocated_bytes) AS allocated_bytes,
    max(active_bytes) AS active_bytes,
    max(reserved_bytes) AS reserved_bytes,
    max(CAST(allocated_bytes AS HUGEINT) * (1::HUGEINT << 62) - seq) AS allocated_first,
    max(CAST(reserved_bytes AS HUGEINT) * (1::HUGEINT << 62) - seq) AS reserved_first,
    max(seq) AS last_seq
  FROM events
  GROUP BY ALL
),
highest AS (
  SELECT
    * EXCLUDE (allocated_first, reserved_first),
    CAST(CAST(allocated_bytes AS HUGEINT) * (1::HUGEINT << 62) - allocated_first AS BIGINT) AS allocated_seq,
    CAST(CAST(reserved_bytes AS HUGEINT) * (1::HUGEINT << 62) - reserved_first AS BIGINT) AS reserved_seq
  FROM scanned
),
wanted AS (
  SELECT *, unnest(list_distinct([allocated_seq, reserved_seq, last_seq])) AS seq FROM highest
)
SELECT
  w.run_id,
  w.rank,
  w.device_type,
  w.device_index,
  w.allocated_bytes AS peak_allocated_bytes,
  w.allocated_seq AS peak_allocated_seq,
  max(e.ts_ns) FILTER (WHERE e.seq = w.allocated_seq) AS peak_allocated_ns,
  max(e.step) FILTER (WHERE e.seq = w.allocated_seq) AS peak_allocated_step,
  max(e.phase) FILTER (WHERE e.seq = w.allocated_seq) AS peak_allocated_phase,
  w.active_bytes AS peak_active_bytes,
  w.reserved_bytes AS peak_reserved_bytes,
  w.reserved_seq AS peak_reserved_seq,
  max(e.ts_ns) FILTER (WHERE e.seq = w.reserved_seq) AS peak_reserved_ns,
  max(e.allocated_bytes) FILTER (WHERE e.seq = w.last_seq) AS end_allocated_bytes,
  max(e.active_bytes) FILTER (WHERE e.seq = w.last_seq) AS end_active_bytes,
  max(e.reserved_bytes) FILTER (WHERE e.seq = w.last_seq) AS end_reserved_bytes
FROM wanted AS w
JOIN events AS e ON e.run_id = w.run_id AND e.rank = w.rank AND e.seq = w.seq
WHERE w.allocated_bytes IS NOT NULL
GROUP BY w.run_id, w.rank, w.device_type, w.device_index, w.allocated_bytes, w.allocated_seq, w.active_bytes,
  w.reserved_bytes, w.reserved_seq;

COMMENT ON VIEW peaks IS 'Highest and final memory of each device, and the event at which the highest was reached first.';
COMMENT ON COLUMN peaks.run_id IS 'Run, see runs.';
COMMENT ON COLUMN peaks.rank IS 'Rank, see runs.';
COMMENT ON COLUMN peaks.device_type IS 'Device type, see devices.';
COMMENT ON COLUMN peaks.device_index IS 'Device index, see devices.';
COMMENT ON COLUMN peaks.peak_allocated_bytes IS 'Largest allocated_bytes of the timeline; for a snapshot a least figure, see events.block_bytes (xmem simulate counts whole blocks).';
COMMENT ON COLUMN peaks.peak_allocated_seq IS 'Event that reached it first, see events.';
COMMENT ON COLUMN peaks.peak_allocated_ns IS 'Time of that event, ns, see runs.time_base.';
COMMENT ON COLUMN peaks.peak_allocated_step IS 'Training step of that event.';
COMMENT ON COLUMN peaks.peak_allocated_phase IS 'Part of the step of that event, see the type phase.';
COMMENT ON COLUMN peaks.peak_active_bytes IS 'Largest active_bytes of the timeline.';
COMMENT ON COLUMN peaks.peak_reserved_bytes IS 'Largest reserved_bytes of the timeline; null where the source does not say.';
COMMENT ON COLUMN peaks.peak_reserved_seq IS 'Event that reached it first, see events; null where the source does not say.';
COMMENT ON COLUMN peaks.peak_reserved_ns IS 'Time of that event, ns; null where the source does not say.';
COMMENT ON COLUMN peaks.end_allocated_bytes IS 'Allocated bytes after the last event.';
COMMENT ON COLUMN peaks.end_active_bytes IS 'Active bytes after the last event.';
COMMENT ON COLUMN peaks.end_reserved_bytes IS 'Reserved bytes after the last event; null where the source does not say.';
