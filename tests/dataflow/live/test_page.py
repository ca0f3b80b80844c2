"""The page of figures: what a training writes, who may read it, and that none of it stops a training."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

import dataflow.live.page as page_module
from dataflow import DataLoader
from dataflow.live.page import LivePage
from dataflow.live.reading import read_pages
from dataflow.live.record import TrainingRecord

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A runtime folder, and a page of this process in it."""
    runtime = tmp_path / "run"
    runtime.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    monkeypatch.setattr(page_module, "_page", page := LivePage())
    page.due = 0.0
    yield runtime / "dataflow"
    page.close()


def pages(folder: Path) -> list[TrainingRecord]:
    return read_pages([folder])


def test_a_training_writes_what_its_loaders_say(folder: Path) -> None:
    loader = DataLoader(range(8), batch_size=2, name="numbers")
    next(iter(loader))
    [record] = pages(folder)
    [one] = record.loaders
    assert (record.pid, record.state, record.is_alive) == (os.getpid(), "running", True)
    assert (one.name, one.role, one.state, one.loop_batches, one.loop_length) == (
        "numbers",
        "train",
        "running",
        1,
        4,
    )
    assert one.stats["batches"] == 1
    assert record.last_batch_at > record.began_at


def test_the_page_and_its_folder_are_for_this_user_only(folder: Path) -> None:
    next(iter(DataLoader(range(8))))
    [path] = folder.iterdir()
    assert (stat.S_IMODE(folder.stat().st_mode), stat.S_IMODE(path.stat().st_mode)) == (0o700, 0o600)


def test_a_page_is_written_once_a_second_at_most(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(page_module.time, "monotonic", lambda: now[0])
    batches = iter(DataLoader(range(100)))  # the loader itself is gone, and its loop goes on
    seen = []
    for _ in range(30):
        next(batches)
        seen.append(pages(folder)[0].loaders[0].stats["batches"])
        now[0] += 0.1
    assert len(set(seen)) == 3
