"""Builders that are processes give what threads give: batches, draws, errors, states; and leave nothing."""

from __future__ import annotations

import gc
import os
import random
import re
import signal
import threading
from collections.abc import Iterator
from fractions import Fraction
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from datasets_kit import make_ints_tar, make_parquet, make_tar
from forked_kit import exit_code_in_child
from http_kit import RangeServer, serving
from loader_kit import session_of
from worker_kit import Gate

from dataflow import DataLoader, SampleError, ShardedDataset, ShardWriter, Shuffle
from dataflow.processes import builders, serialized
from dataflow.processes.builder_main import BuiltBatches
from dataflow.processes.builders import ProcessBuilders
from dataflow.processes.dispatch import RemoteBuild, RemoteBuilders
from dataflow.processes.serialized import SerializedChunk
from dataflow.stream import decisions
from prefetch.memory.open_files import OpenFile
from prefetch.workers.deaths import WorkerDiedError
from prefetch.workers.pool import WorkerPool

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker processes")
TIMEOUT_S = 60.0
OFFSET = 1000


def builders_of(loader: DataLoader[Any, Any]) -> ProcessBuilders:
    builders = session_of(loader).resources.engine._builders
    assert isinstance(builders, ProcessBuilders)
    return builders


def processes_of(loader: DataLoader[Any, Any]) -> list[Any]:
    return builders_of(loader)._processes.pool.processes


def in_processes(
    dataset: Any, batch_size: int, shuffle: Any = None, *, count: int = 2, **options: Any
) -> Any:
    options.setdefault("timeout", TIMEOUT_S)
    return DataLoader(dataset, batch_size, shuffle, num_workers=count, workers="process", **options)


def marked(sample: dict[str, Any]) -> dict[str, Any]:
    return {**sample, "by": os.getpid()}


def shipped_by(monkeypatch: pytest.MonkeyPatch) -> list[SerializedChunk]:
    """The chunks that are shipped from now on."""
    chunks: list[SerializedChunk] = []

    def serializing(*arguments: Any, **options: Any) -> Any:
        chunk, memory = serialized.serialize(*arguments, **options)
        chunks.append(chunk)
        return chunk, memory

    monkeypatch.setattr(builders, "serialize", serializing)
    return chunks


def is_by_file(chunks: list[SerializedChunk], column: str) -> set[bool]:
    return {chunk.columns[column].files is not None for chunk in chunks}


def test_processes_read_values_of_local_tars_from_the_files_that_are_open_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = make_tar(tmp_path).open(transform=lambda sample: {"n": repr(sorted(sample.items()))})
    with DataLoader(dataset, 3, shuffle=True, seed=5) as loader:
        whole = [batch["n"] for batch in loader]
    chunks = shipped_by(monkeypatch)
    with in_processes(dataset, 3, True, seed=5) as loader:
        assert [batch["n"] for batch in loader] == whole
    assert chunks
    assert is_by_file(chunks, "bin") == {True}


def test_where_they_cannot_read_these_files_they_are_sent_the_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = make_tar(tmp_path).open(transform=lambda sample: {"n": repr(sorted(sample.items()))})
    with DataLoader(dataset, 3, shuffle=True, seed=5) as loader:
        whole = [batch["n"] for _ in range(2) for batch in loader]
    chunks = shipped_by(monkeypatch)
    monkeypatch.setattr(OpenFile, "of", lambda fd, status: OpenFile(os.getpid(), fd, -1, -1))
    with in_processes(dataset, 3, True, seed=5) as loader:
        first = [batch["n"] for batch in loader]
        num_first = len(chunks)
        assert first + [batch["n"] for batch in loader] == whole
    assert is_by_file(chunks[:num_first], "bin") == {True, False}
    assert is_by_file(chunks[num_first:], "bin") == {False}


