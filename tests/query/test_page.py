"""The HTML page: whole in itself, nothing escapes into it, and in a real browser its numbers are SQL's."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.query import tiny
from xmem.errors import RefusedError
from xmem.query import query
from xmem.query.charts import CHARTS, datasets, draw, specs, write_chart
from xmem.query.html import embed_json, page, write_page
from xmem.query.subject import find_subject

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_browser = pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")
NASTY = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\u2028'\"&${x}`"


class Elements(HTMLParser):
    """Collects what a browser's DOM holds."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_training(tmp_path_factory.mktemp("store") / "s").path


def page_data(text: str) -> dict[str, object]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert found is not None
    return json.loads(found[1])  # type: ignore[no-any-return]


def open_in_browser(page_file: Path, tmp_path: Path, fragment: str = "") -> tuple[str, list[str]]:
    """Return the DOM after the scripts ran, and what the console said."""
    command = [
        str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
        "--disable-background-networking", "--disable-component-update", "--disable-sync",
        f"--user-data-dir={tmp_path / 'profile'}", "--enable-logging=stderr", "--virtual-time-budget=20000",
        "--dump-dom", f"file://{page_file}{fragment}",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line or "Refused to" in line]


def test_page_asks_no_network_and_runs_only_its_own_scripts(store: Path) -> None:
    text = page(store=store)
    elements = Elements(text).found
    links = [value for _, attributes in elements for name, value in attributes.items() if name in ("src", "href")]
    assert links == []
    policy = next(a["content"] for tag, a in elements if tag == "meta" and "http-equiv" in a)
    assert policy is not None and policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe-eval" not in policy and policy.count("'sha256-") == 2
    assert len(text) < 5_000_000


def test_moments_hold_every_byte(store: Path) -> None:
    data = page_data(page(store=store))
    seqs = [row["e"] for row in data["datasets"]["curve"]]  # type: ignore[index]
    levels = dict(query("SELECT seq, allocated_bytes FROM events WHERE device_type = 'cuda'", store=store).rows())
    held = [0] * len(data["groups"])  # type: ignore[arg-type]
    for moment, changes in zip(data["moments"], data["changes"], strict=True):  # type: ignore[call-overload]
        for group, size, _ in changes:
            held[group] += size
        assert sum(held) == levels[seqs[moment]]
    assert max(levels.values()) == 4608


def test_upper_edges_add_up_to_the_level(store: Path) -> None:
    from xmem.query import connect

    connection = connect(store)
    picture = draw(connection, find_subject(connection, store, None, None, None))
    rows, (_, size) = datasets(picture)["curve"], picture.unit
    assert [row["c0"] for row in rows] == [row["allocated"] for row in rows]
    assert [round(row["allocated"] * size) for row in rows] == picture.curve.points["allocated_bytes"].to_list()
    assert picture.categories[-2:] == ["parameter", "unknown"]
    for layer in specs(picture, "t")["memory"]["layer"][0]["layer"]:
        assert layer["encoding"]["y"]["stack"] is None  # else levels at equal times would be added up


def test_thinning_loses_no_peak(tmp_path: Path) -> None:
    lines = ["seq action id bytes category"]
    for number in range(3000):
        size = 10**6 if number == 1777 else 10 + number % 7
        lines += [
            f"{2 * number} alloc {number} {size} activation",
            f"{2 * number + 1} free_requested {number} {size} activation",
        ]
    store = tiny.write(tmp_path / "s", "\n".join(lines)).path
    data = page_data(page(store=store))
    curve = data["datasets"]["curve"]  # type: ignore[index]
    assert len(curve) < 2500
    peak = curve[data["moments"][data["peak"]]]  # type: ignore[index]
    assert peak["e"] == 2 * 1777 and peak["allocated"] == pytest.approx(10**6 / 1024, abs=1e-3)


