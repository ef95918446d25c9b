-- What each stream holds, and what it strands for the others.
SELECT
  stream, peak_bytes, at_peak_bytes, at_end_bytes, reserved_end_bytes, unused_end_bytes, allocations, total_bytes
FROM streams
WHERE run_id = $run AND rank = $rank AND device_type = $device_type AND device_index = $device_index
ORDER BY at_peak_bytes DESC, total_bytes DESC, stream
