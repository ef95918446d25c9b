"""Fixtures of this room's tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.paths import REPOSITORY


@pytest.fixture
def repository() -> Path:
    return REPOSITORY
