"""holistic-trace-analysis as tables: what it says agrees with the spans, and what it cannot read is an issue."""

from __future__ import annotations

import json
from importlib.util import find_spec

import pytest

from tests.ingest.traces import memory, span, trace
from tests.paths import SHARED_DATA, needs_shared
from xmem.errors import UsageError
from xmem.ingest import IngestOptions, ingest
from xmem.schema import HTA_TABLES
from xmem.store import Store

needs_hta = pytest.mark.skipif(find_spec("hta") is None, reason="holistic-trace-analysis is not installed")
#: HTA keeps whole microseconds: each start and end is rounded on its own.
ROUNDING_NS = 2_000
TRACES = [
    "AMD-AGI-TraceLens__tests__traces__h100__Qwen_Qwen1.5-0.5B-Chat__1016005.json.gz",
    "AMD-AGI-TraceLens__tests__traces__mi300__gaunernst_bert-small-uncased__1016001.json.gz",
    "facebookresearch-HolisticTraceAnalysis__tests__data__df_index_resolver__df_index_resolver.json.gz",
]


def small_trace(folder):
    kernel = {"device": 0, "stream": 7, "correlation": 1}
    records = [
        span("aten::mul", 10, 20),
        span("cudaLaunchKernel", 12, 3, cat="cuda_runtime", args={"correlation": 1}),
        span("mul_kernel", 40, 50, cat="kernel", pid=0, tid=7, args=kernel),
        memory(5, 512),
    ]
    file = folder / "t.json"
    file.write_text(json.dumps(trace(*records, distributedInfo={"rank": 0})))
    return file


def test_missing_extra_is_named_before_anything_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr("xmem.ingest.hta.find_spec", lambda name: None)
    with pytest.raises(UsageError) as caught:
        ingest(small_trace(tmp_path), options=IngestOptions(store=tmp_path / "store", hta=True))
    assert caught.value.message == "--hta needs holistic-trace-analysis, which is not installed."
    assert caught.value.hint == "Install it: pip install 'xmem[hta]'"
    assert not (tmp_path / "store").exists()


def test_without_the_option_nothing_of_it_is_touched(tmp_path, monkeypatch):
    monkeypatch.setattr("xmem.ingest.pipeline.analyse", None)
    ingest(small_trace(tmp_path), options=IngestOptions(store=tmp_path / "store"))
    connection = Store(tmp_path / "store").connect()
    assert [connection.execute(f"SELECT count(*) FROM {table}").fetchall() for table in HTA_TABLES] == [[(0,)]] * 7


@needs_hta
def test_sources_that_it_cannot_analyse_are_an_issue(tmp_path):
    file = small_trace(tmp_path)
    file.write_text(file.read_text().replace("aten::mul", "C:\\srv"))
    (run,) = ingest(file, options=IngestOptions(store=tmp_path / "store", hta=True))
    (issue,) = [issue for issue in run.issues if issue.code == "hta_failed"]
    assert issue.detail.startswith("reading: ")
    assert run.event_count == 1
    assert any("holistic-trace-analysis could not analyse this trace" in warning for warning in run.warnings)


@needs_hta
def test_nothing_is_printed(tmp_path, capfd):
    ingest(small_trace(tmp_path), options=IngestOptions(store=tmp_path / "store", hta=True))
    assert capfd.readouterr() == ("", "")


@needs_hta
@needs_shared
@pytest.mark.slow
@pytest.mark.parametrize("name", TRACES)
def test_kernel_counts_and_times_agree_with_the_spans(name, tmp_path):
    ingest(SHARED_DATA / "corpus" / name, options=IngestOptions(store=tmp_path / "store", hta=True))
    connection = Store(tmp_path / "store").connect()
    ours = {
        name: (count, total)
        for name, count, total in connection.execute(
            "SELECT name, count(*), sum(dur_ns)::BIGINT FROM spans"
            " WHERE kind IN ('kernel', 'memcpy', 'memset') GROUP BY ALL"
        ).fetchall()
    }
    theirs = connection.execute("SELECT name, total_ns, mean_ns FROM hta_kernels").fetchall()
    assert theirs
    for kernel, total_ns, mean_ns in theirs:
        count, exact_ns = ours[kernel]
        assert abs(total_ns - exact_ns) <= ROUNDING_NS * count, kernel
        if mean_ns:
            assert round(total_ns / mean_ns) == count, kernel
    assert len(theirs) == len(ours)
    off = connection.execute(
        f"""
        WITH edges AS (
          SELECT ts_ns FROM spans WHERE kind = 'runtime' UNION SELECT ts_ns FROM spans WHERE stream IS NOT NULL
        )
        SELECT count(*) FROM hta_queue_length q ASOF JOIN edges e ON q.ts_ns + {ROUNDING_NS} >= e.ts_ns
        WHERE q.ts_ns - e.ts_ns > {ROUNDING_NS}
        """
    ).fetchall()
    assert off == [(0,)]
