-- Which modules hold memory at the peak, and which allocate most over time.
SELECT
  module, at_peak_bytes,
  at_peak_bytes / nullif(sum(at_peak_bytes) OVER (), 0) AS share,
  at_peak_allocations, at_end_bytes, total_bytes, allocations, largest_bytes
FROM modules
WHERE run_id = $run AND rank = $rank AND device_type = $device_type AND device_index = $device_index
ORDER BY at_peak_bytes DESC, total_bytes DESC, module
LIMIT $top
