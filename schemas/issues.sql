-- One row is one kind of trouble met while reading a source, with how often and where first.

CREATE TABLE issues (
  run_id VARCHAR NOT NULL,
  rank INTEGER NOT NULL,
  code VARCHAR NOT NULL,
  severity VARCHAR NOT NULL,
  count BIGINT NOT NULL,
  first_at BIGINT,
  first_unit VARCHAR,
  detail VARCHAR
);
COMMENT ON TABLE issues IS 'What was repaired, inferred or lost while reading; nothing is repaired silently.';
COMMENT ON COLUMN issues.run_id IS 'Run, see runs.';
COMMENT ON COLUMN issues.rank IS 'Rank, see runs.';
COMMENT ON COLUMN issues.code IS 'Kind of issue, see issue_codes.';
COMMENT ON COLUMN issues.severity IS 'Severity of the code, see the type severity.';
COMMENT ON COLUMN issues.count IS 'How often it happened.';
COMMENT ON COLUMN issues.first_at IS 'Where it happened first, in first_unit; null where it has no place.';
COMMENT ON COLUMN issues.first_unit IS 'Unit of first_at: byte (offset in the decompressed source), line, entry (index in its list) or seq (see events).';
COMMENT ON COLUMN issues.detail IS 'The first case in words, cut to 200 characters.';

CREATE TABLE issue_codes (
  code VARCHAR PRIMARY KEY,
  severity VARCHAR NOT NULL,
  meaning VARCHAR NOT NULL,
  advice VARCHAR NOT NULL
);
COMMENT ON TABLE issue_codes IS 'Every issue that reading can report.';
COMMENT ON COLUMN issue_codes.code IS 'Short name.';
COMMENT ON COLUMN issue_codes.severity IS 'See the type severity.';
COMMENT ON COLUMN issue_codes.meaning IS 'What it means.';
COMMENT ON COLUMN issue_codes.advice IS 'What a person can do about it; empty where nothing needs doing.';

INSERT INTO issue_codes VALUES
  ('repaired_string', 'info', 'A string held characters that JSON forbids (lone backslash, bare quote, control character); it was repaired.', ''),
  ('invalid_utf8', 'info', 'A name held bytes that are not UTF-8; they were replaced.', ''),
  ('non_finite_number', 'info', 'A number was written as inf or nan; it was read as null.', ''),
  ('byte_order_mark', 'info', 'The file begins with a byte order mark; it was skipped.', ''),
  ('broken_header', 'warning', 'The header before traceEvents is not valid JSON; its fields were skipped.', 'Look at what add_metadata_json was given.'),
  ('repaired_syntax', 'info', 'A record broke JSON''s rules (stray or missing comma, missing value, no list around records, nesting too deep); it was repaired.', ''),
  ('bad_record', 'data_loss', 'A record could not be read even after repair; it was skipped.', ''),
  ('truncated', 'data_loss', 'The end of the file is missing; everything whole before it was kept.', 'Let the exporting job end, or record fewer steps.'),
  ('odd_number', 'info', 'A number was written as text, by its name, in hexadecimal or with a fraction; it was read as an integer.', ''),
  ('odd_value', 'info', 'A field held another type of value than it should; it was left out.', ''),
  ('unknown_field', 'info', 'A field or column that this version does not know was ignored.', ''),
  ('wide_integer', 'warning', 'A number is too large: of an address or stream the low 64 bits were kept, a time was cut off at the year 2096, anything else was left out.', ''),
  ('missing_field', 'warning', 'A memory event lacks a field that it needs; it was skipped or the field was left null.', ''),
  ('out_of_order', 'info', 'Events stood in another order than they happened; they were sorted by time and Ev Idx.', ''),
  ('unknown_action', 'info', 'An action that this version does not know was kept and does not change any total.', ''),
  ('unknown_device_type', 'info', 'A device type that this version does not know was kept as unknownN.', ''),
  ('no_rank', 'note', 'The source names no rank; 0 was assumed.', 'Give --rank N if it belongs to a larger job.'),
  ('rank_from_name', 'note', 'The rank was taken from the file name.', ''),
  ('no_addresses', 'warning', 'Memory events carry no addresses, so frees were paired with allocations by size; lifetimes are a guess, sums are not.', 'Record with a newer torch.'),
  ('no_totals', 'note', 'Memory events carry no totals; levels were computed from the events alone.', ''),
  ('useless_addresses', 'warning', 'Almost no free matches an allocation by address; levels were taken from the recorded totals.', ''),
  ('unmatched_free', 'info', 'Memory was freed that was allocated before the recording; it was added to the baseline.', ''),
  ('preexisting_memory', 'info', 'Memory was allocated before the recording; it is kept as inferred rows.', ''),
  ('lost_free', 'warning', 'An address was allocated again without a free in between; the older allocation was closed there.', ''),
  ('negative_total', 'warning', 'The recorded total falls below zero; levels were shifted up by its minimum, or sizes below zero taken as 0.', ''),
  ('total_mismatch', 'warning', 'The recorded total differs from the sum of allocations and frees at some events.', 'Other threads may have allocated outside the recording.'),
  ('above_device_total', 'warning', 'Allocated memory exceeds the device''s total; history or totals are wrong.', ''),
  ('ring_buffer', 'warning', 'The recording kept only its newest entries; earlier history is lost.', 'Raise max_entries in _record_memory_history.'),
  ('no_history', 'warning', 'The snapshot holds the final state only, without history: no peak and no replay.', 'Call torch.cuda.memory._record_memory_history() before the code of interest.'),
  ('state_mismatch', 'warning', 'The state derived from the history differs from the snapshot''s segments, or these from their blocks.', ''),
  ('no_times', 'note', 'Entries carry no times; their number stands in.', ''),
  ('skipped_actions', 'info', 'One of free_requested and free_completed was not recorded; the other stands for both.', ''),
  ('no_stacks', 'note', 'Entries carry no stacks.', 'Record with stacks=''python'' to see which code allocates.'),
  ('pending_free', 'note', 'Blocks were freed by the program and wait for another stream: active, not allocated.', ''),
  ('no_spans', 'note', 'The source names no operators; allocations cannot be attributed to one.', ''),
  ('missing_reserved', 'note', 'The source does not record reserved memory.', ''),
  ('several_devices', 'note', 'The source holds several devices; each is kept apart.', ''),
  ('hta_failed', 'warning', 'holistic-trace-analysis could not analyse this trace; its tables were left out.', ''),
  ('filtered', 'note', 'Only part of the source was read, as asked for.', ''),
  ('unreadable_part', 'data_loss', 'A part of the source could not be read and was left out.', '');
