"""Who builds batches over shards: the consumer, threads or processes; what is chosen, and what it changes."""

from __future__ import annotations

import os
import threading
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets_kit import Made, make_parquet, make_tar
from loader_kit import stream_of
from parameters_kit import in_full
from threads_kit import threads_left
from torch.utils.data import get_worker_info

from dataflow import DataLoader, Image, Pad, SampleError, ShardedDataset, Topology
from dataflow.processes.builders import ProcessBuilders
from dataflow.processes.threads_first import ThreadsFirstBuilders
from dataflow.stream import decisions

TIMEOUT_S = 60
CORES = len(os.sched_getaffinity(0))
number = -1


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
        ({}, "process", CORES),
        ({"num_workers": 0}, "main", 0),
        ({"num_workers": 2}, "process", 2),
        ({"num_workers": 2, "workers": "thread"}, "thread", 2),
        ({"num_workers": 2, "workers": "auto"}, "process", 2),
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
    monkeypatch.setattr(decisions, "allowed_cores", lambda: 8)
    for ranks, number in ((1, 8), (2, 4), (3, 2), (16, 1)):
        place = Topology(0, ranks, local_rank=0, local_world_size=ranks)
        assert DataLoader(tar.open(transform=dict), 2, topology=place).num_workers == number


@pytest.mark.here
def test_without_functions_of_the_user_threads_build(tmp_path: Path) -> None:
    with DataLoader(make_tar(tmp_path).open(columns=["cls"]), 4, shuffle=True) as loader:
        list(loader)
        stats = loader.stats()
    assert loader.workers == stats.workers == "thread"
    assert stats.workers_reason.startswith("batches are copies alone")
    assert stats.num_workers == loader.num_workers


# ---- the rule ---------------------------------------------------------------------------------------------


def plain(value: Any) -> Any:
    return value


class Unlocked:
    """A function that says that it does its work without the interpreter lock."""

    releases_gil = True

    def __call__(self, value: Any) -> Any:
        return value


def _loader(dataset: ShardedDataset, **options: Any) -> DataLoader[Any, Any]:
    return DataLoader(dataset, 4, **options)


IMAGES = {"bin": Image(size=8)}


@pytest.mark.here
@pytest.mark.parametrize(
    ("dataset", "loader", "workers"),
    [
        pytest.param({"transform": plain}, {}, "process", id="a transform"),
        pytest.param({}, {"collate_fn": plain}, "process", id="a collate_fn"),
        pytest.param({"batch_transform": plain}, {}, "process", id="a batch_transform"),
        pytest.param({"decode": {"bin": plain}}, {}, "process", id="a decoder of the user's"),
        pytest.param({"transform": Unlocked()}, {}, "thread", id="a transform that needs no lock"),
        pytest.param({}, {"collate_fn": Unlocked()}, "thread", id="such a collate_fn"),
        pytest.param({"decode": {"bin": Unlocked()}}, {}, "thread", id="such a decoder"),
        pytest.param({"transform": Unlocked()}, {"collate_fn": plain}, "process", id="one of two"),
        pytest.param({"decode": IMAGES}, {}, "thread", id="a decoder of ours"),
        pytest.param({"decode": {"bin": "json"}}, {}, "thread", id="one that holds the lock"),
    ],
)
def test_up_to_four_cores_functions_of_the_user_are_what_processes_are_for(
    tar: Made,
    monkeypatch: pytest.MonkeyPatch,
    dataset: dict[str, Any],
    loader: dict[str, Any],
    workers: str,
) -> None:
    monkeypatch.setattr(decisions, "allowed_cores", lambda: 4)
    made = _loader(tar.open(columns=["cls", "bin"], **dataset), **loader)
    plan = stream_of(made).builder_plan
    extra = dataset.get("decode") is IMAGES  # decoders take the lock between values
    assert made.workers == plan.workers == workers
    assert plan.num_workers == 4 + extra
    assert plan.num_threads == 0


@pytest.mark.here
@pytest.mark.parametrize(("cores", "at_first"), [(6, 7), (16, 8), (64, 8)])
def test_few_threads_build_until_processes_from_a_server_have_started(
    tar: Made, monkeypatch: pytest.MonkeyPatch, cores: int, at_first: int
) -> None:
    monkeypatch.setattr(decisions, "allowed_cores", lambda: cores)
    monkeypatch.setattr(decisions, "is_fork", lambda context: False)
    plan = stream_of(_loader(tar.open(columns=["bin"], decode=IMAGES))).builder_plan
    assert (plan.workers, plan.num_workers, plan.num_threads) == ("process", cores, at_first)


