-- One row for each device of each rank: its highest memory and when that was.
-- example: SELECT run_id, rank, device_type, device_index, peak_allocated_bytes, peak_allocated_step FROM peaks

CREATE VIEW peaks AS
WITH highest AS (
  SELECT
    run_id, rank, device_type, device_index,
    max(allocated_bytes) AS allocated_bytes,
    max(active_bytes) AS active_bytes,
    max(reserved_bytes) AS reserved_bytes,
    max(seq) AS last_seq
  FROM events
  GROUP BY ALL
),
moments AS (
  SELECT
    e.run_id, e.rank, e.device_type, e.device_index,
    min({'seq': e.seq, 'ts_ns': e.ts_ns, 'step': e.step, 'phase': e.phase})
      FILTER (WHERE e.allocated_bytes = h.allocated_bytes) AS allocated,
    min({'seq': e.seq, 'ts_ns': e.ts_ns}) FILTER (WHERE e.reserved_bytes = h.reserved_bytes) AS reserved,
    max({'seq': e.seq, 'allocated': e.allocated_bytes, 'active': e.active_bytes, 'reserved': e.reserved_bytes})
      FILTER (WHERE e.seq = h.last_seq) AS last
  FROM events AS e
  JOIN highest AS h
    ON h.run_id = e.run_id AND h.rank = e.rank
    AND h.device_type = e.device_type AND h.device_index = e.device_index
  WHERE e.allocated_bytes = h.allocated_bytes OR e.reserved_bytes = h.reserved_bytes OR e.seq = h.last_seq
  GROUP BY ALL
)
SELECT
  h.run_id,
  h.rank,
  h.device_type,
  h.device_index,
  h.allocated_bytes AS peak_allocated_bytes,
  m.allocated.seq AS peak_allocated_seq,
  m.allocated.ts_ns AS peak_allocated_ns,
  m.allocated.step AS peak_allocated_step,
  m.allocated.phase AS peak_allocated_phase,
  h.active_bytes AS peak_active_bytes,
  h.reserved_bytes AS peak_reserved_bytes,
  m.reserved.seq AS peak_reserved_seq,
  m.reserved.ts_ns AS peak_reserved_ns,
  m.last.allocated AS end_allocated_bytes,
  m.last.active AS end_active_bytes,
  m.last.reserved AS end_reserved_bytes
FROM highest AS h
JOIN moments AS m USING (run_id, rank, device_type, device_index);

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
