-- Devices of a run that memory requests were made on, largest allocated peak first, accelerators before the CPU.
SELECT
  events.rank,
  events.device_type,
  events.device_index,
  max(events.allocated_bytes) AS peak_allocated_bytes,
  max(events.reserved_bytes) AS peak_reserved_bytes,
  count(*) FILTER (action IN ('alloc', 'free_requested', 'free_completed')) AS requests,
  any_value(devices.name) AS name,
  any_value(devices.total_bytes) AS total_bytes,
  coalesce(any_value(devices.complete_history), false) AS complete_history,
  coalesce(any_value(devices.baseline_bytes), 0) AS baseline_bytes
FROM events
LEFT JOIN devices USING (run_id, rank, device_type, device_index)
WHERE events.run_id = $run_id
GROUP BY events.rank, events.device_type, events.device_index
HAVING requests > 0
ORDER BY events.device_type = 'cpu', peak_allocated_bytes DESC, events.rank, events.device_index