@pytest.mark.here
@pytest.mark.parametrize(
    ("dataset", "workers"),
    [
        ({"columns": ["bin"], "decode": IMAGES}, "process"),
        ({"columns": ["bin"], "decode": IMAGES, "transform": Unlocked()}, "process"),
        ({"columns": ["bin"], "decode": {"bin": "json"}}, "process"),
        ({"columns": ["bin"], "decode": {"bin": Unlocked()}}, "thread"),
        ({"columns": ["cls"], "transform": Unlocked()}, "thread"),
        ({"columns": ["cls", "txt"]}, "thread"),
    ],
)
def test_on_more_than_four_cores_processes_decode_too(
    tar: Made, monkeypatch: pytest.MonkeyPatch, dataset: dict[str, Any], workers: str
) -> None:
    monkeypatch.setattr(decisions, "allowed_cores", lambda: 5)
    assert _loader(tar.open(**dataset)).workers == workers


@pytest.mark.here
def test_padding_is_no_decoder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decisions, "allowed_cores", lambda: 5)
    assert _loader(make_parquet(tmp_path).open(columns=["lst"], decode={"lst": Pad()})).workers == "thread"


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


# ---- processes from the first batch on --------------------------------------------------------------------


def pids_of(epoch: list[Any]) -> set[int]:
    return {int(pid) for batch in epoch for pid in batch["pid"]}


@pytest.mark.here
def test_functions_of_the_user_run_in_processes_from_the_first_batch_on_and_draw_the_same(tar: Made) -> None:
    with DataLoader(tar.open(transform=marked), 3, shuffle=True) as loader:
        epochs = [[*loader] for _ in range(2)]
        stats = loader.stats()
    assert os.getpid() not in pids_of([*chain(*epochs)])
    assert (stats.workers, stats.num_workers) == ("process", CORES)
    assert stats.workers_reason.startswith("functions of yours may hold the interpreter lock")
    with DataLoader(tar.open(transform=marked), 3, shuffle=True, num_workers=0) as loader:
        assert [[content(b) for b in epoch] for epoch in epochs] == [
            [content(b) for b in loader] for _ in epochs
        ]


class Counting:
    """A transform with a memory."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        self.count += 1
        return {"count": self.count}


@pytest.mark.here
def test_each_process_changes_a_copy_of_its_own_of_what_a_function_holds(tar: Made) -> None:
    transform = Counting()
    with DataLoader(tar.open(transform=transform, columns=["cls"]), 3) as loader:
        counts = sorted(int(count) for batch in loader for count in batch["count"])
    assert transform.count == 0
    assert counts[-1] <= len(tar.open())
    assert sum(count == 1 for count in counts) <= CORES


def _with_lock(samples: list[Any]) -> Any:
    return {"cls": [sample["cls"] for sample in samples], "lock": threading.Lock()}


@pytest.mark.here
def test_a_batch_that_processes_cannot_hand_over_is_an_error_that_names_threads(tar: Made) -> None:
    loader = DataLoader(tar.open(columns=["cls"]), 3, collate_fn=_with_lock)
    with loader, pytest.raises(TypeError, match="lock") as caught:
        list(loader)
    assert any('workers="thread"' in note for note in caught.value.__notes__)


def test_an_error_in_the_first_chunk_is_told_and_the_next_loop_goes_on(tar: Made) -> None:
    def failing(sample: dict[str, Any], *, rng: np.random.Generator) -> dict[str, Any]:
        if fails[0]:
            raise ValueError("once")
        return {"cls": sample["cls"]}

    fails = [True]
    with DataLoader(tar.open(transform=failing), 3) as loader:
        with pytest.raises(SampleError, match="once"):
            list(loader)
        fails[0] = False  # the next loop has a session of its own, which sees it
        assert sum(len(batch["cls"]) for batch in loader) == len(loader.dataset)


# ---- threads first, where processes come from a server ----------------------------------------------------

EPOCHS_AHEAD = 16
"""So many epochs may have been begun by threads before processes were there."""


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set when it is known who builds from now on; processes are said to come from a server."""
    event, decide = threading.Event(), ThreadsFirstBuilders._decide

    def decide_and_tell(own: ThreadsFirstBuilders, workers: str, reason: str) -> None:
        decide(own, workers, reason)
        event.set()

    monkeypatch.setattr(ThreadsFirstBuilders, "_decide", decide_and_tell)
    monkeypatch.setattr(decisions, "is_fork", lambda context: False)
    monkeypatch.setattr(decisions, "allowed_cores", lambda: 5)
    return event


def images_loader(tar: Made) -> DataLoader[Any, Any]:
    dataset = tar.open(columns=["bin"], decode={"bin": "json"}, on_error="skip")
    return DataLoader(dataset, 3, num_workers=2, workers="auto")


