-- From a CPU run to the requests that a GPU run of the same program makes.
--
-- Before this file runs, the connection holds
--   cpu_allocations (alloc_id, bytes, from_ns, from_seq, until_ns, until_seq, span_id, step, phase, category): lifetimes; until_ns is null for what stays
--   cpu_operators   (span_id, name, op, from_ns, until_ns, phase, step, shapes BIGINT[][], strides BIGINT[][], types VARCHAR[], concrete VARCHAR[])
--   gpu             (multiprocessors, threads_per_multiprocessor, compute_capability, cublas_workspace_bytes, cudnn_workspace_limit)
--
-- Each rule is a SELECT of edits: drop, resize, move or extend an allocation of the CPU run, or add one that only CUDA makes.
-- A place is a time and a slot: slots order what CUDA does within one instant of the CPU run.
-- Facts are from torch 2.14.1 running its CUDA code on a virtual GPU, operator by operator, unless a rule says otherwise.

CREATE OR REPLACE TEMP MACRO elements(shape) AS coalesce(list_product(shape), 1)::BIGINT;
CREATE OR REPLACE TEMP MACRO item_bytes(type) AS CASE
  WHEN type IN ('double', 'float64', 'long', 'int64', 'long int', 'complex64') THEN 8
  WHEN type IN ('float', 'float32', 'int', 'int32') THEN 4
  WHEN type IN ('half', 'float16', 'bfloat16', 'c10::Half', 'c10::BFloat16', 'short', 'int16') THEN 2
  WHEN type IN ('bool', 'unsigned char', 'uint8', 'int8', 'signed char') THEN 1 ELSE 4 END;
