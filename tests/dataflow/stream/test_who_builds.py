"""Who builds batches over shards: the consumer, threads or processes; what is chosen, and what it changes."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets_kit import Made, make_parquet, make_tar
from stream_kit import session_of, stream_of

from dataflow import DataLoader, Image, Mixture, SampleError, ShardedDataset, Topology
from dataflow.batch.delivered import Delivered
from dataflow.processes import auto
from dataflow.processes.auto import AutoBuilders
from dataflow.stream import builders
from prefetch.work import Piece

_EPOCHS_AHEAD = 16
CORES = len(os.sched_getaffinity(0))


@pytest.fixture
def tar(tmp_path: Path) -> Made:
    return make_tar(tmp_path)


def marked(sample: dict[str, Any], *, rng: np.random.Generator) -> dict[str, Any]:
    """Which sample, what was drawn for it, and the process and thread that did it."""
    draw = float(rng.random())
    return {"cls": sample["cls"], "draw": draw, "pid": os.getpid(), "thread": threading.get_ident()}


def content(batch: dict[str, Any]) -> tuple[list[int], list[float]]:
    return batch["cls"].tolist(), batch["draw"].tolist()


# ---- numbers and names ------------------------------------------------------------------------------------


@pytest.mark.here
@pytest.mark.parametrize(
    ("options", "workers", "number"),
    [
        ({}, "auto", CORES),
        ({"num_workers": 0}, "main", 0),
        ({"num_workers": 2}, "process", 2),
        ({"num_workers": 2, "workers": "thread"}, "thread", 2),
        ({"num_workers": 2, "workers": "auto"}, "auto", 2),
        ({"workers": "process"}, "process", CORES),
        ({"workers": "thread"}, "thread", CORES),
    ],
)
def test_arguments_decide_who_builds(tar: Made, options: dict[str, Any], workers: str, number: int) -> None:
    loader = DataLoader(tar.open(transform=dict), 2, **options)
    assert (loader.workers, loader.num_workers) == (workers, number)


def test_over_other_datasets_no_number_means_none() -> None:
    assert DataLoader([1, 2, 3]).num_workers == 0


@pytest.mark.here
def test_cores_are_shared_out_among_the_ranks_of_a_machine(
    tar: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(builders, "allowed_cores", lambda: 8)
    for ranks, number in ((1, 8), (2, 4), (3, 2), (16, 1)):
        place = Topology(0, ranks, local_rank=0, local_world_size=ranks)
        assert DataLoader(tar.open(transform=dict), 2, topology=place).num_workers == number


@pytest.mark.filterwarnings("ignore:This DataLoader will create 8 worker processes")
def test_a_trial_knows_the_cores_whatever_the_number_of_workers(
    tar: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(builders, "allowed_cores", lambda: 2)
    for options, threads, number in (({}, 2, 2), ({"num_workers": 8}, 8, 8)):
        loader = DataLoader(tar.open(transform=dict), 2, workers="auto", **options)
        plan = stream_of(loader).builder_plan
        assert (plan.num_threads, plan.num_workers, plan.num_cores) == (threads, number, 2)


@pytest.mark.here
def test_without_functions_of_the_user_threads_build_and_nothing_is_tried(tmp_path: Path) -> None:
    with DataLoader(make_tar(tmp_path).open(columns=["cls"]), 4, shuffle=True) as loader:
        list(loader)
        stats = loader.stats()
    assert loader.workers == stats.workers == "thread"
    assert stats.workers_reason.startswith("batches are copies alone")
    assert stats.num_workers == loader.num_workers


@pytest.mark.here
@pytest.mark.parametrize(("cores", "workers"), [(2, "thread"), (4, "thread"), (5, "auto"), (16, "auto")])
def test_decoders_that_let_go_of_the_lock_are_tried_where_many_threads_would_decode(
    tar: Made, monkeypatch: pytest.MonkeyPatch, cores: int, workers: str
) -> None:
    monkeypatch.setattr(builders, "allowed_cores", lambda: cores)
    images = tar.open(columns=["cls", "bin"], decode={"bin": Image(size=8)})
    assert DataLoader(images, 4).workers == workers
    assert DataLoader(tar.open(columns=["cls", "txt"]), 4).workers == "thread"


# ---- in the consumer --------------------------------------------------------------------------------------


def test_without_workers_batches_are_built_by_who_asks_and_are_the_same(tar: Made) -> None:
    dataset = tar.open(transform=marked)
    with DataLoader(dataset, 3, shuffle=True, workers="thread") as loader:
        whole = [[content(batch) for batch in loader] for _ in range(2)]
    others = {*threading.enumerate()}
    with DataLoader(dataset, 3, shuffle=True, num_workers=0) as loader:
        batches = [[*loader] for _ in range(2)]
        assert loader.stats().workers == "main"
        assert not any("build" in thread.name for thread in {*threading.enumerate()} - others)
    assert [[content(batch) for batch in epoch] for epoch in batches] == whole
    assert {int(n) for batch in chain(*batches) for n in batch["thread"]} == {threading.get_ident()}


def test_without_workers_copies_are_made_by_who_asks(tmp_path: Path) -> None:
    dataset = make_parquet(tmp_path).open()
    with DataLoader(dataset, 4, shuffle=True) as loader:
        whole = [repr(batch) for batch in loader]
    with DataLoader(dataset, 4, shuffle=True, num_workers=0) as loader:
        assert [repr(batch) for batch in loader] == whole


def test_without_workers_no_batch_is_built_before_it_is_asked_for(tar: Made) -> None:
    built = []

    def noted(sample: dict[str, Any]) -> dict[str, Any]:
        built.append(int(sample["cls"]))
        return sample

    with DataLoader(tar.open(transform=noted, columns=["cls"]), 2, num_workers=0, depth=8) as loader:
        for number, _ in enumerate(islice(loader, 3), 1):
            assert built == [*range(2 * number)]


def test_an_interrupt_in_a_transform_of_the_consumer_ends_the_loop_and_the_next_goes_on(tar: Made) -> None:
    interrupts = iter([False, False, True])

    def interrupted(sample: dict[str, Any]) -> dict[str, Any]:
        if next(interrupts, False):
            raise KeyboardInterrupt
        return sample

    dataset = tar.open(transform=interrupted, columns=["cls"])
    with DataLoader(dataset, 2, num_workers=0) as loader:
        with pytest.raises(KeyboardInterrupt):
            list(loader)
        assert sum(len(batch["cls"]) for batch in loader) == len(dataset)


# ---- the trial --------------------------------------------------------------------------------------------


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trial as soon as the first chunk was built."""
    monkeypatch.setattr(auto, "TRIAL_AFTER_S", 0.0)


