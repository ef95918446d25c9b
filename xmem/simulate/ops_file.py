"""Operation files: `{"capacity": bytes, "ops": [["alloc", id, bytes], ["free", id], ...]}` as a request stream."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xmem.errors import UnreadableError, UsageError
from xmem.simulate.gpu_table import Target, parse_gpu
from xmem.simulate.options import SimulateOptions, parse_reserve
from xmem.simulate.simulation import make_setup
from xmem.simulate.verdict import Verdict

if TYPE_CHECKING:
    import pyarrow as pa

    from xmem.simulate.judge import Case

_FORM = 'The form is {"capacity": 8589934592, "ops": [["alloc", "a", 1024], ["free", "a"], ["empty_cache"]]}.'
_DEFAULTS = SimulateOptions()


def simulate_ops(file: str | Path, *, gpu: str | int | None = None, options: SimulateOptions = _DEFAULTS) -> Verdict:
    """Replay an operation file on a GPU, or (None) on a device whose usable bytes are the file's capacity.

    An allocation may name stream and pool after its size: `["alloc", id, bytes, stream, "a:b"]`. `["step", n]` begins
    a step; without steps, a cycle that frees everything it will ever free counts as one. Raises UnreadableError where
    the file is no such file and UsageError where an operation makes no sense.
    """
    from xmem.simulate.judge import judge

    return judge(*prepare_ops(file, gpu=gpu, options=options)).verdict


def prepare_ops(
    file: str | Path, *, gpu: str | int | None = None, options: SimulateOptions = _DEFAULTS
) -> tuple[pa.Table, Case]:
    """Return the checked requests of an operation file and the case to judge them by."""
    import duckdb

    from xmem.simulate.judge import Case
    from xmem.simulate.requests import fill_requests, read_requests

    path = Path(file)
    capacity, rows, has_steps = read_ops(path)
    if gpu is None and capacity is None:
        raise UsageError(f"{path.name} states no capacity.", "Say for which GPU: --gpu 24.")
    reserve = parse_reserve(options) if gpu is not None else parse_reserve(options, "0")
    target = parse_gpu(gpu) if gpu is not None else _capacity_target(path.name, capacity or 0)
    setup, assumed = make_setup(options)
    with closing(duckdb.connect()) as connection:
        fill_requests(connection, rows)
        table = read_requests(connection, options.requests_sql)
    case = Case(
        run_id=None,
        run_name=path.stem,
        rank=0,
        device="cuda:0",
        target=target,
        reserve=reserve,
        setup=setup,
        torch_version_assumed=assumed,
        search_smallest=options.smallest,
        has_steps=has_steps,
        requests_sql=options.requests_sql,
    )
    return table, case


def read_ops(path: Path) -> tuple[int | None, pa.Table, bool]:
    """Return capacity, request rows and whether the file names steps."""
    import pyarrow as pa

    data = _read_json(path)
    columns = _Columns()
    for number, operation in enumerate(data["ops"]):
        if not isinstance(operation, list) or not operation:
            raise UsageError(f"Operation {number} of {path.name} is not a list such as ['alloc', 'a', 1024].", _FORM)
        problem = columns.add(number, operation)
        if problem:
            raise UsageError(f"Operation {number} of {path.name}, {json.dumps(operation)[:80]}: {problem}.", _FORM)
    rows = pa.table(
        {name: pa.array(values, pa.string() if name in ("action", "pool_id") else pa.int64())
         for name, values in columns.values.items()}
        | {name: pa.nulls(len(columns.values["seq"]), pa.string()) for name in ("phase", "category", "op")}
    )  # fmt: skip
    return data.get("capacity"), rows, columns.step is not None


class _Columns:
    """Columns of requests, grown operation by operation; ids of a file become numbers."""

    def __init__(self) -> None:
        self.values: dict[str, list[Any]] = {
            name: [] for name in ("seq", "action", "alloc_id", "bytes", "stream", "pool_id", "step")
        }
        self.step: int | None = None
        self.live: dict[str, int] = {}
        self.count = 0

    def add(self, number: int, operation: list[Any]) -> str:
        """Add one operation; return what is wrong with it, "" where nothing is."""
        word, *rest = operation
        if word == "step" and len(rest) == 1 and _is_count(rest[0]):
            self.step = rest[0]
            return ""
        if word == "empty_cache" and not rest:
            self._put(number, "empty_cache")
            return ""
        if word == "alloc" and 2 <= len(rest) <= 4:
            return self._alloc(number, *rest)
        if word in ("free", "record_stream") and len(rest) == (1 if word == "free" else 2):
            key = json.dumps(rest[0])
            if key not in self.live:
                return f"{rest[0]!r} is not allocated"
            if word == "record_stream":
                self._put(number, word, self.live[key], stream=rest[1])
            else:
                self._put(number, "free_requested", self.live.pop(key))
            return ""
        return "it is no operation that this version knows"

    def _alloc(self, number: int, name: Any, size: Any, stream: Any = 0, pool: Any = "0:0") -> str:
        key = json.dumps(name)
        if key in self.live:
            return f"{name!r} is allocated already"
        if not _is_count(size) or not isinstance(stream, int) or not isinstance(pool, str):
            return "size and stream must be whole numbers from 0, a pool text like 0:1"
        self.live[key] = self.count
        self._put(number, "alloc", self.count, size, stream, pool)
        self.count += 1
        return ""

    def _put(
        self, seq: int, action: str, alloc_id: int | None = None, size: int | None = None, stream: int = 0,
        pool: str = "0:0",
    ) -> None:  # fmt: skip
        row = (seq, action, alloc_id, size, stream, pool, self.step)
        for column, value in zip(self.values.values(), row, strict=True):
            column.append(value)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise UsageError(f"There is no file {str(path)!r}.") from error
    except OSError as error:
        raise UsageError(f"{str(path)!r} cannot be read: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:
        raise UnreadableError(f"{path.name} is not JSON: {error}", _FORM) from error
    if not isinstance(data, dict) or not isinstance(data.get("ops"), list):
        raise UnreadableError(f"{path.name} is not an operation file: it has no list 'ops'.", _FORM)
    capacity = data.get("capacity")
    if capacity is not None and not _is_count(capacity):
        raise UnreadableError(f"The capacity of {path.name} is not a whole number of bytes.", _FORM)
    return data


def _capacity_target(name: str, capacity: int) -> Target:
    return Target(name, capacity, f"The capacity that {name} states: {capacity} bytes.")
