-- Two runs of one job with different batch sizes, aligned event by event; every size as a line in the batch size.
-- Before: small_allocations, small_operators, large_allocations, large_operators, and batches (small, large, wanted).
-- A free stands after the nth_end-th allocation: the order of frees between two allocations may be any (autocast's cache drops its
-- copies in the order of a hash table) and changes nothing.
CREATE OR REPLACE TEMP TABLE numbered_allocations AS
WITH numbered AS (
  SELECT 'small' AS run, row_number() OVER (ORDER BY from_seq) AS nth, * FROM small_allocations
  UNION ALL
  SELECT 'large', row_number() OVER (ORDER BY from_seq), * FROM large_allocations
)
SELECT n.*, last.nth AS nth_end FROM numbered n
ASOF LEFT JOIN (SELECT run, nth, from_seq FROM numbered) last ON last.run = n.run AND n.until_seq > last.from_seq;

CREATE OR REPLACE TEMP TABLE numbered_operators AS
SELECT 'small' AS run, row_number() OVER (ORDER BY from_ns, span_id) AS nth, * FROM small_operators
UNION ALL
SELECT 'large', row_number() OVER (ORDER BY from_ns, span_id), * FROM large_operators;

CREATE OR REPLACE TEMP MACRO on_line(a, b, rise, width) AS (a + (b - a) * rise // width);

CREATE OR REPLACE TEMP VIEW line AS SELECT wanted - small AS rise, large - small AS width FROM batches;

CREATE OR REPLACE TEMP TABLE misaligned AS
SELECT coalesce(s.nth, l.nth) AS nth, coalesce(s.name, l.name) AS name
FROM (FROM numbered_operators WHERE run = 'small') s FULL JOIN (FROM numbered_operators WHERE run = 'large') l ON s.nth = l.nth
WHERE s.name IS DISTINCT FROM l.name
UNION ALL
SELECT coalesce(s.nth, l.nth), coalesce(s.category, l.category)
FROM (FROM numbered_allocations WHERE run = 'small') s FULL JOIN (FROM numbered_allocations WHERE run = 'large') l ON s.nth = l.nth
WHERE s.category IS DISTINCT FROM l.category OR s.nth_end IS DISTINCT FROM l.nth_end
  OR (l.bytes - s.bytes) % (SELECT large - small FROM batches) <> 0;

CREATE OR REPLACE TEMP TABLE cpu_allocations AS
SELECT s.alloc_id, on_line(s.bytes, l.bytes, rise, width)::BIGINT AS bytes, s.from_ns, s.from_seq, s.until_ns, s.until_seq, s.span_id, s.step, s.phase, s.category
FROM (FROM numbered_allocations WHERE run = 'small') s JOIN (FROM numbered_allocations WHERE run = 'large') l ON s.nth = l.nth, line;

CREATE OR REPLACE TEMP TABLE cpu_operators AS
SELECT s.span_id, s.name, s.op, s.from_ns, s.until_ns, s.phase, s.step,
  list_transform(list_zip(s.shapes, l.shapes), lambda two: list_transform(list_zip(two[1], two[2]), lambda pair: on_line(pair[1], pair[2], rise, width)::BIGINT)) AS shapes,
  list_transform(list_zip(s.strides, l.strides), lambda two: list_transform(list_zip(two[1], two[2]), lambda pair: on_line(pair[1], pair[2], rise, width)::BIGINT)) AS strides,
  s.types, s.concrete
FROM (FROM numbered_operators WHERE run = 'small') s JOIN (FROM numbered_operators WHERE run = 'large') l ON s.nth = l.nth, line;
