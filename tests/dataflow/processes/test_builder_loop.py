"""What a builder elsewhere hands over, and when: its loop, fed and heard in this process, with a clock that
stands still between samples.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable
from itertools import chain
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dataflow.batch.builder import BuildSettings, ChunkPlan
from dataflow.outputs.columns import ChunkRows
from dataflow.outputs.fixed import ArrayOutput
from dataflow.processes.builder_main import BuildTask, BuiltBatches
from dataflow.processes.builders import ProcessBuilders
from dataflow.processes.dispatch import BusyTimes
from dataflow.processes.serialized import SerializedChunk, SerializedColumn, SerializedSource, serialized_rows
from prefetch.ipc.protocol import WorkerLoop, WorkerMessage, WorkerRequest, WorkerResult
from prefetch.memory.arena import Arena
from prefetch.workers.worker_start import ABOUT
from sharding.errors import SampleError

BATCH, BATCHES = 4, 5
HAND_OVER_S = 0.02
ROWS = BATCH * BATCHES

Sample = dict[str, Any]


class HandFed:
    """A builder that gets requests by hand: transport and inputs of its loop; each sample takes so long.

    Args:
        sample_s: seconds.
        charge_bytes: that are charged at once.
        transform: called with each sample.
    """

    def __init__(
        self, sample_s: float, charge_bytes: int = 1 << 20, transform: Callable[[Sample], Sample] = dict
    ) -> None:
        self.time_s = 0.0
        self.responses: list[tuple[int, Any]] = []
        self._requests: deque[WorkerRequest] = deque()
        self._loop = WorkerLoop(self)

        def slow(sample: Sample) -> Sample:
            self.time_s += sample_s
            return transform(sample)

        settings = BuildSettings(
            outputs=[ArrayOutput(name="n", dtype="int64", shape=(), sources=("n",))],
            transforms=[(slow, False)],
            seed=0,
            charge_bytes=charge_bytes,
            hand_over_s=HAND_OVER_S,
            limit_bytes=1 << 28,
        )
        arena = Arena(limit_bytes=1 << 28)
        self._task = BuildTask(
            "a loop", self._loop, self, settings=settings, arena=arena, now=lambda: self.time_s
        )

    def build(self, *, num_skipped: int = 0) -> None:
        """Build a chunk, until it asks."""
        every = np.arange(ROWS)
        plan = ChunkPlan(
            epoch=0,
            first_batch=0,
            sizes=np.full(BATCHES, BATCH),
            segments=None,
            cut=None,
            lengths=None,
            repeats=(),
        )
        column = SerializedColumn(offset=0, nbytes=8 * ROWS, shape=(), dtype="int64")
        source = SerializedSource(number=0, epoch=None, rows=every)
        chunk = SerializedChunk(plan=plan, columns={"n": column}, sources=[source], numbers=every)
        self.send(WorkerMessage.TASK, (chunk, num_skipped, ()))

    def send(self, kind: int, content: Any = None) -> None:
        """Let it do what a request says."""
        self._requests.append(WorkerRequest(kind, 7, content))
        self._loop.run(self._task.serve)

    def receive(self) -> WorkerRequest | None:
        return self._requests.popleft() if self._requests else None

    def respond(self, kind: int, task: int, obj: Any, generation: int = 0) -> None:
        self.responses.append((kind, obj))
        if kind == WorkerResult.QUESTION:  # nothing is left out
            self._requests.append(WorkerRequest(WorkerMessage.ANSWER, task, (False, [])))

    def rows(self, number: int, error_of: object, chunk: SerializedChunk, *where: Any) -> ChunkRows:
        return serialized_rows(chunk, np.arange(ROWS).view(np.uint8), _error_of)

    def samples(self, made: Any) -> dict[int, Any]:
        return {}

    def release(self, number: int, *, is_built: bool) -> None: ...

    @property
    def built(self) -> list[BuiltBatches]:
        return [obj for kind, obj in self.responses if kind == WorkerResult.BATCH]

    @property
    def numbers(self) -> list[list[int]]:
        """Of the batches in each response."""
        return [[number for _, number, *_ in built.batches] for built in self.built]


def _error_of(row: int, reason: str, column: str | None, stage: str) -> SampleError:
    return SampleError("shard", reason, key=str(row), stage=stage)


def test_a_chunk_whose_batches_take_little_crosses_as_one() -> None:
    loop = HandFed(sample_s=0.9 * HAND_OVER_S / ROWS)
    loop.build()
    assert loop.numbers == [[0, 1, 2, 3, 4]]
    assert loop.built[0].is_last


def test_batches_that_take_long_cross_one_by_one_and_nothing_is_asked_between_them() -> None:
    loop = HandFed(sample_s=HAND_OVER_S)
    loop.build()
    assert loop.numbers == [[0], [1], [2], [3], [4]]
    assert [built.flush_now for built in loop.built] == [True] * 4 + [False]
    assert [built.asks for built in loop.built] == [False] * 4 + [True]
    assert [built.build_s for built in loop.built] == pytest.approx([BATCH * HAND_OVER_S] * 5)
    assert [built.is_last for built in loop.built] == [False] * 4 + [True]
    values = [fields[2]["n"].tolist() for built in loop.built for fields in built.batches]
    assert values == np.arange(ROWS).reshape(BATCHES, BATCH).tolist()


def test_so_many_batches_cross_together_as_take_a_while() -> None:
    loop = HandFed(sample_s=0.6 * HAND_OVER_S / BATCH)
    loop.build()
    assert loop.numbers == [[0, 1], [2, 3], [4]]


@pytest.mark.parametrize(("sample_s", "flushed"), [(0.0, [[0, 1]]), (HAND_OVER_S, [[0], [1]])])
def test_a_builder_asks_when_as_much_is_made_as_is_charged_at_once_however_long_it_takes(
    sample_s: float, flushed: list[list[int]]
) -> None:
    whole = HandFed(sample_s=0.0)
    whole.build()
    loop = HandFed(sample_s, charge_bytes=2 * whole.built[0].heap_bytes // BATCHES)
    loop.build()
    assert loop.numbers == flushed
    assert [built.asks for built in loop.built] == [False] * (len(flushed) - 1) + [True]
    for _ in range(2):
        loop.send(WorkerMessage.GO_ON)
    assert [*chain(*loop.numbers)] == [0, 1, 2, 3, 4]
    assert loop.built[-1].is_last


def test_who_builds_a_chunk_again_passes_over_what_was_handed_over() -> None:
    loop = HandFed(sample_s=HAND_OVER_S)
    loop.build(num_skipped=3)
    assert loop.numbers == [[3], [4]]


def test_an_error_comes_behind_the_batches_before_it_however_long_they_take() -> None:
    def odd(sample: Sample) -> Sample:
        if sample["n"] == 3 * BATCH:
            raise ValueError("odd")
        return sample

    for sample_s in (0.0, HAND_OVER_S):
        loop = HandFed(sample_s, transform=odd)
        loop.build()
        if loop.built[-1].asks:
            loop.send(WorkerMessage.GO_ON)
        assert [*chain(*loop.numbers)] == [0, 1, 2]
        kind, error = loop.responses[-1]
        assert kind == WorkerResult.ERROR
        assert "ValueError: odd" in str(error.restored())


def test_builders_are_at_work_from_when_a_chunk_is_sent_until_its_last_batches_are_there() -> None:
    """Also while they say nothing: a transform that takes long is work."""
    now = 0.0
    times = BusyTimes(lambda: now)
    times.are({0})
    now = 5.0
    assert times.total_s() == 5.0
    times.are({0, 1})
    now = 7.0
    times.are({1})
    assert times.total_s() == 9.0
    now = 8.0
    times.are(set())
    now = 100.0
    assert times.total_s() == 10.0


def test_an_answer_that_came_late_does_not_end_the_loop_that_asks() -> None:
    """Behind it are the stacks of the next one."""
    told = f"stacks{ABOUT}{json.dumps(['in f (x.py, line 1)', 7, -1])}\nFile y.py, line 2\n"
    builders: Any = ProcessBuilders.__new__(ProcessBuilders)
    builders._processes = SimpleNamespace(pool=SimpleNamespace(about=lambda process: told))
    assert builders._standing(0, {}) == ", in f (x.py, line 1)"
