-- Which code holds memory at the peak: call stacks by their innermost frame outside of torch.
SELECT
  frame, parse_filename(filename) AS file, line,
  at_peak_bytes,
  at_peak_bytes / nullif(sum(at_peak_bytes) OVER (), 0) AS share,
  at_peak_allocations, at_end_bytes, total_bytes, allocations, stack_id
FROM stack_bytes
WHERE run_id = $run AND rank = $rank AND device_type = $device_type AND device_index = $device_index
ORDER BY at_peak_bytes DESC, total_bytes DESC, stack_id
LIMIT $top
