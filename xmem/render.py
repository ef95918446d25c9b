"""Results to text, JSON and CSV; whatever a name from a trace holds, it stays inert on the terminal."""

from __future__ import annotations

import base64
import csv
import dataclasses
import datetime
import decimal
import io
import json
import math
import re
import textwrap
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from xmem.units import format_bytes

#: Narrowest that a column is cut to before whole columns are left out.
_NARROWEST = 12
_GAP = "  "
#: Text that is laid out like a number: 1,234 or 5.22 GiB or 12.3%.
_QUANTITY = re.compile(r"-?[0-9][0-9,]*(\.[0-9]+)?( ?(%|bytes?|[KMGT]iB))?")
_ESCAPES = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}


def make_inert(text: str) -> str:
    """Show control characters, direction marks and broken letters as escapes, so that no name acts on a terminal."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(_inert_letter(letter) for letter in text)


def _inert_letter(letter: str) -> str:
    category = unicodedata.category(letter)
    if category in ("Cc", "Cf", "Cs", "Zl", "Zp"):
        code = ord(letter)
        return _ESCAPES.get(letter) or (f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}")
    return letter


def cell_text(value: object) -> str:
    """Show one value of a result in a table."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, int | str):
        return make_inert(str(value))
    return make_inert(_compact_json(value) if isinstance(value, list | tuple | dict | bytes) else str(value))


def table_text(
    columns: Sequence[str], rows: Iterable[Sequence[object]], *, width: int | None = None, wrap: bool = False
) -> str:
    """Lay rows out under their column names, within `width`: text is cut, then last columns are left out.

    With `wrap` the last column is a text that goes on in further lines instead of being cut.
    """
    kept = [list(row) for row in rows]
    cells = [[cell_text(value) for value in row] for row in kept]
    names = [make_inert(name) for name in columns]
    numeric = [_is_numeric(row[index] for row in kept) for index in range(len(names))]
    natural = [max([_width(names[i]), *(_width(row[i]) for row in cells)]) for i in range(len(names))]
    if wrap and width is not None:
        natural[-1] = min(natural[-1], max(width - _total(natural[:-1]) - len(_GAP), _NARROWEST * 2))
    widths = _fit(natural, width)
    shown = range(len(widths))
    lines = [
        _line([names[i] for i in shown], widths, numeric),
        _line(["-" * widths[i] for i in shown], widths, numeric),
    ]
    for row in cells:
        further = textwrap.wrap(row[-1], widths[-1])[1:] if wrap else []
        row[-1] = textwrap.wrap(row[-1], widths[-1])[0] if further else row[-1]
        lines.append(_line([row[i] for i in shown], widths, numeric))
        lines += [" " * (_total(widths) - widths[-1]) + text for text in further]
    if len(widths) < len(names):
        left_out = ", ".join(names[len(widths) :])
        lines.append(f"(not shown for want of width: {left_out}; use --json or --csv)")
    return "\n".join(line.rstrip() for line in lines)


def _is_numeric(values: Iterable[object]) -> bool:
    known = [value for value in values if value not in (None, "")]
    return bool(known) and all(_is_number(value) for value in known)


def _is_number(value: object) -> bool:
    if isinstance(value, str):
        return _QUANTITY.fullmatch(value) is not None
    return isinstance(value, int | float | decimal.Decimal) and not isinstance(value, bool)


def _fit(natural: list[int], width: int | None) -> list[int]:
    """Return column widths that fit; fewer than given where even narrow columns do not."""
    widths = list(natural)
    if width is None:
        return widths
    while len(widths) > 1 and _total(min(each, _NARROWEST) for each in widths) > width:
        widths.pop()
    over = _total(widths) - width
    while over > 0:
        widest = max(range(len(widths)), key=widths.__getitem__)
        if widths[widest] <= _NARROWEST:
            break
        others = max([_NARROWEST, *(each for each in widths if each < widths[widest])])
        cut = min(over, max(widths[widest] - others, 1))
        widths[widest] -= cut
        over -= cut
    return widths


def _total(widths: Iterable[int]) -> int:
    listed = list(widths)
    return sum(listed) + len(_GAP) * (len(listed) - 1)


def _line(cells: Sequence[str], widths: Sequence[int], numeric: Sequence[bool]) -> str:
    return _GAP.join(_pad(cell, widths[i], right=numeric[i]) for i, cell in enumerate(cells))


def _pad(cell: str, width: int, *, right: bool) -> str:
    if _width(cell) > width:
        cell = _cut(cell, width)
    blanks = " " * (width - _width(cell))
    return blanks + cell if right else cell + blanks


def _cut(cell: str, width: int) -> str:
    kept = ""
    for letter in cell:
        if _width(kept + letter) > width - 1:
            break
        kept += letter
    return kept + "…"


def _width(text: str) -> int:
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.combining(letter) else 2 if unicodedata.east_asian_width(letter) in "WF" else 1
        for letter in text
    )


def fact_lines(facts: Iterable[tuple[str, str]]) -> list[str]:
    """Lay out `label  value` lines with the values in one column."""
    listed = list(facts)
    width = max((len(label) for label, _ in listed), default=0)
    return [f"  {label:<{width}}  {value}".rstrip() for label, value in listed]


def bytes_text(size: int | None) -> str:
    """Show bytes for a person, with the exact figure behind: `5.22 GiB (5,604,638,720)`."""
    if size is None or abs(size) < 1024:
        return format_bytes(size)
    return f"{format_bytes(size)} ({size:,})"


def json_text(value: object) -> str:
    """Write a result as JSON; keys keep their order, what is not a number in JSON (nan, inf) becomes null."""
    return json.dumps(_plain(value), indent=2, ensure_ascii=True, allow_nan=False)


def json_rows(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> Iterable[str]:
    """Write rows as a JSON array of objects, piece by piece."""
    yield "["
    separator = ""
    for row in rows:
        yield f"{separator}\n  {_compact_json(dict(zip(columns, row, strict=True)))}"
        separator = ","
    yield "\n]\n" if separator else "]\n"


def csv_rows(columns: Sequence[str], rows: Iterable[Sequence[object]], *, inert: bool = False) -> Iterable[str]:
    """Write rows as CSV, piece by piece; nested values as JSON; `inert` for a terminal."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    clean: Callable[[str], str] = make_inert if inert else str
    writer.writerow([clean(name) for name in columns])
    for row in rows:
        writer.writerow([_csv_cell(value, clean) for value in row])
        if buffer.tell() > 1 << 16:
            yield buffer.getvalue()
            buffer.seek(0)
            buffer.truncate()
    yield buffer.getvalue()


def _csv_cell(value: object, clean: Callable[[str], str]) -> object:
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list | tuple | dict | bytes):
        return clean(_compact_json(value))
    return value


def _compact_json(value: object) -> str:
    return json.dumps(_plain(value), ensure_ascii=True, allow_nan=False)


def _plain(value: Any) -> Any:
    """Reduce a result to what JSON knows."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in value]
    if isinstance(value, decimal.Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    if isinstance(value, datetime.datetime | datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, bytes):
        return base64.b64encode(value).decode("ascii")
    return str(value)
