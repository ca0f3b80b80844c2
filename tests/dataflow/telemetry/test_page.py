"""The page of figures: what a training writes, who may read it, and that none of it stops a training."""

from __future__ import annotations

import copy
import os
import signal
import stat
import subprocess
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets_kit import Made

import dataflow.telemetry.status.page as page_module
from dataflow import DataLoader
from dataflow.stream.loader import StreamLoader
from dataflow.telemetry.status import reading
from dataflow.telemetry.status.facts import counts_of, totals_of
from dataflow.telemetry.status.names import name_of, name_of_urls, role_of
from dataflow.telemetry.status.page import StatusFile
from dataflow.telemetry.status.reading import read_pages, remove_old
from dataflow.telemetry.status.record import _HEADER, _MAGIC, TrainingRecord, from_page, to_page, why_unread
from dataflow.telemetry.timing.health import health_of
from dataflow.workers import fetching

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A runtime folder, and a page of this process in it that is written at the first batch."""
    runtime = tmp_path / "run"
    runtime.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    monkeypatch.setattr(page_module, "_EVENTS_S", 60.0)  # on a busy machine a write may take long
    monkeypatch.setattr(page_module, "page_folders", lambda: [runtime / "dataflow"])
    monkeypatch.delenv("DATAFLOW_LIVE", raising=False)
    page = written_page(monkeypatch)
    yield runtime / "dataflow"
    page.close()


def written_page(monkeypatch: pytest.MonkeyPatch) -> StatusFile:
    monkeypatch.setattr(page_module, "_page", page := StatusFile())
    page.due = 0.0
    return page


def only(folder: Path) -> TrainingRecord:
    [record] = read_pages([folder])
    return record


# ---- what is written ------------------------------------------------------------------------------------


def test_a_training_writes_what_its_loaders_say(folder: Path) -> None:
    loader = DataLoader(range(8), batch_size=2, name="numbers")
    batches = iter(loader)
    next(batches)
    record = only(folder)
    [one] = record.loaders
    assert (record.pid, record.state, record.is_alive) == (os.getpid(), "running", True)
    assert (one.name, one.role, one.state) == ("numbers", "train", "running")
    assert (one.loop_batches, one.loop_length, one.stats["batches"]) == (1, 4, 1)
    assert record.last_batch_at > record.began_at


def test_a_page_is_written_once_a_second_at_most(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(page_module.time, "monotonic", lambda: now[0])
    batches = iter(DataLoader(range(100)))  # the loader itself is gone, and its loop goes on
    seen = []
    for _ in range(30):
        next(batches)
        seen.append(only(folder).loaders[0].stats["batches"])
        now[0] += 0.1
    assert len(set(seen)) == 3


def test_a_slow_disk_has_pages_written_less_often_and_a_busy_machine_does_not(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, slow = [100.0], {"disk": 0.0, "figures": 0.0}
    monkeypatch.setattr(page_module.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(page_module.time, "thread_time", lambda: 0.0)
    pwrite, rank = os.pwrite, page_module.rank_info

    def written(*arguments: Any) -> int:
        now[0] += slow["disk"]
        return pwrite(*arguments)

    def told() -> Any:
        now[0] += slow["figures"]
        return rank()

    monkeypatch.setattr(page_module.os, "pwrite", written)
    monkeypatch.setattr(page_module, "rank_info", told)
    page, batches = page_module.page_of_process(), iter(DataLoader(range(100)))
    next(batches)
    for kind, pause in (("figures", 1.0), ("disk", 20.0)):
        now[0] = began = page.due
        slow[kind] = 0.2
        next(batches)
        slow[kind] = 0.0
        assert page.due - began == pytest.approx(pause)


@pytest.mark.parametrize("fails", [False, True])
def test_the_end_of_a_loop_is_written_at_once(folder: Path, fails: bool) -> None:
    class Failing(torch.utils.data.Dataset[int]):
        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> int:
            if index == 2 and fails:
                raise ValueError("no such sample at s3://bucket/x?X-Amz-Signature=abc")
            return index

    loader = DataLoader(Failing())
    try:
        for _ in loader:
            pass
    except ValueError:
        assert fails
    [one] = only(folder).loaders
    assert one.state == ("failed" if fails else "ended")
    assert ("no such sample" in one.error) is fails
    assert "abc" not in one.error
    assert loader.health().is_alive is not fails


@pytest.mark.parametrize("over_shards", [True, False], ids=["shards", "map-style"])
def test_a_loop_that_is_left_has_ended(folder: Path, ints: Made, over_shards: bool) -> None:
    loader = DataLoader(ints.open() if over_shards else range(8), batch_size=2)
    for number, _ in enumerate(loader):
        if number == 1:
            break
    [one] = only(folder).loaders
    assert (one.state, one.loop_batches) == ("ended", 2)
    outer = iter(loader)
    next(outer)
    for _ in loader:  # another loop over it, which is left: the outer one goes on
        break
    next(outer)
    page_module.page_of_process().event()
    assert only(folder).loaders[0].state == "running"


def test_the_time_after_a_loop_is_not_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(fetching.time, "perf_counter", lambda: now[0])
    loader = DataLoader(range(4))

    def train() -> None:
        for _ in loader:
            now[0] += 1.0

    train()
    now[0] += 100.0
    assert (loader.stats().elapsed_s, loader.stats().batches_per_s) == (4.0, 1.0)
    for _ in loader:
        break
    now[0] += 100.0
    train()
    assert loader.stats().elapsed_s == 8.0


def test_a_loader_is_asked_how_it_fares_when_its_page_is_written(
    folder: Path, ints: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    stats = StreamLoader.stats
    monkeypatch.setattr(StreamLoader, "stats", lambda self: asked.append(0) or stats(self))
    page_module.page_of_process().due = float("inf")
    batches = iter(DataLoader(ints.open(), batch_size=2))
    next(batches)
    assert asked == []
    page_module.page_of_process().write(0.0)
    assert len(asked) == 1


def test_a_copy_counts_its_own_batches(folder: Path, ints: Made) -> None:
    loader = DataLoader(ints.open(), batch_size=2)
    num_batches = len(list(loader))
    again = copy.copy(loader)
    list(again)
    [first, second] = only(folder).loaders
    for one in (first, second):
        assert totals_of(counts_of(one.stats), one.offset)["batches"] == num_batches


def test_the_first_page_reads_none_of_other_trainings(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.mkdir(0o700)
    for number in range(50):
        (folder / f"{10_000_000 + number}-1-0badcafe.page").touch()
    looked: list[str] = []
    monkeypatch.setattr(reading, "_read", lambda path: looked.append(path.name))
    monkeypatch.setattr(reading, "start_ticks", lambda pid: looked.append(str(pid)) or 0)
    next(iter(DataLoader(range(8))))
    assert looked == []


def test_a_page_of_a_loader_over_other_data_imports_no_store() -> None:
    program = (
        "import sys; from dataflow import DataLoader; list(DataLoader(range(4))); "
        "print(sorted(name for name in sys.modules if name.startswith(('prefetch.store', 'prefetch.cache'))))"
    )
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert said.stdout == "[]\n"


def test_a_loop_that_never_has_its_first_batch_is_seen_to_hang(folder: Path) -> None:
    loader = DataLoader(range(4), batch_size=2)
    list(loader)
    ended = only(folder).last_batch_at

    def hangs(*_: object) -> Any:
        raise KeyboardInterrupt  # in place of the batch that does not come

    loader.collate_fn = hangs
    loop = iter(loader)
    [one] = only(folder).loaders
    assert (one.state, one.loop_batches) == ("running", 0)
    assert one.loop_began_at > ended
    assert health_of(one, one.loop_began_at + 599).is_alive
    assert not health_of(one, one.loop_began_at + 601).is_alive
    del loop


def test_a_write_that_hangs_keeps_no_loader_from_starting(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_module, "_PATIENCE_S", 0.01)
    page = page_module.page_of_process()
    with page._lock:
        loader = DataLoader(range(4), batch_size=2)
        assert len(list(loader)) == 2
        assert loader.name == "range"
    assert [one.loop_batches for one in page.snapshot().loaders] == [2]


def test_names_of_two_loaders_differ(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    loaders = [DataLoader(range(4)) for _ in range(2)]
    given = [DataLoader(range(4), name="mine") for _ in range(2)]
    for loader in (*loaders, *given):
        next(iter(loader))
    assert [loader.name for loader in loaders] == ["range", "range-2"]
    assert [loader.name for loader in given] == ["mine", "mine-2"]
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
        "two loaders that run in this process have the name 'mine'"
    ]


def test_a_loader_that_comes_in_place_of_one_that_is_gone_counts_on(folder: Path) -> None:
    for _ in range(3):
        for _ in DataLoader(range(4)):
            pass
    [one] = only(folder).loaders
    assert totals_of(counts_of(one.stats), one.offset)["batches"] == 12


def test_a_loop_without_gradients_is_validation(folder: Path) -> None:
    loader = DataLoader(range(4))
    with torch.no_grad():
        next(iter(loader))
    assert only(folder).loaders[0].role == "validation"
    assert role_of("imagenet/val", trains=True) == "validation"
    assert role_of("test-run", trains=True) == "train"
    with pytest.raises(ValueError, match='role must be "train" or "validation"'):
        DataLoader(range(4), role="test")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("urls", "name"),
    [
        (["/data/web/a.tar", "/data/web/b.tar"], "web"),
        (["/data/imagenet/train/a.tar", "/data/imagenet/train/b.tar"], "imagenet/train"),
        (["/data/web/a/1.tar", "/data/web/b/2.tar"], "web"),
        (["/data/points.tar"], "points"),
        (["/data/points/00000-of-00010.parquet"], "points"),
        (["s3://bucket/c4/en/x-0.json.gz", "s3://bucket/c4/en/x-1.json.gz"], "en"),
        (
            ["https://me:secret@host.org/web/a.tar?token=t", "https://me:secret@host.org/web/b.tar?token=t"],
            "web",
        ),
        (["hf://datasets/org/name@" + "0" * 40 + "/train/0.parquet"], "org/name"),
    ],
)
def test_a_name_is_that_of_the_folder_or_repository(urls: list[str], name: str) -> None:
    assert name_of_urls(urls) == name


def test_a_name_is_no_url() -> None:
    assert name_of([1, 2]) == "list"
    for name in ("s3://bucket/web", "", "x" * 101):
        with pytest.raises(ValueError, match="name must be a text of 1 to 100 letters, no URL"):
            DataLoader(range(4), name=name)


# ---- who reads it ---------------------------------------------------------------------------------------


def test_the_page_and_its_folder_are_for_this_user_only(folder: Path) -> None:
    next(iter(DataLoader(range(8))))
    [path] = folder.iterdir()
    assert (stat.S_IMODE(folder.stat().st_mode), stat.S_IMODE(path.stat().st_mode)) == (0o700, 0o600)


def test_half_a_page_is_none(folder: Path) -> None:
    next(iter(DataLoader(range(8))))
    page = to_page(only(folder), 1)
    assert from_page(page) is not None
    assert [n for n in range(len(page)) if from_page(page[:n]) is not None] == []
    changed = bytearray(page)
    changed[-2] ^= 1
    assert from_page(bytes(changed)) is None


def test_a_page_that_is_nested_deeply_is_none(folder: Path) -> None:
    next(iter(DataLoader(range(8))))
    deep = b', "more": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    body = to_page(only(folder), 1)[_HEADER.size : -1] + deep
    page = _HEADER.pack(_MAGIC, 1, len(body), zlib.crc32(body)) + body
    assert from_page(page) is None
    assert why_unread(page) == "it is damaged"


def trained_in_a_child(*, dies: bool) -> None:
    """Train in a process that is forked, and ends by itself or is killed."""
    child = os.fork()
    if child == 0:
        try:
            page_module.page_of_process().due = 0.0
            for _ in DataLoader(range(6), batch_size=2, name="numbers"):
                page_module.page_of_process().due = 0.0
            if dies:
                os.kill(os.getpid(), signal.SIGKILL)
            page_module.page_of_process().close()
        finally:
            os._exit(0)
    assert os.WIFSIGNALED(os.waitpid(child, 0)[1]) is dies


def test_the_next_training_counts_on_and_knows_how_the_last_one_ended(folder: Path) -> None:
    trained_in_a_child(dies=True)
    assert only(folder).state == "died"
    trained_in_a_child(dies=False)
    first, second = read_pages([folder])
    [one] = second.loaders
    assert (first.state, second.state) == ("died", "ended")
    assert totals_of(counts_of(one.stats), one.offset)["batches"] == 6
    remove_old(folder, older_than_s=-60)
    assert read_pages([folder]) == []


def test_few_pages_of_processes_that_are_gone_stay(folder: Path) -> None:
    next(iter(DataLoader(range(8))))
    for number in range(70):
        (path := folder / f"{10_000_000 + number}-1.page").touch()
        os.utime(path, (2e9, 2e9))  # after that of this process
    remove_old(folder)
    assert len(list(folder.iterdir())) == 64 + 1
    assert only(folder).is_alive


# ---- what goes wrong ------------------------------------------------------------------------------------


def taken_batches() -> int:
    return sum(1 for _ in DataLoader(range(8)))


@pytest.mark.parametrize("kind", ["a link", "a file", "nothing"])
def test_a_folder_that_is_not_ours_is_left_alone(
    folder: Path, kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    if kind == "a link":
        folder.symlink_to(other)
    elif kind == "a file":
        folder.touch()
    page = StatusFile(lambda: [folder] if kind != "nothing" else [tmp_path / "none" / "dataflow"])
    page.due = 0.0
    monkeypatch.setattr(page_module, "_page", page)
    assert taken_batches() == 8
    assert list(other.iterdir()) == []
    assert [one.getMessage().partition(":")[0] for one in caplog.records] == [
        "`dataflow top` and metrics do not see this training, whose figures could not be written"
    ]


class Odd(torch.utils.data.Dataset[int]):
    """Its attributes raise, and so do the texts of its errors."""

    class UnspeakableError(Exception):
        def __str__(self) -> str:
            raise ValueError("no words")

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        if index == 3:
            raise self.UnspeakableError
        return index

    def __getattr__(self, name: str) -> object:
        if name in ("dataset", "info"):
            raise RuntimeError(name)
        raise AttributeError(name)


@pytest.mark.parametrize("name", [None, "odd"])
def test_odd_datasets_are_trained_on(folder: Path, name: str | None) -> None:
    batches = iter(DataLoader(Odd(), name=name))
    assert [int(next(batches)) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(Odd.UnspeakableError):
        next(batches)


def test_a_full_disk_is_told_once(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    page = page_module.page_of_process()
    page._fd = os.open("/dev/full", os.O_WRONLY)
    for _ in range(3):
        page.due = 0.0
        assert taken_batches() == 8
    assert len(caplog.records) == 1


def test_a_page_that_is_cut_is_whole_again_a_second_later(folder: Path) -> None:
    loader = DataLoader(range(8))
    batches = iter(loader)
    next(batches)
    [path] = folder.iterdir()
    os.truncate(path, 10)
    assert read_pages([folder]) == []
    page_module.page_of_process().due = 0.0
    next(batches)
    assert only(folder).loaders[0].stats["batches"] == 2


def test_forked_children_and_those_who_say_so_write_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = iter(DataLoader(range(8)))
    next(batches)
    page_module.page_of_process().due = 0.0
    child = os.fork()
    if child == 0:
        try:
            next(batches)
        finally:
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert only(folder).loaders[0].stats["batches"] == 1
    monkeypatch.setenv("DATAFLOW_LIVE", "0")
    written_page(monkeypatch)
    loader = DataLoader(range(4))
    assert len(list(loader)) == 4
    assert len(list(folder.iterdir())) == 1
    assert loader.health().is_ready
