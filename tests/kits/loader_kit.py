"""Loaders over shards, seen from behind: the engine, the newest session, and who builds.

`pytest --builders process` builds all batches in processes, also those that are copies alone; `ray`: actors.
Unless asked otherwise, threads build where the library would choose processes: to fork three from one with
all tests imported takes half a second, and that they build the same is a contract.
"""

from __future__ import annotations

import gc
from typing import Any

from dataflow import DataLoader, Topology
from dataflow.planning.plan import StreamPlan
from dataflow.planning.settings import StreamSettings
from dataflow.stream import decisions, loader
from dataflow.stream.decisions import BuilderPlan
from dataflow.stream.loader import StreamLoader
from dataflow.stream.session import Session

reads_here = False
"""Whether this process reads, and ships values to actors: the marker of the test that runs says so."""
chooses_itself = False
"""Whether the library chooses who builds where arguments name none: the marker of the test says so."""
_NUMBER = {"main": 0, "thread": 2, "process": 2, "ray": 2}


def stream_of(loader: DataLoader) -> StreamLoader:
    """The engine of a loader over shards."""
    stream = loader._stream
    assert stream is not None
    return stream


def session_of(loader: DataLoader) -> Session:
    """What serves the newest loop, or waits for the next."""
    return stream_of(loader).sessions.open[-1]


def num_leased_after_a_loop(dataset: Any, **options: Any) -> int:
    """Slots that are held when nobody has a batch any more, without a garbage collector."""
    gc.collect()
    gc.disable()
    try:
        with DataLoader(dataset, 8, **options) as loader:
            assert sum(1 for _ in loader) > 2
            return session_of(loader).resources.arena.num_leased
    finally:
        gc.enable()


def build_in(workers: str) -> None:
    """Choose these builders wherever arguments name none, for the rest of this process.

    "" leaves it to the library, but for threads in place of processes that nobody asked for.
    """
    choose = decisions.plan_builders

    def plan(stream: StreamPlan, settings: StreamSettings, place: Topology) -> BuilderPlan:
        if settings.workers is not None or settings.num_workers is not None or chooses_itself:
            return choose(stream, settings, place)
        if not workers:
            chosen = choose(stream, settings, place)
            if chosen.workers != "process" or settings.asks_for_processes:
                return chosen
            return BuilderPlan(workers="thread", num_workers=2, reason="no test asked for processes")
        reads = workers == "ray" and not reads_here
        return BuilderPlan(
            workers=workers, num_workers=_NUMBER[workers], reason="a test asked for it", reads=reads
        )

    for module in (loader, decisions):
        module.plan_builders = plan