def test_names_stay_text(tmp_path: Path) -> None:
    stacks = [{"stack_id": 0, "frames": [{"name": NASTY, "filename": f"{NASTY}.py", "line": 1}]}]
    spans = [tiny.span(0, "operator", NASTY, 0, 9)]
    issues = [{"code": "no_rank", "severity": "info", "count": 1, "detail": NASTY}]
    events = "seq action id bytes stack span category\n0 alloc 0 7 0 0 input\n1 free_requested 0 7 0 0 input"
    store = tiny.write(tmp_path / "s", events, name=NASTY, stacks=stacks, spans=spans, issues=issues).path
    text = page(store=store)
    assert [tag for tag, _ in Elements(text).found if tag in ("script", "img")] == ["script"] * 3
    assert NASTY in page_data(text)["texts"]  # type: ignore[operator]


def test_embedded_json_leads_nowhere() -> None:
    text = embed_json({"x": "</script><!--\u2028&"})
    assert not re.search(r"[<>&\u2028]", text) and json.loads(text) == {"x": "</script><!--\u2028&"}


@needs_browser
@pytest.mark.slow
def test_browser_shows_what_sql_says(store: Path, tmp_path: Path) -> None:
    write_page(tmp_path / "page.html", store=store)
    for fragment, expected in (("", 4608), ("#event=15", 3328), ("#event=1", 1024)):
        dom, console = open_in_browser(tmp_path / "page.html", tmp_path, fragment)
        assert console == []
        elements = Elements(dom).found
        assert ("body", {"data-ready": "yes"}) in elements
        total = next(attributes for tag, attributes in elements if attributes.get("id") == "alive-sum")
        assert total["data-bytes"] == str(expected)
        body = dom[dom.index('<table id="alive">') : dom.index("Flame graph of these bytes")]
        assert sum(map(int, re.findall(r'data-bytes="(\d+)"', body))) == expected
        flame = dom[dom.index('id="flame"') : dom.index('id="flame-detail"')]
        assert re.findall(r'data-bytes="(\d+)" data-depth="0"', flame) == [str(expected)]
        assert sum(map(int, re.findall(r'data-bytes="(\d+)" data-depth="1"', flame))) == expected
        assert dom.count('class="marks"') == 3


@needs_browser
@pytest.mark.slow
def test_browser_runs_nothing_that_a_name_says(tmp_path: Path) -> None:
    stacks = [{"stack_id": 0, "frames": [{"name": NASTY, "filename": "m.py", "line": 1}]}]
    events = f"seq action id bytes stack category\n0 alloc 0 7 0 {''.join(NASTY.split())}"
    store = tiny.write(tmp_path / "s", events, name=NASTY, stacks=stacks).path
    write_page(tmp_path / "page.html", store=store)
    dom, console = open_in_browser(tmp_path / "page.html", tmp_path)
    tags = [tag for tag, _ in Elements(dom).found]
    assert console == [] and tags.count("img") == 0 and tags.count("script") == 3


@pytest.mark.parametrize("name", CHARTS)
def test_each_chart_becomes_a_picture(store: Path, tmp_path: Path, name: str) -> None:
    write_chart(name, tmp_path / "c.png", store=store)
    write_chart(name, tmp_path / "c.svg", store=store)
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG\r\n")
    assert (tmp_path / "c.svg").read_text().startswith("<svg")


def test_page_that_cannot_be_written_is_said(store: Path, tmp_path: Path) -> None:
    with pytest.raises(RefusedError) as caught:
        write_page(tmp_path / "none" / "page.html", store=store)
    assert str(caught.value).endswith("cannot be written: No such file or directory.\nName another file.")


def test_charts_draw_named_data_only(store: Path) -> None:
    """Data that stand in a chart itself would be lost on the page, which gives every chart the same data sets."""
    from xmem.query import connect

    picture = draw(connect(store), find_subject(connect(store), store, None, None, None))
    names = set(re.findall(r'"data": \{"name": "(\w+)"\}', json.dumps(specs(picture, "t"))))
    assert names == set(datasets(picture)) and '"values": [{' not in json.dumps(specs(picture, "t"))
    assert not any("datasets" in spec for spec in specs(picture, "e").values())
