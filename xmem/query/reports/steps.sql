-- Memory of each training step: before it, at its peak, after it.
SELECT
  step, start_allocated_bytes, peak_allocated_bytes, peak_phase, end_allocated_bytes, growth_bytes,
  peak_reserved_bytes, allocations, allocated_in_step_bytes, end_ns - start_ns AS duration_ns
FROM steps
WHERE run_id = $run AND rank = $rank AND device_type = $device_type AND device_index = $device_index
ORDER BY step
LIMIT $top
