-- How much reserved memory nobody could use, when, and in how many pieces it lies.
SELECT * EXCLUDE (run_id, rank, device_type, device_index)
FROM fragmentation
WHERE run_id = $run AND rank = $rank AND device_type = $device_type AND device_index = $device_index