def auto_of(loader: DataLoader[Any, Any]) -> AutoBuilders:
    found = session_of(loader).engine._builders
    assert isinstance(found, AutoBuilders)
    return found


def epochs_until(loader: DataLoader[Any, Any], workers: str, most: int = 2000) -> list[list[Any]]:
    """Epochs until somebody else builds, and so many more that what was ahead is delivered."""
    epochs = []
    for _ in range(most):
        epochs.append([*loader])
        if loader.stats().workers == workers:
            return [*epochs, *([*loader] for _ in range(_EPOCHS_AHEAD))]
    raise AssertionError(loader.stats().workers_reason)


def burnt(sample: dict[str, Any], *, rng: np.random.Generator) -> dict[str, Any]:
    """Holds the lock for a while."""
    until = time.thread_time() + 0.002
    while time.thread_time() < until:
        pass
    return marked(sample, rng=rng)


def test_a_transform_that_holds_the_lock_moves_to_processes_between_two_batches(
    tar: Made, at_once: None
) -> None:
    dataset = tar.open(transform=burnt)
    with DataLoader(dataset, 3, shuffle=True, num_workers=2, workers="auto") as loader:
        epochs = epochs_until(loader, "process")
        stats = loader.stats()
    pids = [{int(pid) for batch in epoch for pid in batch["pid"]} for epoch in epochs]
    assert pids[0] == {os.getpid()}
    assert os.getpid() not in pids[-1]
    assert "the interpreter lock is held for" in stats.workers_reason
    with DataLoader(tar.open(transform=marked), 3, shuffle=True, num_workers=0) as loader:
        assert [[content(b) for b in epoch] for epoch in epochs] == [
            [content(b) for b in loader] for _ in epochs
        ]


