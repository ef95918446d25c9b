-- One row is one thing that happened to memory, in true order.

CREATE TABLE events (
  run_id VARCHAR NOT NULL,
  rank INTEGER NOT NULL,
  seq BIGINT NOT NULL,
  ts_ns BIGINT NOT NULL,
  device_type VARCHAR NOT NULL,
  device_index INTEGER NOT NULL,
  action VARCHAR NOT NULL,
  alloc_id BIGINT,
  address UBIGINT,
  requested_bytes BIGINT,
  block_bytes BIGINT,
  stream BIGINT,
  pool_id VARCHAR,
  thread_id BIGINT,
  span_id BIGINT,
  stack_id BIGINT,
  step BIGINT,
  phase VARCHAR,
  category VARCHAR,
  total_allocated BIGINT,
  total_reserved BIGINT,
  inferred BOOLEAN NOT NULL,
  allocated_bytes BIGINT,
  active_bytes BIGINT,
  reserved_bytes BIGINT,
  device_free BIGINT,
  user_metadata VARCHAR,
  compile_context VARCHAR,
  end_seq BIGINT
);
COMMENT ON TABLE events IS 'Everything that happened to memory: allocations, frees, segments, out-of-memory errors, marks.';
COMMENT ON COLUMN events.run_id IS 'Run, see runs.';
COMMENT ON COLUMN events.rank IS 'Rank, see runs.';
COMMENT ON COLUMN events.seq IS 'Position in the rank, from 0: device after device, in true order within a device (time, Ev Idx, file order for traces; entry order for snapshots). Memory that was there before comes first, in address order.';
COMMENT ON COLUMN events.ts_ns IS 'Time in nanoseconds, see runs.time_base; inferred rows carry the time of the row they stand before (memory from before: of the device''s first row).';
COMMENT ON COLUMN events.device_type IS 'Device type, see devices.';
COMMENT ON COLUMN events.device_index IS 'Device index, see devices.';
COMMENT ON COLUMN events.action IS 'What happened, see the type action; a word that this version does not know is kept as it stands.';
COMMENT ON COLUMN events.alloc_id IS 'Number of the allocation within run and rank, the same on its alloc, free_requested and free_completed rows; null for other actions.';
COMMENT ON COLUMN events.address IS 'Address of the block or segment as the source states it; null where it does not.';
COMMENT ON COLUMN events.requested_bytes IS 'Bytes asked for (alloc, free), segment or mapped bytes (segment_*), rounded request (oom); null where the source knows only the block.';
COMMENT ON COLUMN events.block_bytes IS 'Bytes of the allocator''s block. In snapshots of CUDA and HIP devices the block is seen for what lives at the end; for what died before it is the request rounded up to 512 bytes, the least block that torch makes (an unsplit block is larger, which only a replay tells). Null where only the request is known.';
COMMENT ON COLUMN events.stream IS 'Stream handle as an integer, 0 is the default stream; null where unknown.';
COMMENT ON COLUMN events.pool_id IS 'Memory pool as a:b, 0:0 is the default pool; null where unknown.';
COMMENT ON COLUMN events.thread_id IS 'Thread that caused it; null where unknown.';
COMMENT ON COLUMN events.span_id IS 'Innermost span around it on its thread, see spans; null where there is none.';
COMMENT ON COLUMN events.stack_id IS 'Stack recorded with it, see stacks; null where there is none.';
COMMENT ON COLUMN events.step IS 'Training step (ProfilerStep number, or counted from optimizer steps); null outside of steps or where unknown.';
COMMENT ON COLUMN events.phase IS 'forward, backward, optimizer or other; null where the source does not allow an answer.';
COMMENT ON COLUMN events.category IS 'What the allocation is for, see the type category; the same on all rows of an allocation; null for other actions.';
COMMENT ON COLUMN events.total_allocated IS 'Allocated bytes after the event as the source recorded them; null where it did not.';
COMMENT ON COLUMN events.total_reserved IS 'Reserved bytes after the event as the source recorded them; on oom rows null.';
COMMENT ON COLUMN events.inferred IS 'True for rows that an adapter deduced: memory that was there before, a free that was lost.';
COMMENT ON COLUMN events.allocated_bytes IS 'Allocated level of the device after the row, from the rows themselves: alloc less free_requested (less free_completed where free_requested is absent); in block_bytes, or requested_bytes where the source knows only that, as of the alloc row.';
COMMENT ON COLUMN events.active_bytes IS 'Active level of the device after the row: alloc less free_completed (less free_requested where free_completed is absent).';
COMMENT ON COLUMN events.reserved_bytes IS 'Reserved level of the device after the row: segment_alloc and segment_map less segment_free and segment_unmap, else the last recorded total; null where the source records neither.';
COMMENT ON COLUMN events.device_free IS 'Bytes that the device still reported as free (oom rows of snapshots); null elsewhere.';
COMMENT ON COLUMN events.user_metadata IS 'What the program attached to the entry (torch.cuda.memory._set_memory_metadata, annotate); a dict as JSON text; null where empty.';
COMMENT ON COLUMN events.compile_context IS 'torch.compile''s frame that was being compiled or run, as torch names it; null where there is none.';
COMMENT ON COLUMN events.end_seq IS 'On alloc rows: seq of the row that takes the allocation off allocated_bytes (free_requested, else free_completed); null where it was alive at the end, and on other rows.';
