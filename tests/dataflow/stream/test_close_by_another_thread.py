"""`close()` while another thread waits for a batch: it is woken, and building ends."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from threads_kit import threads_left

from dataflow import DataLoader, ShardedDataset, ShardWriter
from dataflow.workers.worker import WorkerLimits
from prefetch.errors import EngineClosedError

_WAIT_S = 20.0
_SAMPLES = 64


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("close")
    with ShardWriter(str(folder / "{:02d}.tar")) as writer:
        for i in range(_SAMPLES):
            writer.write({"__key__": f"{i:03d}", "cls": i, "npy": np.full(3, i)})
    return str(folder / "*.tar")


class Hanging:
    """Something that is called for each sample, and hangs in the third call until the gate is opened."""

    def __init__(self, gate: Any, begun: Any) -> None:
        self.gate, self.begun, self.calls = gate, begun, 0

    def __call__(self, value: Any, *_: Any) -> Any:
        self.calls += 1
        if self.calls == 3:
            self.begun.set()
            assert self.gate.wait(2 * _WAIT_S)
        return value

    def __len__(self) -> int:
        return _SAMPLES

    __getitem__ = __call__


class Consumer:
    """A thread in a loop over a loader."""

    def __init__(self, loader: Any) -> None:
        self.error: BaseException | None = None
        self._loader = loader
        self._thread = threading.Thread(target=self._consume)
        self._thread.start()

    def _consume(self) -> None:
        try:
            list(self._loader)
        except BaseException as error:
            self.error = error

    def ends(self) -> bool:
        self._thread.join(_WAIT_S)
        return not self._thread.is_alive()


@pytest.mark.parametrize("kind", ["thread", "process"])
def test_the_consumer_of_a_map_style_dataset_is_woken(kind: str) -> None:
    events = multiprocessing.get_context("fork") if kind == "process" else threading
    dataset = Hanging(events.Event(), events.Event())
    loader: Any = DataLoader(
        dataset, 8, num_workers=1, workers=kind, multiprocessing_context="fork" if kind == "process" else None
    )
    if kind == "process":
        loader.worker_limits = WorkerLimits(stop_s=0.1)  # one that hangs is ended by a signal
    consumer = Consumer(loader)
    assert dataset.begun.wait(_WAIT_S)
    closer = threading.Thread(target=loader.close)
    closer.start()
    woken = consumer.ends()
    if kind == "thread":
        dataset.gate.set()
    closer.join(_WAIT_S)
    assert woken, "the consumer waited for the item"
    assert isinstance(consumer.error, RuntimeError)
    assert "closed" in str(consumer.error)
    assert threads_left() == []


def of_samples(shards: str, hanging: Hanging) -> Any:
    return DataLoader(ShardedDataset(shards, transform=hanging), 8, num_workers=1, workers="thread")


def of_values(shards: str, hanging: Hanging) -> Any:
    return DataLoader(ShardedDataset(shards, decode={"npy": hanging}), 8, num_workers=1, workers="thread")


def of_batches(shards: str, hanging: Hanging) -> Any:
    return DataLoader(ShardedDataset(shards), 2, collate_fn=hanging, num_workers=1, workers="thread")


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    gate = threading.Event()
    yield gate
    gate.set()


@pytest.mark.parametrize("make", [of_samples, of_values, of_batches])
def test_building_ends_with_the_sample_that_it_is_at(
    make: Callable[[str, Hanging], Any], shards: str, gate: threading.Event
) -> None:
    hanging = Hanging(gate, threading.Event())
    loader = make(shards, hanging)
    consumer = Consumer(loader)
    assert hanging.begun.wait(_WAIT_S)
    closer = threading.Thread(target=loader.close)
    closer.start()
    assert consumer.ends(), "the consumer waited for the sample"
    # A loop that is between two batches ends; one that waits for a batch is told.
    assert consumer.error is None or isinstance(consumer.error, EngineClosedError)
    gate.set()
    closer.join(_WAIT_S)
    assert not closer.is_alive()
    assert hanging.calls <= 4, "more was built than what was begun"
    assert threads_left() == []
