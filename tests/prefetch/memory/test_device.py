"""Copies to a device: which host batch is held until when, and what is copied at all."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from dataflow.ragged import Ragged
from prefetch.memory.arena import Arena
from prefetch.memory.device import CudaStreams, DeviceCopier, register_pinned

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


class FakeEvent:
    """Passes when the test says so, or when the host waits for it."""

    def __init__(self, log: list[str], number: int) -> None:
        self._log, self._number = log, number
        self.passed = False

    def query(self) -> bool:
        return self.passed

    def synchronize(self) -> None:
        if not self.passed:
            self._log.append(f"host waits for {self._number}")
        self.passed = True


class FakeStreams:
    """Copies at once; events pass when the test says so."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.events: list[FakeEvent] = []

    def copy(self, tensor: Tensor) -> Tensor:
        self.log.append("copy")
        return tensor.clone()

    def recorded(self) -> FakeEvent:
        self.log.append(f"record {len(self.events)}")
        self.events.append(FakeEvent(self.log, len(self.events)))
        return self.events[-1]


@pytest.fixture
def streams() -> FakeStreams:
    return FakeStreams()


@pytest.fixture
def copier(streams: FakeStreams) -> DeviceCopier:
    return DeviceCopier(streams)  # type: ignore[arg-type]


def moved(copier: DeviceCopier) -> weakref.ref[Tensor]:
    """Move a batch that nobody else holds; tells whether the host side is still alive."""
    host = torch.arange(4)
    copier.to_device({"x": host})
    return weakref.ref(host)


# ---- order -------------------------------------------------------------------------------------------------


def test_the_event_is_recorded_after_the_copies_of_the_batch(
    copier: DeviceCopier, streams: FakeStreams
) -> None:
    copier.to_device({"x": torch.zeros(2), "y": torch.zeros(2)})
    assert streams.log == ["copy", "copy", "record 0"]


def test_a_host_batch_is_held_until_its_event_has_passed(copier: DeviceCopier, streams: FakeStreams) -> None:
    first = moved(copier)
    assert first() is not None
    second = moved(copier)
    assert first() is not None, "its copy may still read from the slot"
    streams.events[0].passed = True
    third = moved(copier)
    assert first() is None
    assert (second() is not None, third() is not None) == (True, True)
    assert "host waits for 0" not in streams.log


def test_all_batches_whose_events_have_passed_are_let_go(copier: DeviceCopier, streams: FakeStreams) -> None:
    first, second = moved(copier), moved(copier)
    for event in streams.events:
        event.passed = True
    moved(copier)
    assert (first(), second()) == (None, None)


def test_a_batch_is_not_let_go_before_an_older_one(copier: DeviceCopier, streams: FakeStreams) -> None:
    """Copies run in order on one stream: a later event that has passed says nothing new."""
    first = moved(copier)
    second = moved(copier)
    streams.events[1].passed = True
    streams.log.clear()
    moved(copier)
    assert streams.log[0] == "host waits for 0"
    assert (first(), second()) == (None, None)


def test_at_most_two_batches_are_in_flight(copier: DeviceCopier, streams: FakeStreams) -> None:
    alive = []
    for number in range(6):
        alive.append(moved(copier))
        assert sum(ref() is not None for ref in alive) == min(2, number + 1)
    waits = [line for line in streams.log if line.startswith("host")]
    assert waits == [f"host waits for {n}" for n in range(4)]


def test_the_host_waits_before_it_starts_the_next_copy(copier: DeviceCopier, streams: FakeStreams) -> None:
    for _ in range(3):
        moved(copier)
    assert streams.log[-3:] == ["host waits for 0", "copy", "record 2"]


def test_close_waits_for_what_is_in_flight_and_lets_it_go(copier: DeviceCopier, streams: FakeStreams) -> None:
    first, second = moved(copier), moved(copier)
    copier.close()
    assert streams.log[-2:] == ["host waits for 0", "host waits for 1"]
    assert (first(), second()) == (None, None)
    copier.close()