def test_what_exec_has_defined_is_sent(tmp_path: Path) -> None:
    """Its module is None."""
    ints = make_ints_tar(tmp_path)
    exec("def added(sample): return {'cls': sample['cls'] + 1}", {}, made := dict[str, Any]())
    with in_processes(ints.open(transform=made["added"]), 4) as loader:
        assert sorted(n for batch in loader for n in batch["cls"].tolist()) == [
            sample["cls"] + 1 for sample in ints.samples
        ]


def shifted(sample: dict[str, Any], *, rng: np.random.Generator) -> dict[str, Any]:
    return {"cls": sample["cls"] + OFFSET, "draw": rng.random(), "by": os.getpid()}


def drawn(sample: dict[str, Any]) -> dict[str, Any]:
    """From the three global generators."""
    return {"cls": sample["cls"], "x": [random.random(), float(np.random.random()), float(torch.rand(()))]}


def test_global_generators_draw_the_same_for_any_number_of_processes(tmp_path: Path) -> None:
    dataset = make_tar(tmp_path).open(transform=drawn)
    seen = []
    for count, batch_size in ((1, 2), (2, 2), (3, 4)):
        with in_processes(dataset, batch_size, True, count=count) as loader:
            epochs = [[*loader] for _ in range(2)]
        draws = [
            {int(n): tuple(x[i].item() for x in b["x"]) for b in epoch for i, n in enumerate(b["cls"])}
            for epoch in epochs
        ]
        assert draws[0] != draws[1]
        seen.append(draws)
    assert seen[0] == seen[1] == seen[2]


# ---- batches of a chunk, one by one -----------------------------------------------------------------------

GATED = 4
"""In file order, of batches of two: batch 0 is a chunk, batches 1 and 2 are the next."""


def gated(sample: dict[str, Any], *, rng: np.random.Generator, arrived: Gate, go_on: Gate) -> dict[str, Any]:
    if sample["cls"] == GATED:
        arrived.open(os.getpid())
        go_on.wait()
    return {"cls": sample["cls"], "draw": rng.random()}


@pytest.fixture
def gates(tmp_path: Path) -> Iterator[dict[str, Gate]]:
    made = {name: Gate(tmp_path / name) for name in ("arrived", "go_on")}
    yield made
    for gate in made.values():
        gate.close()


def gated_dataset(folder: Path, gates: dict[str, Gate]) -> ShardedDataset:
    """Of 20 samples, one of which waits at a gate."""
    with ShardWriter(f"{folder}/x.tar") as writer:
        for i in range(20):
            writer.write({"__key__": f"{i:02d}", "cls": i})
    return ShardedDataset(f"{folder}/x.tar", transform=partial(gated, **gates))


