-- One row is one stretch of time with a name: operator, annotation, module, step, kernel.

CREATE TABLE spans (
  run_id VARCHAR NOT NULL,
  rank INTEGER NOT NULL,
  span_id BIGINT NOT NULL,
  parent_id BIGINT,
  op_id BIGINT,
  module_id BIGINT,
  kind VARCHAR NOT NULL,
  name VARCHAR NOT NULL,
  ts_ns BIGINT NOT NULL,
  dur_ns BIGINT NOT NULL,
  process_id BIGINT,
  thread_id BIGINT,
  device_index INTEGER,
  stream BIGINT,
  correlation_id BIGINT,
  external_id BIGINT,
  sequence_number BIGINT,
  fwd_thread_id BIGINT,
  input_shapes VARCHAR,
  input_strides VARCHAR,
  input_types VARCHAR,
  concrete_inputs VARCHAR
);
COMMENT ON TABLE spans IS 'Operators, annotations, modules, steps, runtime calls and device activity of a trace, in exact nanoseconds.';
COMMENT ON COLUMN spans.run_id IS 'Run, see runs.';
COMMENT ON COLUMN spans.rank IS 'Rank, see runs.';
COMMENT ON COLUMN spans.span_id IS 'Number of the span within run and rank, in order of start.';
COMMENT ON COLUMN spans.parent_id IS 'Innermost span around it on the same thread; null at the root and for device activity.';
COMMENT ON COLUMN spans.op_id IS 'Outermost operator at or above the span on its thread: what the program called (aten::conv2d, not aten::empty); null where there is none.';
COMMENT ON COLUMN spans.module_id IS 'Innermost module call at or above the span on its thread; null where there is none.';
COMMENT ON COLUMN spans.kind IS 'What it is, see the type span_kind.';
COMMENT ON COLUMN spans.name IS 'Name as recorded.';
COMMENT ON COLUMN spans.ts_ns IS 'Start, ns, same base as events.ts_ns.';
COMMENT ON COLUMN spans.dur_ns IS 'Duration, ns.';
COMMENT ON COLUMN spans.process_id IS 'Process (host spans); null for device activity.';
COMMENT ON COLUMN spans.thread_id IS 'Thread (host spans); null for device activity.';
COMMENT ON COLUMN spans.device_index IS 'Device on which it ran (kernel, memcpy, memset); null for host spans.';
COMMENT ON COLUMN spans.stream IS 'Stream on which it ran; null for host spans.';
COMMENT ON COLUMN spans.correlation_id IS 'Joins a runtime call with the device activity it launched.';
COMMENT ON COLUMN spans.external_id IS 'External id: joins device activity with the operator that launched it.';
COMMENT ON COLUMN spans.sequence_number IS 'Autograd sequence number: joins a forward operator with its backward one.';
COMMENT ON COLUMN spans.fwd_thread_id IS 'Thread of the forward operator, on backward operators.';
COMMENT ON COLUMN spans.input_shapes IS 'Input Dims as JSON text where shapes were recorded.';
COMMENT ON COLUMN spans.input_strides IS 'Input Strides as JSON text where shapes were recorded.';
COMMENT ON COLUMN spans.input_types IS 'Input type as JSON text where shapes were recorded.';
COMMENT ON COLUMN spans.concrete_inputs IS 'Concrete Inputs (numbers, flags, lists) as JSON text where shapes were recorded.';