CREATE OR REPLACE TEMP MACRO power_below(n) AS (1::BIGINT << floor(log2(greatest(n, 1) + 0.5))::INTEGER);
CREATE OR REPLACE TEMP MACRO up(a, b) AS ((a + b - 1) // b);
-- Is a tensor of this shape stored without gaps in the order of its axes? Axes of size one do not matter.
CREATE OR REPLACE TEMP MACRO is_contiguous(shape, stride) AS len(list_filter(range(1, len(shape) + 1),
  lambda axis: shape[axis] <> 1 AND stride[axis] <> coalesce(list_product(shape[axis + 1:]), 1))) = 0;
CREATE OR REPLACE TEMP MACRO to_channels_last(shape) AS [shape[1], shape[3], shape[4], shape[2]];
CREATE OR REPLACE TEMP MACRO is_channels_last_contiguous(shape, stride) AS len(shape) = 4
  AND is_contiguous(to_channels_last(shape), to_channels_last(stride));
-- PyTorch's suggest_memory_format: channels last where strides rise in the order C, W, H, N.
CREATE OR REPLACE TEMP MACRO suggests_channels_last(shape, stride) AS len(shape) = 4 AND stride[2] <> 0
  AND stride[4] >= stride[2] * shape[2] AND stride[3] >= stride[4] * shape[4] AND stride[1] >= stride[3] * shape[3]
  AND NOT (stride[1] = stride[2] AND shape[2] = 1);

-- Reductions: how CUDA splits R inputs an output and N outputs over blocks (Reduce.cuh), and what it stages in memory.
-- fast: the reduced axes are the innermost. v: elements a thread reads at once.
CREATE OR REPLACE TEMP MACRO reduction_vector(n, fast, single) AS CASE
  WHEN fast THEN 1 WHEN single % 4 = 0 THEN 4 WHEN single % 2 = 0 THEN 2 ELSE 1 END;
CREATE OR REPLACE TEMP VIEW reductions AS
WITH shaped AS (
  SELECT o.span_id, o.name, o.until_ns, o.phase, o.step, r.rows_count, r.columns, r.fast, r.innermost, r.bytes_each
  FROM (
    -- sums over leading or trailing axes
    SELECT span_id, list_product(list_transform(dims, lambda d: shape[d + 1]))::BIGINT AS rows_count,
      elements(shape) // greatest(list_product(list_transform(dims, lambda d: shape[d + 1]))::BIGINT, 1) AS columns,
      list_min(list_transform(list_filter(dims, lambda d: shape[d + 1] > 1), lambda d: stride[d + 1]))
        < coalesce(list_min(list_transform(list_filter(range(0, len(shape)), lambda d: NOT list_contains(dims, d) AND shape[d + 1] > 1), lambda d: stride[d + 1])), 9223372036854775807) AS fast,
      coalesce(list_product(list_transform(list_filter(range(0, len(shape)), lambda d: NOT list_contains(dims, d)), lambda d: shape[d + 1])), 1)::BIGINT AS innermost,
      4 AS bytes_each
    FROM (
      SELECT span_id, shapes[1] AS shape, strides[1] AS stride,
        list_transform(from_json(concrete[2], '["BIGINT"]'), lambda d: CASE WHEN d < 0 THEN d + len(shapes[1]) ELSE d END) AS dims
      FROM cpu_operators WHERE name IN ('aten::sum', 'aten::mean') AND concrete[2] LIKE '[%' AND len(shapes[1]) > 0
    ) WHERE len(dims) > 0
    UNION ALL
    -- the bias gradient of a convolution is the sum of the output gradient over all axes but the channels
    SELECT span_id, elements(shape) // shape[2], shape[2], NOT last, shape[2], 4 FROM (
      SELECT span_id, shapes[1] AS shape, suggests_channels_last(shapes[1], strides[1]) AS last
      FROM cpu_operators WHERE name = 'aten::convolution_backward' AND len(shapes[1]) = 4 AND concrete[11] ILIKE '%true]'
    )
  ) r JOIN cpu_operators o USING (span_id)
), blocks AS (
  SELECT *, v, 512 // v AS threads,
    CASE WHEN fast THEN power_below(rows_count) ELSE power_below(columns // v) END AS inner_size,
    CASE WHEN fast THEN power_below(columns) ELSE power_below(rows_count) END AS outer_size
  FROM (SELECT *, reduction_vector(columns, fast, innermost) AS v FROM shaped)
), sized AS (
  SELECT *, least(least(inner_size, threads), threads // least(outer_size, threads // least(least(inner_size, threads), 32))) AS wide,
    least(least(outer_size, threads), threads // least(least(inner_size, threads), 32)) AS high
  FROM blocks
), split AS (
  SELECT *, CASE WHEN fast THEN up(rows_count, wide) ELSE rows_count END AS before_height FROM sized
), cut AS (
  SELECT *, before_height >= least(high * 16, 256) AS by_height,
    CASE WHEN before_height >= least(high * 16, 256) THEN up(before_height, high) ELSE before_height END AS each
  FROM split
), grid AS (
  SELECT *, CASE WHEN fast THEN up(columns // v, CASE WHEN by_height THEN 1 ELSE high END)
      ELSE up(columns // v, wide * CASE WHEN by_height THEN 1 ELSE high END) END AS groups,
    (SELECT multiprocessors * (threads_per_multiprocessor // (wide * high)) FROM gpu) AS room
  FROM cut
), counted AS (
  SELECT *, CASE WHEN by_height AND each >= 256 AND groups <= room
    THEN greatest(least(up(room, groups), up(each, 16)), up(each, 256)) ELSE 1 END AS parts
  FROM grid
)
SELECT span_id, name, until_ns, phase, step,
  (bytes_each * columns * parts * CASE WHEN fast THEN 1 ELSE wide * v END)::BIGINT AS staging_bytes, 4 * groups AS semaphore_bytes
FROM counted WHERE parts > 1;

CREATE OR REPLACE TEMP VIEW outputs AS
SELECT span_id, alloc_id, bytes, from_ns, row_number() OVER (PARTITION BY span_id ORDER BY from_ns, from_seq) AS nth
FROM cpu_allocations WHERE span_id IS NOT NULL;

-- Convolutions: channels last decides the kernel's layout; a depthwise one that is not so has a kernel of its own.
CREATE OR REPLACE TEMP VIEW convolutions AS
SELECT span_id, backward, from_ns, until_ns, step, image, weight, gradient, groups, type, last, image_wanted,
  groups > 1 AND groups = image[2] AND weight[1] % image[2] = 0 AND NOT last AND type IN ('float', 'float32') AS depthwise,
  NOT CASE WHEN last THEN is_channels_last_contiguous(image, image_stride) ELSE is_contiguous(image, image_stride) END AS copies_image,
  NOT CASE WHEN last THEN is_channels_last_contiguous(weight, weight_stride) ELSE is_contiguous(weight, weight_stride) END AS copies_weight,
  backward AND NOT CASE WHEN last THEN is_channels_last_contiguous(gradient, gradient_stride) ELSE is_contiguous(gradient, gradient_stride) END AS copies_gradient
FROM (
  SELECT *, suggests_channels_last(image, image_stride) OR suggests_channels_last(weight, weight_stride) AS last FROM (
    SELECT span_id, false AS backward, from_ns, until_ns, step, shapes[1] AS image, strides[1] AS image_stride, shapes[2] AS weight,
      strides[2] AS weight_stride, NULL::BIGINT[] AS gradient, NULL::BIGINT[] AS gradient_stride, concrete[9]::BIGINT AS groups, types[1] AS type, true AS image_wanted
    FROM cpu_operators WHERE name = 'aten::convolution'
    UNION ALL
    SELECT span_id, true, from_ns, until_ns, step, shapes[2], strides[2], shapes[3], strides[3], shapes[1], strides[1], concrete[10]::BIGINT, types[1], concrete[11] ILIKE '[true%'
    FROM cpu_operators WHERE name = 'aten::convolution_backward'
  )
);

CREATE OR REPLACE TEMP TABLE edits (
  rule VARCHAR, change VARCHAR, alloc_id BIGINT, bytes BIGINT,
  from_ns BIGINT, from_slot INTEGER, until_ns BIGINT, until_slot INTEGER, span_id BIGINT
);

-- rule: cpu_temporary
-- What a CPU kernel allocates and frees within one operator is its own scratch; CUDA kernels have other scratch, or none.
INSERT INTO edits BY NAME
SELECT 'cpu_temporary' AS rule, 'drop' AS change, a.alloc_id, a.bytes, a.span_id
FROM cpu_allocations a JOIN cpu_operators o USING (span_id) WHERE a.from_ns >= o.from_ns AND a.until_ns <= o.until_ns AND o.name NOT LIKE 'Optimizer.step#%';

-- rule: foreach_optimizer
-- On the CPU optimizers loop over parameters (torch.profiler shows it), on CUDA they take all at once by default: what the loop makes
-- for one parameter after the other is then there for all until the step ends, once; Adagrad's step makes as much again.
CREATE OR REPLACE TEMP TABLE loops AS
SELECT a.alloc_id, a.bytes, a.from_ns, w.until_ns, o.span_id, o.name, regexp_extract(w.name, '#(\w+)', 1) AS optimizer
FROM (
  FROM cpu_operators w WHERE name LIKE 'Optimizer.step#%'
    AND NOT EXISTS (FROM cpu_operators f WHERE f.name LIKE 'aten::_foreach_%' AND f.from_ns BETWEEN w.from_ns AND w.until_ns)
) w
JOIN cpu_operators o ON o.from_ns > w.from_ns AND o.until_ns <= w.until_ns AND o.name IN ('aten::sqrt', 'aten::div', 'aten::add', 'aten::abs', 'aten::mul')
JOIN cpu_allocations a ON a.span_id = o.span_id AND a.until_ns > o.until_ns AND a.until_ns <= w.until_ns
WHERE regexp_extract(w.name, '#(\w+)', 1) IN ('SGD', 'Adam', 'AdamW', 'NAdam', 'RAdam', 'RMSprop', 'Adagrad', 'Adadelta', 'Adamax');

INSERT INTO edits BY NAME
SELECT 'foreach_optimizer' AS rule,
  CASE WHEN name = 'aten::mul' OR (name = 'aten::div' AND optimizer <> 'RAdam') THEN 'drop' ELSE 'extend' END AS change,
  alloc_id, bytes, until_ns, span_id
FROM loops;

INSERT INTO edits BY NAME
SELECT 'foreach_optimizer' AS rule, 'add' AS change, bytes, from_ns, 1 AS from_slot, until_ns, 0 AS until_slot, span_id
FROM loops WHERE optimizer = 'Adagrad' AND name = 'aten::sqrt';

-- rule: fused_dropout
-- Unfused dropout keeps a mask of floats on the CPU; CUDA's fused one keeps one byte an element.
INSERT INTO edits BY NAME
SELECT 'fused_dropout' AS rule, 'resize' AS change, noise.alloc_id, noise.bytes // item_bytes(types[1]) AS bytes, span_id
FROM outputs noise JOIN cpu_operators o USING (span_id) JOIN cpu_allocations a USING (alloc_id)
WHERE o.name = 'aten::dropout' AND noise.nth = 1 AND types[1] IS NOT NULL AND (a.until_ns IS NULL OR a.until_ns > o.until_ns);

-- rule: gradient_sum_in_place
-- Autograd adds a second gradient into the first one's memory where nothing else holds it and it is no view; a recording that watches
-- every operator sees a new tensor instead. The recorder names the first operand's allocation.
CREATE OR REPLACE TEMP TABLE sums AS
SELECT o.span_id, sum.alloc_id, sum.bytes, sum.until_ns, sum.until_seq, dead.alloc_id AS reused_id
FROM (
  SELECT span_id, until_ns, lead(from_ns) OVER (ORDER BY from_ns, span_id) AS next_ns, name, phase, shapes, concrete FROM cpu_operators
) o JOIN outputs USING (span_id) JOIN cpu_allocations sum USING (alloc_id)
JOIN cpu_allocations dead ON dead.alloc_id = TRY_CAST(o.concrete[1] AS BIGINT) AND dead.until_ns BETWEEN o.until_ns AND o.next_ns AND dead.bytes = sum.bytes
WHERE o.name = 'aten::add' AND o.phase = 'backward' AND o.shapes[1] = o.shapes[2] AND len(o.shapes) = 2;

-- A sum may be summed into again: follow each chain to the memory in which it began.
CREATE OR REPLACE TEMP TABLE sum_chains AS
WITH RECURSIVE chains AS (
  SELECT alloc_id, reused_id AS root_id, bytes, until_ns, until_seq, span_id, 1 AS length FROM sums
  UNION ALL
  SELECT c.alloc_id, s.reused_id, c.bytes, c.until_ns, c.until_seq, c.span_id, c.length + 1 FROM chains c JOIN sums s ON s.alloc_id = c.root_id
)
SELECT alloc_id, arg_max(root_id, length) AS root_id, any_value(bytes) AS bytes, any_value(until_ns) AS until_ns,
  any_value(until_seq) AS until_seq, any_value(span_id) AS span_id
FROM chains GROUP BY alloc_id;

INSERT INTO edits BY NAME
SELECT 'gradient_sum_in_place' AS rule, 'drop' AS change, alloc_id, bytes, span_id FROM sum_chains;

INSERT INTO edits BY NAME
SELECT 'gradient_sum_in_place' AS rule, 'extend' AS change, root_id AS alloc_id, any_value(bytes) AS bytes,
  arg_max(until_ns, coalesce(until_ns, 9223372036854775807)) AS until_ns, any_value(span_id) AS span_id
FROM sum_chains GROUP BY root_id;

-- rule: dropout_mask_first
-- Fused dropout allocates its mask (one byte an element) before its output.
INSERT INTO edits BY NAME
SELECT 'dropout_mask_first' AS rule, 'move' AS change, mask.alloc_id, mask.bytes, kept.from_ns, -1 AS from_slot, span_id
FROM outputs mask JOIN outputs kept USING (span_id) JOIN cpu_operators USING (span_id)
WHERE name = 'aten::native_dropout' AND mask.nth = 2 AND kept.nth = 1;

-- rule: attention_backward_scratch
-- Memory-efficient attention's backward: gradient times output, its row sums, a contiguous copy of them, and an accumulator.
INSERT INTO edits BY NAME
SELECT 'attention_backward_scratch' AS rule, 'add' AS change, bytes::BIGINT AS bytes, until_ns AS from_ns, from_slot, until_ns, until_slot, span_id
FROM (
  SELECT span_id, until_ns, shapes[2] AS q, elements(shapes[CASE WHEN name LIKE '%for_cpu_backward' THEN 5 ELSE 6 END]) AS n,
    CASE WHEN shapes[2][4] <= 64 THEN 64 ELSE up(shapes[2][4], 128) * 128 END AS wide
  FROM cpu_operators WHERE name = 'aten::_scaled_dot_product_efficient_attention_backward'
    OR (name = 'aten::_scaled_dot_product_flash_attention_for_cpu_backward' AND item_bytes(types[2]) = 4)
), LATERAL (VALUES
  (4 * n, 1, 5), (4 * q[1] * q[2] * q[3], 2, 4), (4 * q[1] * q[2] * q[3], 3, 8),
  (4 * q[1] * q[2] * up(q[3], 64) * (64 * wide + 4 * (wide // 64)), 6, 9)
) AS scratch(bytes, from_slot, until_slot);

-- rule: cublas_workspace
-- The first matrix product of each thread (forward, and autograd's own) keeps a workspace for its cuBLAS handle.
INSERT INTO edits BY NAME
SELECT 'cublas_workspace' AS rule, 'add' AS change, (SELECT cublas_workspace_bytes FROM gpu) AS bytes, until_ns AS from_ns, 1 AS from_slot,
  NULL::BIGINT AS until_ns, 0 AS until_slot, span_id
FROM cpu_operators WHERE name IN ('aten::mm', 'aten::addmm', 'aten::bmm', 'aten::baddbmm', 'aten::addmv', 'aten::mv')
QUALIFY row_number() OVER (PARTITION BY phase = 'backward' ORDER BY from_ns) = 1;

-- rule: reduction_staging
-- A sum over many rows is split over thread blocks, which stage their parts in memory, with one counter a block.
INSERT INTO edits BY NAME
SELECT 'reduction_staging' AS rule, 'add' AS change, bytes, until_ns AS from_ns, from_slot, until_ns, until_slot, span_id
FROM reductions, LATERAL (VALUES (staging_bytes, 21, 24), (semaphore_bytes, 22, 23)) AS scratch(bytes, from_slot, until_slot);

-- rule: softmax_backward_product
-- The backward of softmax first multiplies gradient and output into a temporary.
INSERT INTO edits BY NAME
SELECT 'softmax_backward_product' AS rule, 'add' AS change, elements(shapes[1]) * item_bytes(types[1]) AS bytes, until_ns AS from_ns, 1 AS from_slot,
  until_ns, 2 AS until_slot, span_id
FROM cpu_operators WHERE name = 'aten::_softmax_backward_data';

-- rule: embedding_backward_sort
-- More than 3072 indices are sorted before their gradients are summed: keys, values, segments and partial sums.
INSERT INTO edits BY NAME
SELECT 'embedding_backward_sort' AS rule, 'add' AS change, scratch.bytes::BIGINT AS bytes,
  CASE WHEN early THEN out.from_ns ELSE o.until_ns END AS from_ns, from_slot, o.until_ns, until_slot, o.span_id
FROM (
  SELECT *, elements(shapes[2]) AS n, least(elements(shapes[2]), concrete[3]::BIGINT) AS segments, shapes[1][len(shapes[1])] AS width
  FROM cpu_operators WHERE name = 'aten::embedding_dense_backward' AND elements(shapes[2]) > 3072
) o JOIN outputs out ON out.span_id = o.span_id AND out.nth = 1, LATERAL (VALUES
  (8 * n, true, -9, 30), (8 * n, true, -8, 29), (8 * n, false, 1, 28), (8, false, 2, 27), (8 * n, false, 3, 4),
  (8 * segments, false, 5, 26), (8 * segments, false, 6, 25), (8, false, 9, 24),
  (8 * (n // 10 + segments), false, 10, 23), (4 * width * (n // 10 + segments), false, 11, 22)
) AS scratch(bytes, early, from_slot, until_slot);

-- rule: embedding_backward_sort_keys
-- While it sorts, the indices' own numbers and the sort's buffers are there too.
INSERT INTO edits BY NAME
SELECT 'embedding_backward_sort_keys' AS rule, 'add' AS change, scratch.bytes::BIGINT AS bytes, out.from_ns, from_slot, out.from_ns AS until_ns, until_slot, o.span_id
FROM (SELECT span_id, elements(shapes[2]) AS n, concrete[3]::BIGINT AS rows FROM cpu_operators
  WHERE name = 'aten::embedding_dense_backward' AND elements(shapes[2]) > 3072) o
JOIN outputs out ON out.span_id = o.span_id AND out.nth = 1, LATERAL (VALUES (8 * n, -7, -4), (CASE WHEN rows > 256 THEN 16 * n ELSE 0 END + 6655, -6, -5)) AS scratch(bytes, from_slot, until_slot);

-- rule: embedding_backward_copy
-- The backward of an embedding copies a gradient that is not contiguous.
INSERT INTO edits BY NAME
SELECT 'embedding_backward_copy' AS rule, 'add' AS change, elements(shapes[1]) * item_bytes(types[1]) AS bytes, from_ns, 0 AS from_slot,
  until_ns, 40 AS until_slot, span_id
FROM cpu_operators WHERE name = 'aten::embedding_dense_backward' AND NOT is_contiguous(shapes[1], strides[1]);

-- rule: layer_norm_copy
-- Layer norm copies an input (and an output gradient) that is not contiguous.
INSERT INTO edits BY NAME
SELECT 'layer_norm_copy' AS rule, 'add' AS change, elements(shapes[part]) * item_bytes(types[part]) AS bytes, o.from_ns, part - 9 AS from_slot,
  o.until_ns, 20 - part AS until_slot, o.span_id
FROM cpu_operators o, LATERAL (VALUES (1), (2)) AS input(part)
WHERE name IN ('aten::native_layer_norm', 'aten::native_layer_norm_backward') AND (part = 1 OR name LIKE '%_backward')
  AND NOT is_contiguous(shapes[part], strides[part]);

-- rule: convolution_copy
-- cuDNN is given contiguous operands of one layout: operands in another are copied for the call.
INSERT INTO edits BY NAME
SELECT 'convolution_copy' AS rule, 'add' AS change, bytes * item_bytes(type) AS bytes, from_at AS from_ns, from_slot, until_at AS until_ns, until_slot, span_id
FROM (
  SELECT c.*, out.from_ns AS first_ns, coalesce(second.from_ns, c.until_ns) AS second_ns FROM convolutions c
  JOIN outputs out ON out.span_id = c.span_id AND out.nth = 1
  LEFT JOIN outputs second ON second.span_id = c.span_id AND second.nth = CASE WHEN image_wanted THEN 2 ELSE 1 END
  WHERE NOT depthwise OR copies_image OR copies_gradient
), LATERAL (VALUES
  (copies_image AND NOT backward, elements(image), first_ns, -9, until_ns, 9),
  (copies_weight AND NOT backward AND NOT depthwise, elements(weight), first_ns, 1, until_ns, 8),
  (copies_gradient, elements(gradient), first_ns, -9, second_ns, 9),
  (copies_weight AND backward AND NOT depthwise AND image_wanted, elements(weight), first_ns, 1, first_ns, 2),
  (copies_image AND backward, elements(image), second_ns, 1, second_ns, 2)
) AS copy(made, bytes, from_at, from_slot, until_at, until_slot) WHERE made;

-- rule: cudnn_workspace
-- Tensor-core kernels of kernels larger than 1x1 work in channels last: cuDNN transposes NCHW operands into a workspace for the call
-- (cuDNN 9.24's choice for cc 8.0 and later, float32 as TF32; other versions choose otherwise, see docs/accuracy.md).
INSERT INTO edits BY NAME
SELECT 'cudnn_workspace' AS rule, 'add' AS change, bytes * item_bytes(type) AS bytes, at_ns AS from_ns, 5 AS from_slot, at_ns AS until_ns, 6 AS until_slot, span_id
FROM (
  SELECT c.*, data.from_ns AS data_ns, weights.from_ns AS weights_ns FROM convolutions c
  LEFT JOIN outputs data ON data.span_id = c.span_id AND data.nth = 1
  LEFT JOIN outputs weights ON weights.span_id = c.span_id AND weights.nth = CASE WHEN image_wanted THEN 2 ELSE 1 END
  WHERE groups = 1 AND NOT last AND len(image) = 4 AND image[2] > 4 AND weight[3] * weight[4] > 1 AND (SELECT compute_capability >= 8 FROM gpu)
), LATERAL (VALUES
  (NOT backward, elements(image) + elements(weight), data_ns),
  (backward AND image_wanted, elements(gradient) + elements(image) + elements(weight), data_ns),
  (backward, elements(gradient) + elements(image) + elements(weight), weights_ns)
) AS workspace(needed, bytes, at_ns) WHERE needed AND bytes * item_bytes(type) <= (SELECT cudnn_workspace_limit FROM gpu);

-- rule: depthwise_gradient_order
-- The depthwise kernel's backward allocates the weight's gradient before the input's.
INSERT INTO edits BY NAME
SELECT 'depthwise_gradient_order' AS rule, 'move' AS change, second.alloc_id, second.bytes, first.from_ns, -1 AS from_slot, span_id
FROM convolutions JOIN outputs first USING (span_id) JOIN outputs second USING (span_id)
WHERE backward AND depthwise AND image_wanted AND first.nth = 1 AND second.nth = 2;

-- What the GPU run holds, and when.
CREATE OR REPLACE TEMP TABLE gpu_allocations AS
WITH kept AS (
  SELECT a.alloc_id, coalesce(r.bytes, a.bytes) AS bytes, a.from_seq, a.until_seq, coalesce(m.from_ns, a.from_ns) AS from_ns, coalesce(m.from_slot, 0) AS from_slot,
    CASE WHEN e.alloc_id IS NULL THEN a.until_ns ELSE e.until_ns END AS until_ns, 0 AS until_slot, a.span_id, a.step, a.phase, a.category, coalesce(m.rule, r.rule, e.rule) AS rule
  FROM cpu_allocations a
  LEFT JOIN (SELECT * FROM edits WHERE change = 'move') m USING (alloc_id)
  LEFT JOIN (SELECT * FROM edits WHERE change = 'resize') r USING (alloc_id)
  LEFT JOIN (SELECT * FROM edits WHERE change = 'extend') e USING (alloc_id)
  WHERE NOT EXISTS (FROM edits d WHERE d.change = 'drop' AND d.alloc_id = a.alloc_id)
), added AS (
  SELECT (SELECT coalesce(max(alloc_id), 0) FROM cpu_allocations) + row_number() OVER (ORDER BY e.from_ns, e.from_slot, e.rule) AS alloc_id,
    e.bytes, NULL::BIGINT AS from_seq, NULL::BIGINT AS until_seq, e.from_ns, e.from_slot, e.until_ns, e.until_slot, e.span_id, o.step, o.phase,
    CASE WHEN rule LIKE '%workspace' THEN 'workspace' ELSE 'temporary' END AS category, e.rule
  FROM edits e LEFT JOIN cpu_operators o USING (span_id) WHERE e.change = 'add' AND e.bytes > 0
)
SELECT * FROM kept WHERE bytes > 0 UNION ALL BY NAME SELECT * FROM added;

CREATE OR REPLACE TEMP TABLE requests AS
SELECT row_number() OVER (ORDER BY at_ns, slot, place, alloc_id) - 1 AS seq, action, alloc_id, bytes, 0::BIGINT AS stream, '0:0' AS pool_id,
  happening.step, happening.phase, category, o.op
FROM (
  SELECT from_ns AS at_ns, from_slot AS slot, from_seq AS place, 'alloc' AS action, * FROM gpu_allocations
  UNION ALL
  SELECT until_ns, until_slot, until_seq, 'free_requested', * FROM gpu_allocations WHERE until_ns IS NOT NULL
) happening LEFT JOIN cpu_operators o USING (span_id);

CREATE OR REPLACE TEMP TABLE rule_effects AS
SELECT rule, change, count(*) AS allocations, coalesce(sum(bytes), 0)::BIGINT AS bytes FROM edits WHERE change <> 'add' OR bytes > 0
GROUP BY rule, change ORDER BY bytes DESC, rule;