@pytest.mark.parametrize("workers", ["process", "thread"])
def test_a_batch_is_handed_over_while_the_next_of_its_chunk_is_built(
    tmp_path: Path, gates: dict[str, Gate], monkeypatch: pytest.MonkeyPatch, workers: str
) -> None:
    monkeypatch.setattr(decisions, "HAND_OVER_S", 0.0)
    dataset = gated_dataset(tmp_path, gates)
    with DataLoader(dataset, 2, num_workers=1, workers=workers, timeout=TIMEOUT_S) as loader:
        loop = iter(loader)
        before = [next(loop)["cls"].tolist() for _ in range(GATED // 2)]
        gates["arrived"].wait()
        gates["go_on"].open()
        after = [batch["cls"].tolist() for batch in loop]
    assert before + after == [[i, i + 1] for i in range(0, 20, 2)]


@pytest.mark.parametrize("workers", ["process", "thread"])
def test_a_wait_names_function_line_and_sample_whoever_builds(
    tmp_path: Path, gates: dict[str, Gate], workers: str
) -> None:
    dataset = gated_dataset(tmp_path, gates)
    loader = DataLoader(dataset, 20, num_workers=1, workers=workers, timeout=TIMEOUT_S)
    next_reason: list[str] = []

    def wait() -> None:
        with loader:
            next(iter(loader))

    consumer = threading.Thread(target=wait)
    consumer.start()
    try:
        gates["arrived"].wait()
        next_reason += session_of(loader).resources.engine._builders.contexts()
    finally:
        gates["go_on"].open()
        consumer.join(TIMEOUT_S)
    (place,) = next_reason
    said = r"in (gated|Gate\.wait) \(.*\.py, line \d+\), at sample '04' of .*/x\.tar$"
    assert re.search(said, place), place
    assert place.startswith("in builder process 0 (pid ") == (workers == "process")


def test_a_process_that_dies_behind_batches_of_a_chunk_that_were_handed_over_costs_none(
    tmp_path: Path, gates: dict[str, Gate], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decisions, "HAND_OVER_S", 0.0)
    dataset = gated_dataset(tmp_path, gates)

    def content(batch: dict[str, Any]) -> tuple[list[int], list[float]]:
        return batch["cls"].tolist(), batch["draw"].tolist()

    gates["go_on"].open()
    with DataLoader(dataset, 2, num_workers=0) as loader:
        whole = [content(batch) for batch in loader]
    gates["arrived"].wait()
    with in_processes(dataset, 2, count=1) as loader:
        loop = iter(loader)
        head = [content(next(loop)) for _ in range(GATED // 2)]
        os.kill(int(gates["arrived"].wait()), signal.SIGKILL)
        gates["arrived"].wait()  # the one in its place
        gates["go_on"].open()
        assert head + [content(batch) for batch in loop] == whole
        assert builders_of(loader).num_restarts == 1


# ---- errors -----------------------------------------------------------------------------------------------


def odd(sample: dict[str, Any]) -> dict[str, Any]:
    if sample["cls"] % 5 == 3:
        raise ZeroDivisionError(f"no {sample['cls']}")
    return sample


@pytest.mark.parametrize("in_batch", [False, True])
def test_an_error_is_told_as_by_threads(tmp_path: Path, *, in_batch: bool) -> None:
    made = make_tar(tmp_path)
    options: dict[str, Any] = {"transform": odd}
    collate = (lambda samples: 1 / 0) if in_batch else None
    errors = []
    for workers in ({}, {"num_workers": 2, "workers": "process"}):
        dataset = made.open(**({} if in_batch else options))
        with DataLoader(dataset, 3, shuffle=True, collate_fn=collate, **workers) as loader:
            with pytest.raises(ZeroDivisionError if in_batch else SampleError) as caught:
                list(loader)
            errors.append(caught.value)
    assert str(errors[0]) == str(errors[1])
    assert type(errors[0].__cause__) is type(errors[1].__cause__)
    if in_batch:
        assert errors[0].__notes__[0] == errors[1].__notes__[0]
    notes = [*getattr(errors[1], "__notes__", ()), *getattr(errors[1].__cause__, "__notes__", ())]
    assert any("in builder process" in note and "Traceback" in note for note in notes)


def test_samples_that_are_skipped_are_those_of_threads_and_listed(tmp_path: Path) -> None:
    dataset = make_tar(tmp_path).open(transform=odd, on_error="skip", columns=["cls"])
    seen = []
    for workers in ({}, {"num_workers": 2, "workers": "process"}):
        with DataLoader(dataset, 4, shuffle=True, **workers) as loader:
            batches = [batch["cls"].tolist() for batch in loader]
            stats = loader.stats()
        seen.append((batches, stats.skipped_samples, sorted(stats.skipped)))
    assert seen[0] == seen[1]
    assert seen[0][1]


def test_a_budget_of_skipped_samples_counts_those_of_all_processes(tmp_path: Path) -> None:
    dataset = make_tar(tmp_path).open(transform=odd, on_error="skip", error_budget=1, columns=["cls"])
    with in_processes(dataset, 2) as loader, pytest.raises(SampleError) as caught:
        list(loader)
    assert "error_budget=1" in caught.value.__notes__[0]


class RefusedError(Exception):
    """Raised by a function that is given as `on_error`."""


def refuse(error: SampleError) -> bool:
    raise RefusedError(error.key)


def test_what_on_error_raises_ends_the_loop_as_by_threads(tmp_path: Path) -> None:
    dataset = make_tar(tmp_path).open(transform=odd, on_error=refuse, columns=["cls"])
    for workers in ({}, {"num_workers": 2, "workers": "process"}):
        with (
            DataLoader(dataset, 4, shuffle=False, timeout=TIMEOUT_S, **workers) as loader,
            pytest.raises(RefusedError, match="00003"),
        ):
            list(loader)


def read_epochs(loader: DataLoader[Any, Any], loop: Iterator[Any], count: int) -> None:
    for _ in range(count):
        for _ in loop:
            pass
        loop = iter(loader)


def killed(sample: dict[str, Any]) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_without_restarts_a_process_that_is_killed_is_named_and_the_next_loop_has_new_ones(
    tmp_path: Path,
) -> None:
    dataset = make_tar(tmp_path).open(transform=marked, columns=["cls"])
    with in_processes(dataset, 2, max_worker_restarts=0) as loader:
        loop = iter(loader)
        pid = int(next(loop)["by"][0])
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(WorkerDiedError, match=f"pid {pid}") as caught:
            read_epochs(loader, loop, 1000)
        assert [code for _, _, code in caught.value.workers] == [-signal.SIGKILL]
        assert [n for batch in loader for n in batch["cls"].tolist()] == list(range(len(dataset)))


def test_batches_that_kill_two_processes_are_an_error_that_names_both(tmp_path: Path) -> None:
    dataset = make_tar(tmp_path).open(transform=killed)
    with in_processes(dataset, 2, count=1) as loader, pytest.raises(WorkerDiedError) as caught:
        list(loader)
    (note,) = caught.value.__notes__
    assert note.startswith("2 processes have died on the same batches; before: ")


def skipped_and_drawn(sample: dict[str, Any], *, rng: np.random.Generator) -> dict[str, Any]:
    if sample["cls"] % 5 == 2:
        raise ValueError("no")
    return {"cls": sample["cls"], "draw": [rng.random(), random.random()], "by": os.getpid()}


def test_a_process_that_is_killed_costs_no_batch(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    dataset = make_tar(tmp_path).open(transform=skipped_and_drawn, on_error="skip")

    def rest(loop: Iterator[Any]) -> list[Any]:
        return [(batch["cls"].tolist(), [d.tolist() for d in batch["draw"]]) for batch in loop]

    with in_processes(dataset, 2, True) as loader:
        whole = [rest(loader) for _ in range(2)]
        skipped = loader.stats().skipped
    for taken in (1, 2, len(whole[0]) // 2, len(whole[0]) - 1):
        with in_processes(dataset, 2, True) as loader:
            loop = iter(loader)
            *_, last = (batch := [*islice(loop, taken)])
            os.kill(int(last["by"][0]), signal.SIGKILL)
            assert [rest(batch) + rest(loop), rest(loader)] == whole
            assert loader.stats().skipped == skipped
            assert builders_of(loader).num_restarts == 1
    assert "is killed by signal" in caplog.text
    assert "built again in another process (1 of max_worker_restarts=3)" in caplog.text


def test_a_process_that_cannot_be_replaced_ends_the_loop_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise OSError("no room for a process")

    monkeypatch.setattr(WorkerPool, "replace", refused)
    dataset = make_tar(tmp_path).open(transform=marked, columns=["cls"])
    with in_processes(dataset, 2, count=1) as loader:
        loop = iter(loader)
        os.kill(int(next(loop)["by"][0]), signal.SIGKILL)
        with pytest.raises(OSError, match="no room for a process"):
            read_epochs(loader, loop, 1000)


def test_who_wakes_processes_that_are_ending_writes_to_no_file_that_was_opened_since(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The descriptor is not closed between the look at whether it is and the writing."""
    dataset = make_tar(tmp_path).open(transform=marked, columns=["cls"])
    with in_processes(dataset, 2, count=1) as loader:
        loop = iter(loader)
        next(loop)
        pool = builders_of(loader)._processes.pool
        write, close, is_closed = os.eventfd_write, os.close, threading.Event()
        closing = threading.Thread(target=pool.close)

        def closes(fd: int) -> None:
            if fd == pool._woken:
                is_closed.set()
            close(fd)

        def writes(fd: int, value: int) -> None:
            monkeypatch.setattr(os, "eventfd_write", write)
            monkeypatch.setattr(os, "close", closes)
            closing.start()
            for process in pool.processes:
                process.join(TIMEOUT_S)
            assert not is_closed.wait(0.1)
            write(fd, value)

        monkeypatch.setattr(os, "eventfd_write", writes)
        pool.wake()
        closing.join(TIMEOUT_S)
        assert is_closed.is_set()
        monkeypatch.undo()


@pytest.mark.full
def test_more_deaths_than_may_be_replaced_are_an_error(tmp_path: Path) -> None:
    dataset = make_tar(tmp_path).open(transform=marked, columns=["cls"])
    with in_processes(dataset, 2, max_worker_restarts=1, count=1) as loader:
        loop = iter(loader)
        os.kill(int(next(loop)["by"][0]), signal.SIGKILL)
        read_epochs(loader, loop, 1)
        os.kill(processes_of(loader)[0].pid or 0, signal.SIGKILL)
        with pytest.raises(WorkerDiedError):
            read_epochs(loader, iter(loader), 1000)


def test_pages_of_a_process_that_died_go_with_its_last_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = make_tar(tmp_path).open(transform=marked, columns=["cls"])
    with in_processes(dataset, 2, count=1) as loader:
        loop = iter(loader)
        kept = next(loop)
        pool, is_replaced = builders_of(loader)._processes.pool, threading.Event()
        replace = pool.replace

        def replaces(worker: int) -> None:
            replace(worker)
            is_replaced.set()

        monkeypatch.setattr(pool, "replace", replaces)
        os.kill(int(kept["by"][0]), signal.SIGKILL)
        read_epochs(loader, loop, 1)
        assert is_replaced.wait(TIMEOUT_S)  # it may have built the whole epoch before
        file = builders_of(loader).file
        assert builders_of(loader).num_restarts == 1
        before = kept["cls"].tolist()
        file.reconcile()
        assert file._abandoned == {0}
        assert kept["cls"].tolist() == before
        del kept
        gc.collect()
        file.reconcile()
        assert not file._abandoned


def of_many_types(sample: dict[str, Any]) -> Any:
    n = int(sample["cls"])
    return [n, str(n), (n, [None]), torch.full((n,), n), np.arange(n), {"n": Fraction(n, 3)}, b"x" * n][n % 7]


def test_values_of_other_types_each_time_cross_as_they_are(tmp_path: Path) -> None:
    dataset = make_tar(tmp_path).open(transform=of_many_types)
    seen = []
    for number in (0, 2):
        with DataLoader(dataset, 4, shuffle=True, collate_fn=list, num_workers=number) as loader:
            seen.append([repr(batch) for batch in loader])
    assert seen[0] == seen[1]


def huge(sample: dict[str, Any]) -> Any:
    return bytearray(int(sample["cls"])) * (4 << 20)


@pytest.mark.full
def test_huge_objects_cross_one_by_one(tmp_path: Path) -> None:
    dataset = make_tar(tmp_path).open(transform=huge, columns=["cls"])
    with in_processes(dataset, 1, collate_fn=list, memory_limit="64MB", shuffle=False) as loader:
        for number, [value] in enumerate(islice(loader, 12)):
            assert len(value) == number * (4 << 20)


def test_a_forked_child_has_no_builders_and_leaves_those_of_its_parent(tmp_path: Path) -> None:
    dataset = make_tar(tmp_path).open(transform=marked, columns=["cls"])
    with in_processes(dataset, 2) as loader:
        loop = iter(loader)
        first = next(loop)

        def in_child() -> None:
            with pytest.raises(RuntimeError, match="do not survive a fork"):
                list(loop)
            loader.close()

        assert exit_code_in_child(in_child) == 0
        rest = [n for batch in loop for n in batch["cls"].tolist()]
        assert [*first["cls"].tolist(), *rest] == list(range(len(dataset)))


def test_a_transform_that_cannot_be_sent_is_an_error_that_says_so(tmp_path: Path) -> None:
    lock = threading.Lock()

    def locked(sample: dict[str, Any]) -> dict[str, Any]:
        with lock:
            return sample

    dataset = make_tar(tmp_path).open(transform=locked, columns=["cls"])
    with in_processes(dataset, 2) as loader:  # forked: they have it
        assert sum(len(batch["cls"]) for batch in loader) == len(dataset)
    with (
        in_processes(dataset, 2, multiprocessing_context="forkserver") as loader,
        pytest.raises(ValueError, match="cannot be sent to builder processes"),
    ):
        next(iter(loader))


# ---- reads ------------------------------------------------------------------------------------------------


def test_blocks_are_read_and_decoded_once_whoever_builds(tmp_path: Path) -> None:
    dataset = make_parquet(tmp_path).open(transform=marked)
    counts = []
    for options in ({"workers": "thread"}, {"num_workers": 2}):
        with DataLoader(dataset, 3, shuffle=True, collate_fn=len, timeout=TIMEOUT_S, **options) as loader:
            assert sum(chain.from_iterable(loader for _ in range(2))) == 2 * len(dataset)
            loader.set_epoch(2)  # what is ahead is dropped, and read no more
            counts.append(loader.stats().decoded_bytes)
    assert 0 < counts[1] <= 1.5 * counts[0]  # two epochs, and what is read ahead: at most a third


def test_reads_of_remote_shards_pause_beside_gradients_whoever_builds(tmp_path: Path) -> None:
    make_tar(tmp_path)
    seen = []
    with serving(RangeServer(tmp_path)) as server:
        urls = [f"{server.url}/{path.name}" for path in sorted(tmp_path.glob("*.tar"))]
        dataset = ShardedDataset(urls, transform=shifted, decode={"cls": "int"}, columns=["cls"])
        for options in ({"workers": "thread"}, {"num_workers": 2}, {"num_workers": 0}):
            batches = []
            with DataLoader(dataset, 2, shuffle=True, timeout=TIMEOUT_S, **options) as loader:
                for batch in chain.from_iterable(loader for _ in range(2)):
                    loader.read_pause.begin()
                    batches.append((batch["cls"].tolist(), batch["draw"].tolist()))
                    loader.read_pause.end()
                assert loader.read_pause.stats().pauses == len(batches)
            seen.append(batches)
    assert seen[0] == seen[1] == seen[2]


# ---- memory and life --------------------------------------------------------------------------------------


def test_batches_that_are_kept_stay_what_they_were_and_credits_come_back(tmp_path: Path) -> None:
    dataset = make_tar(tmp_path).open(transform=marked, columns=["cls"])
    with in_processes(dataset, 2, Shuffle("none")) as loader:
        kept = [*loader]
        rest = [*loader]
        assert session_of(loader).resources.ledger.snapshot().in_use_bytes > 0
        assert [n for batch in kept for n in batch["cls"].tolist()] == [
            n for batch in rest for n in batch["cls"].tolist()
        ]
        del kept, rest
        gc.collect()
        assert session_of(loader).resources.ledger.snapshot().in_use_bytes <= 1 << 16
    again = [*_closed(dataset)]
    assert [len(batch["cls"]) for batch in again]


def test_batches_that_are_kept_beyond_their_loader_stay_what_they_were_and_die_one_by_one(
    tmp_path: Path,
) -> None:
    dataset = make_parquet(tmp_path).open(batch_transform=dict)
    with in_processes(dataset, 1, count=1) as loader:
        kept = [*loader]
        texts = [repr(batch) for batch in kept]
    assert [repr(batch) for batch in kept] == texts
    while kept:
        del kept[::2], texts[::2]
        gc.collect()
        assert [repr(batch) for batch in kept] == texts


def _closed(dataset: Any) -> Iterator[dict[str, Any]]:
    with in_processes(dataset, 2) as loader:
        yield from loader


def test_a_loop_that_is_left_leaves_no_process(tmp_path: Path) -> None:
    dataset = make_tar(tmp_path).open(transform=marked)
    with in_processes(dataset, 1) as loader:
        next(iter(loader))
        pids = [process.pid for process in processes_of(loader)]
        assert all(psutil.pid_exists(pid) for pid in pids if pid)
    assert not any(psutil.pid_exists(pid) for pid in pids if pid)


class Ended:
    """A build that counts its ends."""

    def __init__(self, number: int) -> None:
        self.number, self.progress, self.errors = number, None, list[BaseException | None]()

    def end(self, error: BaseException | None = None) -> None:
        self.errors.append(error)


class NoBuilders(RemoteBuilders[RemoteBuild]):
    """Builders elsewhere, none of which is there."""

    def _wake(self) -> None: ...

    def _new(self, build: Any) -> RemoteBuild:
        return RemoteBuild(build=build)

    def _choose(self, one: RemoteBuild, loads: Any) -> None: ...

    def _content(self, one: RemoteBuild) -> tuple[Any, ...]:
        return ()

    def _send(self, one: RemoteBuild, kind: int, content: Any = None) -> None: ...

    def _death_error(self, one: RemoteBuild) -> Exception:
        raise AssertionError

    def _end_builders(self) -> None: ...

    def contexts(self) -> list[str]:
        return []


def test_a_failure_ends_each_build_once_and_those_to_come() -> None:
    builders = NoBuilders(1, decide=lambda error: False)
    builds = [Ended(number) for number in range(4)]
    fresh, begun, lost, later = builds
    for build in (fresh, begun, lost):
        builders.build(build)  # type: ignore[arg-type]
    for build in (begun, lost):
        one = next(one for _, one in builders._tasks if one.number == build.number)
        builders._tasks.remove((one.urgency, one))
        builders._assign(one, "a builder")
    builders._lose(lost.progress, None)
    failure = OSError("none is left")
    builders._fail(failure)
    builders.build(later)  # type: ignore[arg-type]
    builders._dispatch()
    assert [build.errors for build in builds] == [[failure]] * 4


class OneBuilder(NoBuilders):
    """A builder elsewhere, which does nothing with what it is sent."""

    def _choose(self, one: RemoteBuild, loads: Any) -> str:  # type: ignore[override]
        return "a builder"


class Goes(Ended):
    """A build that may always go on, and that takes what it is told."""

    is_cancelled = False

    def may_go_on(self) -> bool:
        return True

    def add(self, partial: Any) -> None: ...


@pytest.mark.parametrize(
    ("sizes", "assigned"),
    [([99_999], 2), ([100_000], 1), ([150_000, *[1] * 20], 1), ([150_000, *[1] * 40], 2)],
)
def test_large_batches_are_not_handed_out_ahead(sizes: list[int], assigned: int) -> None:
    """A builder hears with its next chunk what was freed: with two, it takes new memory meanwhile."""
    builders = OneBuilder(1, decide=lambda error: False, large_bytes=100_000)
    for number in range(3):
        builders.build(Goes(number))  # type: ignore[arg-type]
    builders._dispatch()
    assert len(builders._assigned) == 1  # nothing is known yet
    [one] = builders._assigned.values()
    for size in sizes:
        built = BuiltBatches(
            [], size, size, flush_now=False, is_last=False, asks=False, cpu_s=0.0, build_s=0.0
        )
        builders._add(one, built, 0)
    builders._dispatch()
    assert len(builders._assigned) == assigned
