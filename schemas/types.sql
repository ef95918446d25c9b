-- Words that columns use; Parquet keeps them as text, so an unknown word from a newer torch is kept, not lost.

CREATE TYPE action AS ENUM ('alloc', 'free_requested', 'free_completed', 'segment_alloc', 'segment_free', 'segment_map', 'segment_unmap', 'oom', 'snapshot', 'annotate');
COMMENT ON TYPE action IS 'What happened to memory, in PyTorch''s own words (allocator trace entries, torch 2.14.1). free_requested: the program let go; free_completed: the allocator may reuse the block.';

CREATE TYPE category AS ENUM ('parameter', 'gradient', 'optimizer_state', 'activation', 'input', 'temporary', 'workspace', 'autograd_detail', 'unknown');
COMMENT ON TYPE category IS 'What an allocation is for. autograd_detail comes from memory timelines only; unknown stays unknown.';

CREATE TYPE phase AS ENUM ('forward', 'backward', 'optimizer', 'other');
COMMENT ON TYPE phase IS 'Part of a training step in which an event happened.';

CREATE TYPE span_kind AS ENUM ('operator', 'annotation', 'step', 'module', 'python', 'runtime', 'kernel', 'memcpy', 'memset', 'sync', 'gpu_annotation', 'overhead', 'other');
COMMENT ON TYPE span_kind IS 'What a span is: operator (cpu_op), annotation (record_function), step (ProfilerStep#N), module (nn.Module call), python (python_function), runtime (cuda_runtime, cuda_driver), kernel/memcpy/memset/sync/gpu_annotation on the device.';

CREATE TYPE severity AS ENUM ('note', 'info', 'warning', 'data_loss', 'error');
COMMENT ON TYPE severity IS 'note: a property of the source, nothing is wrong; info: repaired or inferred without loss; warning: figures may be incomplete; data_loss: records are missing; error: nothing could be read.';

CREATE TYPE block_state AS ENUM ('active_allocated', 'active_pending_free', 'inactive');
COMMENT ON TYPE block_state IS 'State of a block in a snapshot. active_awaiting_free (documentation''s spelling) is stored as active_pending_free.';