@pytest.mark.here
def test_decoders_move_to_processes_between_two_batches(tar: Made, settled: threading.Event) -> None:
    with images_loader(tar) as loader:
        for _ in range(2):  # each run of the engine begins with threads
            settled.clear()
            num_batches = [len([*loader])]
            assert loader.stats().workers == "thread" or settled.is_set()
            assert settled.wait(TIMEOUT_S), loader.stats().workers_reason
            num_batches += [len([*loader]) for _ in range(EPOCHS_AHEAD)]
            stats = loader.stats()
            assert (stats.workers, stats.num_workers) == ("process", 2)
            assert len({*num_batches}) == 1
            loader.close()


@pytest.mark.here
def test_an_epoch_that_ends_before_processes_are_there_was_built_by_threads(
    tar: Made, settled: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, may_listen = ProcessBuilders._run, threading.Event()

    def gated(own: ProcessBuilders) -> None:
        assert may_listen.wait(TIMEOUT_S)
        run(own)

    monkeypatch.setattr(ProcessBuilders, "_run", gated)
    with images_loader(tar) as loader:
        assert len([*loader]) == len([*loader])
        stats = loader.stats()
        may_listen.set()
    assert stats.workers == "thread"
    assert stats.workers_reason.startswith("until 2 processes have started: decoders in more than 4 threads")


def _refused(*_: object, **__: object) -> None:
    raise OSError("no room")


@pytest.mark.here
def test_processes_that_cannot_start_leave_the_work_to_threads(
    tar: Made, settled: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dataflow.processes.builders.ProcessBuilders", _refused)
    with images_loader(tar) as loader:
        list(loader)
        assert settled.wait(TIMEOUT_S)
        assert len({len([*loader]) for _ in range(2)}) == 1
        stats = loader.stats()
    assert stats.workers == "thread"
    assert stats.workers_reason.startswith("processes could not be started: no room")


@pytest.mark.here
def test_where_processes_come_from_a_server_functions_of_the_user_wait_for_them(
    tar: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads would see what this process changes meanwhile, and processes not."""
    monkeypatch.setattr(decisions, "is_fork", lambda context: False)
    plan = stream_of(_loader(tar.open(transform=plain))).builder_plan
    assert (plan.workers, plan.num_threads) == ("process", 0)


def test_a_loader_that_is_closed_while_processes_start_leaves_nothing(tar: Made) -> None:
    for taken in range(6):
        with DataLoader(tar.open(transform=marked), 2) as loader:
            list(islice(loader, taken))
        assert threads_left(("dataflow-start", "dataflow-hand-out", "dataflow-build")) == []


# ---- worker_init_fn and multiprocessing_context -----------------------------------------------------------


def told(worker: int) -> None:
    global number
    number = worker


def told_of(sample: dict[str, Any]) -> dict[str, Any]:
    info = get_worker_info()
    return {
        "told": number,
        "id": info.id,
        "num": info.num_workers,
        "seed": info.seed,
        "none": info.dataset is None,
    }


@pytest.mark.here
def test_worker_init_fn_is_called_in_each_builder_which_has_its_worker_info(tar: Made) -> None:
    with DataLoader(tar.open(transform=told_of), 1, num_workers=2, worker_init_fn=told, seed=5) as loader:
        batches = [*loader]
    assert all(batch["told"] == batch["id"] and batch["num"] == 2 and batch["none"] for batch in batches)
    assert all(batch["seed"] == 5 + batch["id"] for batch in batches)


@pytest.mark.here
@pytest.mark.parametrize("method", ["fork", "forkserver", *in_full("spawn")])
def test_builders_start_as_multiprocessing_context_says(tar: Made, method: str) -> None:
    with DataLoader(tar.open(columns=["cls"]), 2, multiprocessing_context=method, num_workers=1) as loader:
        assert loader.workers == "process"
        assert sum(len(batch["cls"]) for batch in loader) == len(loader.dataset)


@pytest.mark.here
@pytest.mark.parametrize(
    "options", [{"num_workers": 0}, {"workers": "thread"}, {"builders": "ray"}], ids=["main", "thread", "ray"]
)
@pytest.mark.parametrize("given", [{"worker_init_fn": told}, {"multiprocessing_context": "spawn"}])
def test_they_contradict_builders_that_are_no_processes(
    tar: Made, options: dict[str, Any], given: dict[str, Any]
) -> None:
    with pytest.raises(ValueError, match="are for builders that are processes of this machine"):
        DataLoader(tar.open(), 2, **options, **given)
