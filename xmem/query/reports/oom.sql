-- Out-of-memory errors in the recording: what was asked for, what was held, and why it did not fit.
WITH around AS (
  SELECT
    e.seq, e.ts_ns, e.step, e.phase, n.op, s.frame || coalesce(' (' || parse_filename(s.filename) || ':' || s.line || ')', '') AS code,
    coalesce(e.requested_bytes, e.block_bytes) AS requested_bytes,
    e.device_free AS device_free_bytes, e.allocated_bytes, e.active_bytes, e.reserved_bytes,
    e.reserved_bytes - e.active_bytes AS unused_bytes,
    e.active_bytes - e.allocated_bytes AS pending_bytes
  FROM events AS e
  LEFT JOIN places AS n ON n.run_id = e.run_id AND n.rank = e.rank AND n.span_id = e.span_id
  LEFT JOIN own_frames AS s ON s.run_id = e.run_id AND s.rank = e.rank AND s.stack_id = e.stack_id
  WHERE e.run_id = $run AND e.rank = $rank AND e.device_type = $device_type AND e.device_index = $device_index
    AND e.action = 'oom'
)
SELECT
  seq, step, phase, op, code, requested_bytes, device_free_bytes, allocated_bytes, reserved_bytes, unused_bytes, pending_bytes,
  CASE
    WHEN unused_bytes >= requested_bytes THEN 'enough lay unused, in pieces that did not fit: try expandable_segments:True'
    WHEN pending_bytes + unused_bytes >= requested_bytes THEN 'blocks that wait for another stream would have been enough'
    ELSE 'the device was full: hold less at once (xmem report peak), or see xmem simulate'
  END AS reason
FROM around
ORDER BY seq
LIMIT $top
