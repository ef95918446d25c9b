"""Each rule from CPU to GPU on a hand-made operator; expected bytes are what torch 2.14.1's CUDA code asked for."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import duckdb
import pytest

from xmem.errors import UsageError
from xmem.simulate.gpu_table import parse_gpu
from xmem.simulate.rules import GpuFacts, apply_rules, extrapolate, gpu_facts, rule_descriptions

RTX_3060 = GpuFacts(28, 1536, "8.6", 8_519_680, 1 << 40, "")
A100 = GpuFacts(108, 2048, "8.0", 8_519_680, 1 << 40, "")
ALLOCATIONS = (
    "alloc_id BIGINT, bytes BIGINT, from_ns BIGINT, from_seq BIGINT, until_ns BIGINT, until_seq BIGINT, span_id BIGINT,"
    " step BIGINT, phase VARCHAR, category VARCHAR"
)
OPERATORS = (
    "span_id BIGINT, name VARCHAR, op VARCHAR, from_ns BIGINT, until_ns BIGINT, phase VARCHAR, step BIGINT,"
    " shapes BIGINT[][], strides BIGINT[][], types VARCHAR[], concrete VARCHAR[]"
)


def strides_of(shape: list[int]) -> list[int]:
    return [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]


class Program:
    """A CPU run written by hand: operators one after the other, each with its outputs."""

    def __init__(self, prefix: str = "cpu") -> None:
        self.connection = duckdb.connect()
        self.prefix = prefix
        self.time = 0
        self.count = 0
        self.spans = 0
        self.add_tables(prefix)

    def add_tables(self, prefix: str) -> None:
        self.prefix = prefix
        self.connection.execute(f"CREATE TEMP TABLE {prefix}_allocations ({ALLOCATIONS})")
        self.connection.execute(f"CREATE TEMP TABLE {prefix}_operators ({OPERATORS})")
        self.time = self.count = self.spans = 0

    def tick(self) -> int:
        self.time += 10
        return self.time

    def operator(
        self,
        name: str,
        shapes: list[list[int]],
        outputs: list[int],
        *,
        strides: list[list[int]] | None = None,
        types: list[str] | None = None,
        concrete: list[str] | None = None,
        phase: str = "forward",
    ) -> list[int]:
        """Add an operator whose outputs have these sizes and live on; return their numbers."""
        start, span = self.tick(), self.spans
        self.spans += 1
        made = []
        for size in outputs:
            values = [self.count, size, self.tick(), self.time, None, None, span, 0, phase, "activation"]
            self.connection.execute(f"INSERT INTO {self.prefix}_allocations VALUES ({', '.join('?' * 10)})", values)
            made.append(self.count)
            self.count += 1
        values = [span, name, name, start, self.tick(), phase, 0, shapes, strides or [strides_of(s) for s in shapes]]
        values += [types or ["float32"] * len(shapes), concrete or [""] * 12]
        self.connection.execute(f"INSERT INTO {self.prefix}_operators VALUES ({', '.join('?' * 11)})", values)
        return made

    def free(self, number: int) -> None:
        self.connection.execute(
            f"UPDATE {self.prefix}_allocations SET until_ns = ?, until_seq = ? WHERE alloc_id = ?",
            [self.tick(), self.time, number],
        )

    def requests(self, facts: GpuFacts = RTX_3060) -> list[int]:
        """Return the requests as sizes: positive for an allocation, negative for a free."""
        apply_rules(self.connection, facts)
        rows = self.connection.execute("SELECT action, bytes FROM requests ORDER BY seq").fetchall()
        return [size if action == "alloc" else -size for action, size in rows]

    def effects(self, facts: GpuFacts = RTX_3060) -> dict[str, int]:
        return {effect.rule: effect.bytes for effect in apply_rules(self.connection, facts)}


@pytest.fixture
def program() -> Iterator[Program]:
    made = Program()
    yield made
    made.connection.close()


def test_every_rule_has_a_sentence() -> None:
    assert len(rule_descriptions()) >= 14
    assert all(text.endswith(".") or ")" in text for text in rule_descriptions().values())


def test_an_operator_without_a_rule_stays_as_it_is(program: Program) -> None:
    (first,) = program.operator("aten::relu", [[4, 4]], [64])
    program.operator("aten::relu", [[4, 4]], [64])
    program.free(first)
    assert program.requests() == [64, 64, -64]


def test_fused_dropout_allocates_its_mask_first(program: Program) -> None:
    program.operator("aten::native_dropout", [[256, 256]], [262144, 65536])
    assert program.requests() == [65536, 262144]


def test_forward_and_backward_threads_each_keep_a_cublas_workspace(program: Program) -> None:
    program.operator("aten::addmm", [[8], [4, 8], [8, 8]], [128])
    program.operator("aten::mm", [[4, 8], [8, 8]], [128])
    program.operator("aten::mm", [[4, 8], [8, 8]], [128], phase="backward")
    assert program.requests() == [128, 8_519_680, 128, 128, 8_519_680]


@pytest.mark.parametrize(
    ("shape", "scratch"),
    [
        ([2, 8, 128, 64], [524288, 8192, 8192, 524800]),
        ([2, 8, 100, 64], [409600, 6400, 6400, 524800]),
        ([2, 8, 300, 64], [1228800, 19200, 19200, 1312000]),
        ([2, 4, 128, 128], [524288, 4096, 4096, 524800]),
        ([2, 4, 128, 256], [1048576, 4096, 4096, 1049600]),
        ([2, 4, 128, 80], [327680, 4096, 4096, 524800]),
        ([1, 12, 1024, 64], [3145728, 49152, 49152, 3148800]),
    ],
)
def test_efficient_attention_backward_has_the_scratch_that_cuda_asks_for(
    program: Program, shape: list[int], scratch: list[int]
) -> None:
    size = 4 * math.prod(shape)
    program.operator(
        "aten::_scaled_dot_product_efficient_attention_backward", [shape] * 4 + [[], shape, []], [size] * 3
    )
    product, sums, copy, work = scratch
    assert program.requests() == [size] * 3 + [product, sums, copy, -sums, -product, work, -copy, -work]


@pytest.mark.parametrize(
    ("shape", "dims", "facts", "staging", "counters"),
    [
        ([8192, 3072], "[0]", A100, 113_246_208, 96),
        ([8192, 3072], "[0]", RTX_3060, 22_020_096, 96),
        ([50257, 768], "[-2]", RTX_3060, 22_020_096, 24),
        ([300, 300, 300], "[0, 1]", RTX_3060, 17_203_200, 12),
        ([64, 64, 86, 86], "[0, 2, 3]", RTX_3060, 1024, 256),
        ([1536, 768], "[0]", RTX_3060, 9_437_184, 24),
    ],
)
def test_a_sum_over_many_rows_is_staged(
    program: Program, shape: list[int], dims: str, facts: GpuFacts, staging: int, counters: int
) -> None:
    program.operator("aten::sum", [shape], [1024], concrete=["", dims])
    assert program.requests(facts) == [1024, staging, counters, -counters, -staging]


@pytest.mark.parametrize(("shape", "dims"), [([512, 2304], "[0]"), ([768, 3072], "[0]"), ([50257, 768], "[-1]")])
def test_a_small_sum_or_one_along_rows_is_not_staged(program: Program, shape: list[int], dims: str) -> None:
    program.operator("aten::sum", [shape], [1024], concrete=["", dims])
    assert program.requests() == [1024]


def test_softmax_backward_multiplies_into_a_temporary(program: Program) -> None:
    program.operator("aten::_softmax_backward_data", [[4, 16, 1024]], [262144])
    assert program.requests() == [262144, 262144, -262144]


def test_many_indices_are_sorted_in_embedding_backward(program: Program) -> None:
    program.operator(
        "aten::embedding_dense_backward", [[4352, 768], [4352]], [154435584], concrete=["", "", "50272", "-1", "False"]
    )
    sizes = program.requests()
    assert sizes[:7] == [34816, 34816, 34816, 76287, -76287, -34816, 154435584]
    assert sizes[7:14] == [34816, 8, 34816, -34816, 34816, 34816, 8]
    assert sizes[14:16] == [38296, 14705664]
    assert sum(sizes) == 154435584


def test_few_indices_are_not_sorted(program: Program) -> None:
    program.operator("aten::embedding_dense_backward", [[3072, 64], [3072]], [256000], concrete=["", "", "1000"])
    assert program.requests() == [256000]


def test_layer_norm_copies_an_input_that_is_not_contiguous(program: Program) -> None:
    program.operator("aten::native_layer_norm", [[2, 4, 8]], [256, 32, 32], strides=[[32, 1, 4]])
    assert program.requests() == [256, 256, 32, 32, -256]


def convolution_concrete(groups: int, mask: str = "") -> list[str]:
    return ["", "", "", "[1, 1]", "[1, 1]", "[1, 1]", "False", "[0, 0]", str(groups)] if not mask else (
        ["", "", "", "[0]", "[1, 1]", "[1, 1]", "[1, 1]", "False", "[0, 0]", str(groups), mask]
    )  # fmt: skip


def test_the_depthwise_kernel_makes_the_weight_gradient_first(program: Program) -> None:
    shapes = [[2, 8, 4, 4], [2, 8, 4, 4], [8, 1, 3, 3]]
    concrete = convolution_concrete(8, "[True, True, False]")
    program.operator("aten::convolution_backward", shapes, [1024, 288], concrete=concrete, phase="backward")
    assert program.requests() == [288, 1024]


def test_weights_are_copied_to_the_layout_of_channels_last_images(program: Program) -> None:
    shapes = [[2, 8, 4, 4], [16, 8, 2, 2]]
    last = [[128, 1, 32, 8], strides_of(shapes[1])]
    program.operator("aten::convolution", shapes, [1152], strides=last, concrete=convolution_concrete(1))
    assert program.requests() == [1152, 2048, -2048]


def test_tensor_core_kernels_transpose_into_a_workspace_up_to_the_limit(program: Program) -> None:
    shapes = [[2, 8, 4, 4], [16, 8, 3, 3]]
    program.operator("aten::convolution", shapes, [2048], concrete=convolution_concrete(1))
    workspace = 4 * (2 * 8 * 4 * 4 + 16 * 8 * 3 * 3)
    assert program.requests() == [2048, workspace, -workspace]
    assert program.requests(GpuFacts(28, 1536, "8.6", 8_519_680, workspace - 1, "")) == [2048]
    assert program.requests(GpuFacts(40, 1024, "7.5", 8_519_680, 1 << 40, "")) == [2048]


def test_one_by_one_and_grouped_kernels_need_no_workspace(program: Program) -> None:
    program.operator("aten::convolution", [[2, 8, 4, 4], [16, 8, 1, 1]], [2048], concrete=convolution_concrete(1))
    program.operator("aten::convolution", [[2, 8, 4, 4], [16, 4, 3, 3]], [2048], concrete=convolution_concrete(2))
    assert program.requests() == [2048, 2048]


def add_gradients(program: Program, named: bool) -> None:
    (first,) = program.operator("aten::mm", [[4, 4], [4, 4]], [64], phase="other")
    (second,) = program.operator("aten::relu", [[4, 4]], [64], phase="backward")
    concrete = [str(first) if named else "", ""]
    (total,) = program.operator("aten::add", [[4, 4], [4, 4]], [64], concrete=concrete, phase="backward")
    program.free(first)
    program.free(second)
    program.operator("aten::relu", [[4, 4]], [32], phase="backward")
    program.free(total)


def test_a_second_gradient_is_added_into_the_first(program: Program) -> None:
    add_gradients(program, named=True)
    assert program.requests() == [64, 8_519_680, 64, -64, 32, -64]
    assert program.effects()["gradient_sum_in_place"] > 0


def test_a_gradient_that_is_a_view_is_not_added_into(program: Program) -> None:
    add_gradients(program, named=False)
    assert program.requests() == [64, 8_519_680, 64, 64, -64, -64, 32, -64]


def test_scratch_of_a_cpu_kernel_is_dropped(program: Program) -> None:
    output, scratch = program.operator("aten::native_layer_norm", [[4, 8]], [128, 640])
    program.connection.execute("UPDATE cpu_allocations SET until_ns = from_ns + 1 WHERE alloc_id = ?", [scratch])
    assert output == 0
    assert program.requests() == [128]


def looped_step(program: Program, optimizer: str, *names: str) -> None:
    """An optimizer's step in a torch.profiler trace: these temporaries for two parameters, one after the other."""
    start = program.tick()
    for size in (1000, 2000):
        for made in [program.operator(name, [[size // 4]], [size], phase="optimizer") for name in names]:
            program.free(made[0])
    values = [99, f"Optimizer.step#{optimizer}.step", "", start, program.tick(), "optimizer", 0]
    program.connection.execute(
        f"INSERT INTO {program.prefix}_operators VALUES (?, ?, ?, ?, ?, ?, ?, NULL, NULL, NULL, NULL)", values
    )


@pytest.mark.parametrize(
    ("optimizer", "names", "wanted"),
    [
        ("AdamW", ("aten::sqrt", "aten::div"), [1000, 2000, -1000, -2000]),
        ("Adagrad", ("aten::sqrt",), [1000, 1000, 2000, 2000, -1000, -2000, -1000, -2000]),
        ("RAdam", ("aten::div", "aten::mul"), [1000, 2000, -1000, -2000]),
        ("Mine", ("aten::sqrt",), [1000, -1000, 2000, -2000]),
        ("Adam", ("aten::_foreach_sqrt", "aten::sqrt"), [1000, 1000, -1000, -1000, 2000, 2000, -2000, -2000]),
    ],
)
def test_a_looping_optimizer_is_taken_as_foreach(
    program: Program, optimizer: str, names: tuple[str, ...], wanted: list[int]
) -> None:
    looped_step(program, optimizer, *names)
    assert program.requests() == wanted


def test_attention_of_the_cpu_has_the_backward_scratch_of_cuda(program: Program) -> None:
    shape, lse = [2, 4, 16, 64], [2, 4, 16]
    backward = "aten::_scaled_dot_product_flash_attention_for_cpu_backward"
    program.operator(backward, [shape, shape, shape, shape, shape, lse], [32768], phase="backward")
    seen = program.effects()["attention_backward_scratch"]
    program.operator(backward, [shape] * 5 + [lse], [32768], types=["bfloat16"] * 5 + ["float32"], phase="backward")
    assert seen == 4 * 2 * 4 * 16 * 64 + 2 * 4 * 2 * 4 * 16 + 4 * 2 * 4 * (64 * 64 + 4)
    assert program.effects()["attention_backward_scratch"] == seen


def test_unfused_dropout_keeps_one_byte_an_element(program: Program) -> None:
    program.operator("aten::dropout", [[256, 256]], [262144, 262144])
    assert program.requests() == [65536, 262144]


def two_batches(program: Program, large_name: str = "aten::relu", large_size: int = 300) -> None:
    for prefix, batch, name, size in (("small", 2, "aten::relu", 200), ("large", 3, large_name, large_size)):
        program.add_tables(prefix)
        program.operator("aten::mm", [[batch, 5], [5, 5]], [20 * batch])
        (made,) = program.operator(name, [[batch, 5]], [size])
        program.free(made)


def scaled(program: Program, wanted: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xmem.simulate.rules.load_cpu_run", lambda *args: None)
    extrapolate(program.connection, (("a", 2), ("b", 3)), wanted)


def test_sizes_and_shapes_lie_on_a_line_in_the_batch(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    program.connection.execute("DROP TABLE cpu_allocations; DROP TABLE cpu_operators")
    two_batches(program)
    scaled(program, 130, monkeypatch)
    rows = program.connection.execute("SELECT bytes FROM cpu_allocations ORDER BY from_seq").fetchall()
    assert rows == [(2600,), (13000,)]
    shapes: list[Any] = program.connection.execute("SELECT shapes FROM cpu_operators ORDER BY span_id").fetchall()
    assert shapes == [([[130, 5], [5, 5]],), ([[130, 5]],)]


def test_frees_between_two_allocations_may_come_in_any_order(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    for prefix, order in (("small", (0, 1)), ("large", (1, 0))):
        program.add_tables(prefix)
        made = program.operator("aten::_to_copy", [[4]], [16]) + program.operator("aten::_to_copy", [[4]], [32])
        for nth in order:
            program.free(made[nth])
    program.connection.execute("DROP TABLE cpu_allocations; DROP TABLE cpu_operators")
    scaled(program, 130, monkeypatch)
    assert sorted(program.requests()) == [-32, -16, 16, 32]


def test_a_free_behind_another_allocation_does_not_align(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    for prefix, early in (("small", True), ("large", False)):
        program.add_tables(prefix)
        (made,) = program.operator("aten::relu", [[4]], [16])
        if early:
            program.free(made)
        program.operator("aten::relu", [[4]], [16])
        if not early:
            program.free(made)
    with pytest.raises(UsageError, match="differ in 1 places, first at activation"):
        scaled(program, 130, monkeypatch)


def test_another_program_does_not_align(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    two_batches(program, large_name="aten::gelu")
    with pytest.raises(UsageError) as error:
        scaled(program, 130, monkeypatch)
    assert error.value.message == "The profiles with batch sizes 2 and 3 differ in 1 places, first at aten::relu."
    assert "--no-extrapolate" in error.value.hint


def test_a_bare_size_takes_the_facts_of_the_nearest_gpu() -> None:
    facts = gpu_facts(parse_gpu("12"))
    assert facts.multiprocessors == 28
    assert facts.note == "Operators allocate as on the GeForce RTX 3060, the table's GPU of the nearest memory."
    named = gpu_facts(parse_gpu("h100"))
    assert (named.multiprocessors, named.cublas_workspace_bytes, named.note) == (132, 33_554_432, "")
