"""Where tests find the repository, its examples and the shared data beside it."""

from __future__ import annotations

from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
EXAMPLES = REPOSITORY / "examples"
SHARED = REPOSITORY.parent / "shared"
SHARED_DATA = SHARED / "data"

#: Mark for tests that read the shared data; they are skipped where it does not lie beside the repository.
needs_shared = pytest.mark.skipif(
    not SHARED_DATA.is_dir(), reason="the shared data folder is not beside the repository"
)