@pytest.mark.full
def test_what_was_decided_holds_for_later_loops(tar: Made, at_once: None) -> None:
    with DataLoader(tar.open(transform=burnt), 3, num_workers=2, workers="auto") as loader:
        epochs_until(loader, "process")
        loader.close()
        epochs = epochs_until(loader, "process")
        assert "interpreter lock" in loader.stats().workers_reason
    assert {int(pid) for batch in epochs[-1] for pid in batch["pid"]} - {os.getpid()}


def slept(sample: dict[str, Any]) -> dict[str, Any]:
    """Waits, and holds nothing."""
    threading.Event().wait(0.001)
    return sample


def test_a_transform_that_holds_no_lock_stays_in_threads(
    tar: Made, at_once: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where other things keep the cores busy, a thread that waits for a core seems to wait for the lock."""
    locked_s = AutoBuilders.locked_s
    monkeypatch.setattr(AutoBuilders, "locked_s", lambda builders, work: min(1e-4, locked_s(builders, work)))
    with DataLoader(tar.open(transform=slept, columns=["cls"]), 3, num_workers=2, workers="auto") as loader:
        for _ in range(200):
            list(loader)
            if "until" not in (reason := loader.stats().workers_reason):
                break
    assert loader.stats().workers == "thread", reason
    assert "as fast, and nothing has to cross" in reason


class Counting:
    """A transform with a memory."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        self.count += 1
        return {"cls": sample["cls"]}


def decided(dataset: Any) -> tuple[str, str]:
    with DataLoader(dataset, 3, num_workers=2, workers="auto") as loader:
        for _ in range(1000):
            list(loader)
            stats = loader.stats()
            if auto_of(loader)._memory.choice is not None:
                return stats.workers, stats.workers_reason
    raise AssertionError(stats.workers_reason)


def test_a_transform_that_remembers_stays_in_threads(tar: Made, at_once: None) -> None:
    workers, reason = decided(tar.open(transform=Counting()))
    assert workers == "thread"
    assert "changes what it holds" in reason


def test_a_transform_that_cannot_be_sent_stays_in_threads(tar: Made, at_once: None) -> None:
    lock = threading.Lock()

    def locked(sample: dict[str, Any]) -> dict[str, Any]:
        with lock:
            return {"cls": sample["cls"]}

    workers, reason = decided(tar.open(transform=locked))
    assert workers == "thread"
    assert "cannot be sent to processes" in reason


@pytest.mark.full
def test_a_transform_that_draws_from_global_generators_goes_to_processes_and_stays_there(
    tar: Made, at_once: None
) -> None:
    def drawn(sample: dict[str, Any]) -> dict[str, Any]:
        return {"cls": sample["cls"], "draw": random.random(), "pid": os.getpid()}

    with DataLoader(tar.open(transform=drawn), 3, num_workers=2, workers="auto") as loader:
        epochs_until(loader, "process")
        assert "global generators" in loader.stats().workers_reason
        loader.close()
        assert {int(pid) for batch in loader for pid in batch["pid"]}.isdisjoint({os.getpid()})


def test_processes_that_cannot_start_leave_the_work_to_threads(
    tar: Made, at_once: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object, **__: object) -> None:
        raise OSError("no room")

    monkeypatch.setattr(builders.BuilderOpening, "_processes", refused)
    with DataLoader(tar.open(transform=burnt), 3, num_workers=2, workers="auto") as loader:
        for _ in range(200):
            assert sum(len(batch["cls"]) for batch in loader) == len(loader.dataset)
            if "no room" in loader.stats().workers_reason:
                break
    assert loader.stats().workers == "thread"
    assert "processes would be better (" in loader.stats().workers_reason


def test_an_error_in_the_tried_chunk_is_told_and_the_trial_is_made_later(tar: Made, at_once: None) -> None:
    fails = iter([*[False] * 9, True])

    def failing(sample: dict[str, Any]) -> dict[str, Any]:
        if next(fails, False):
            raise ValueError("once")
        return {"cls": sample["cls"]}

    with DataLoader(tar.open(transform=failing), 3, num_workers=2, workers="auto") as loader:
        with pytest.raises(SampleError, match="once"):
            list(chain.from_iterable(loader for _ in range(20)))
        assert sum(len(batch["cls"]) for batch in loader) == len(loader.dataset)


class DueChunk:
    """Its first batch is due; then it has one more, or fails."""

    num_batches = 2

    def __init__(self, *, fails: bool, heap_bytes: int = 0) -> None:
        self._fails, self._heap_bytes = fails, heap_bytes

    def begin(self) -> list[Any]:
        return []

    def finish(self) -> Iterator[Piece[Delivered]]:
        batch = Delivered(0, 0, {"x": torch.zeros(2)}, 2)
        yield Piece([batch], heap_bytes=self._heap_bytes, is_due=True)
        if self._fails:
            raise ValueError("second")
        yield Piece([Delivered(0, 1, {"x": torch.zeros(2)}, 2)])


class TrialOwner:
    """Notes what was measured."""

    functions = None

    def __init__(self) -> None:
        self.results: list[Any] = []
        self.go_on = self.results.append


@pytest.mark.parametrize("fails", [False, True])
def test_a_trial_goes_beyond_batches_that_are_due_which_come_before_what_fails(*, fails: bool) -> None:
    """Or one slow batch would stand for what is charged together."""
    chunk: Any
    owner: Any
    chunk, owner = DueChunk(fails=fails), TrialOwner()
    pieces = auto._TriedChunk(chunk, owner, counts=False, most_bytes=100).finish()
    numbers = [batch.number for batch in next(pieces).batches]
    assert len(owner.results) == (not fails)
    with pytest.raises(ValueError, match="second") if fails else nullcontext():
        numbers += [batch.number for piece in pieces for batch in piece.batches]
    assert numbers == ([0] if fails else [0, 1])


def test_a_trial_takes_no_more_together_than_may_be_made_before_it_is_charged() -> None:
    chunk: Any = DueChunk(fails=False, heap_bytes=100)
    owner: Any = TrialOwner()
    pieces = auto._TriedChunk(chunk, owner, counts=False, most_bytes=100).finish()
    assert [batch.number for batch in next(pieces).batches] == [0]
    assert len(owner.results) == 1  # what comes next is asked for, and charged, as ever


def test_a_loader_that_is_closed_in_its_trial_leaves_nothing(tar: Made, at_once: None) -> None:
    for taken in range(6):
        with DataLoader(tar.open(transform=burnt), 2, num_workers=2, workers="auto") as loader:
            list(islice(loader, taken))
        assert not any("dataflow-trial" in thread.name for thread in threading.enumerate())


@pytest.mark.full
def test_sources_of_a_mixture_are_tried_together(tmp_path: Path, at_once: None) -> None:
    made = make_tar(tmp_path)
    sources: list[ShardedDataset] = [made.open(transform=burnt), made.open(transform=burnt)]
    with DataLoader(Mixture(sources, stop="first"), 3, num_workers=2, workers="auto") as loader:
        epochs = epochs_until(loader, "process")
    assert {int(pid) for batch in epochs[-1] for pid in batch["pid"]} - {os.getpid()}