# ---- what is copied ----------------------------------------------------------------------------------------


class Pair(NamedTuple):
    left: Any
    right: Any


def assert_same(copied: Any, host: Any) -> None:
    """Equal in shape and value, and no CPU tensor is the host's own."""
    assert type(copied) is (dict if isinstance(host, dict) else type(host))
    if isinstance(host, Tensor):
        assert copied is not host
        assert copied.dtype == host.dtype
        assert torch.equal(copied, host)
    elif isinstance(host, dict):
        assert list(copied) == list(host)
        for key in host:
            assert_same(copied[key], host[key])
    elif isinstance(host, list | tuple):
        assert len(copied) == len(host)
        for one, other in zip(copied, host, strict=True):
            assert_same(one, other)
    else:
        assert copied is host


@pytest.mark.parametrize(
    "batch",
    [
        torch.arange(6).reshape(2, 3),
        {"x": torch.ones(3), "name": ["a", "b"], "n": 3, "none": None, "raw": b"bytes"},
        {"doc": Ragged(torch.arange(5, dtype=torch.uint8), torch.tensor([0, 2, 5]))},
        [torch.zeros(1), [torch.ones(2), "text"], ()],
        (torch.zeros(1), {"deep": [Pair(torch.ones(1), Pair(1.5, torch.ones(2)))]}),
        OrderedDict(b=torch.ones(1), a=torch.zeros(1)),
        {},
        "only text",
    ],
    ids=["tensor", "dict", "ragged", "list", "nested", "ordered", "empty", "text"],
)
def test_every_cpu_tensor_is_copied_and_the_rest_stays(
    copier: DeviceCopier, streams: FakeStreams, batch: Any
) -> None:
    assert_same(copier.to_device(batch), batch)
    assert streams.log[-1] == "record 0"


def test_a_ragged_column_stays_ragged(copier: DeviceCopier) -> None:
    copied = copier.to_device(Ragged(torch.arange(5), torch.tensor([0, 2, 5])))
    assert isinstance(copied, Ragged)
    assert [row.tolist() for row in copied.rows()] == [[0, 1], [2, 3, 4]]


def test_tensors_that_are_elsewhere_already_stay(copier: DeviceCopier, streams: FakeStreams) -> None:
    there = torch.empty(3, device="meta")
    assert copier.to_device([there])[0] is there
    assert streams.log == ["record 0"]


# ---- on a real device --------------------------------------------------------------------------------------


@needs_cuda
def test_registered_memory_is_pinned_until_it_is_unregistered() -> None:
    arena = Arena(limit_bytes=1 << 24, register=register_pinned)
    array = arena.lease(1 << 20)
    assert torch.from_numpy(array).is_pinned()
    arena.close()
    del array
    assert arena.num_leased == 0
    assert not torch.from_numpy(Arena(limit_bytes=1 << 24).lease(1 << 20)).is_pinned()


@needs_cuda
def test_memory_that_cannot_be_registered_is_told_with_the_cure() -> None:
    with pytest.raises(RuntimeError, match="ulimit -l"):
        register_pinned(0, 1 << 20)


@needs_cuda
def test_batches_copied_on_the_side_stream_arrive_whole() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    arena = Arena(limit_bytes=1 << 26, register=register_pinned)
    copier = DeviceCopier(CudaStreams(device))
    sums = []
    for number in range(20):  # slots are reused as soon as they are free: a copy cut short would show
        host = torch.from_numpy(arena.lease(1 << 22)).fill_(number)
        batch = copier.to_device({"x": host, "n": number})
        del host
        assert batch["x"].device == device
        sums.append(batch["x"].sum(dtype=torch.int64))
    copier.close()
    assert [int(s) for s in sums] == [number << 22 for number in range(20)]
    assert arena.num_leased == 0
    arena.close()
