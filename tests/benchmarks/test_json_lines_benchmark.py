"""Lines of JSON as columns: each kind of lines is measured, of a checkout by itself."""

from __future__ import annotations

import pytest

pytest.importorskip("psutil")

from benchmarks.kernels import json_lines


@pytest.mark.parametrize("kind", json_lines.KINDS)
def test_each_kind_of_lines_is_measured(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_lines, "MEGABYTES", 0.05)
    monkeypatch.setattr(json_lines, "COUNTED_S", 0.01)
    figures = json_lines.measured(kind)
    assert min(figures["index_mb_per_s"], figures["decode_mb_per_s"]) > 0
    assert figures["lost_s_per_100_mb"] >= 0
