"""Recorded allocator cases: where they are, and requests out of them for the bulk path."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.paths import SHARED_DATA

ORACLE = SHARED_DATA / "oracle"
CASES = sorted(ORACLE.glob("*.json")) + sorted(ORACLE.glob("train/*.json"))


def read(path: Path) -> dict[str, Any]:
    """Return a case as it was recorded."""
    case: dict[str, Any] = json.loads(path.read_bytes())
    return case
