"""Lets tests of loaders over shards run over other builders than those that a loader would choose.

`pytest --builders process` builds all batches in processes, also those that are copies alone; `ray`: actors.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from dataflow import Topology
from dataflow.stream import builders, loader, session
from dataflow.stream.builders import BuilderPlan
from dataflow.stream.plan import StreamPlan
from dataflow.stream.settings import StreamSettings

reads_here = False
"""Whether this process reads, and ships values to actors: the marker of the test that runs says so."""
_NUMBER = {"main": 0, "thread": 2, "process": 2, "ray": 2}


def in_full(*values: Any) -> list[Any]:
    """Values of a parameter that have a representative among others: tried with `--full`."""
    return [pytest.param(value, marks=pytest.mark.full) for value in values]


def others_in_full(values: Iterable[Any], *representatives: Any) -> list[Any]:
    """All values of a parameter: the others of them are tried with `--full`."""
    return [one for value in values for one in ([value] if value in representatives else in_full(value))]


def build_in(workers: str) -> None:
    """Choose these builders wherever arguments name none, for the rest of this process."""
    choose = builders.plan_builders

    def plan(stream: StreamPlan, settings: StreamSettings, place: Topology) -> BuilderPlan:
        if settings.workers is not None or settings.num_workers is not None:
            return choose(stream, settings, place)
        reads = workers == "ray" and not reads_here
        return BuilderPlan(
            workers=workers, num_workers=_NUMBER[workers], reason="a test asked for it", reads=reads
        )

    for module in (loader, session):
        module.plan_builders = plan
