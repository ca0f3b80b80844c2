"""What holds for every test of an engine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from engine_kit import nothing_left_behind


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    with nothing_left_behind():
        yield
