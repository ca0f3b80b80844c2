"""Decide who watches a loader: the page of this process, a record for `dataflow doctor`, a progress bar."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import get_worker_info

from dataflow.progress.observer import DATA_STALL, LoaderObserver, ObserverGroup, Role
from dataflow.shard_order import Sharded
from dataflow.telemetry.status import OFF
from dataflow.telemetry.timing import VARIABLE

if TYPE_CHECKING:
    from dataflow.telemetry.status.loaders import LoaderStatus

_log = logging.getLogger("dataflow")

SERVE = "DATAFLOW_METRICS"
"""The environment variable that has local rank 0 serve metrics: an address."""


def observe(loader: Any, owner: Any, name: str | None, role: Role | None) -> LoaderStatus | None:
    """Have the loops over a loader watched by whoever wants to, from its first one on.

    Args:
        loader: a `DataLoader`.
        owner: what serves its loops, and has an attribute `observer`. Not the loader: `for batch in
            DataLoader(...)` keeps only what serves the loop.
        name: that it was given; None: none was.
        role: as that.

    Returns:
        Its line on the page of this process; None: it has none.
    """
    if get_worker_info() is not None:
        return None
    status, observers = None, list[LoaderObserver]()
    if os.environ.get(OFF) != "0":
        try:
            status = _on_page(loader, owner, name, role)
            observers.append(status)
        except Exception:  # as of a dataset whose attributes raise: no training ends for want of a name
            _log.warning("`dataflow top` and metrics do not see a loader", exc_info=True)
    if (folder := os.environ.get(VARIABLE)) and not os.environ.get(DATA_STALL):
        from dataflow.telemetry.timing.loops import LoopRecorder
        from dataflow.telemetry.timing.records import IN_SCHEDULES

        if loader not in IN_SCHEDULES:
            observers.append(LoopRecorder(folder, loader))
    if loader.progress:
        from dataflow.telemetry.loop_bar import LoaderBar

        observers.append(LoaderBar(loader.progress, loader.batch_size))
    owner.observer = ObserverGroup(observers) if len(observers) > 1 else next(iter(observers), None)
    return status


def _on_page(loader: Any, owner: Any, name: str | None, role: Role | None) -> LoaderStatus:
    from dataflow.telemetry.status.loaders import LoaderStatus
    from dataflow.telemetry.status.names import name_of
    from dataflow.telemetry.status.page import page_of_process

    page, is_named = page_of_process(), name is not None
    if name is None and not isinstance(loader.dataset, Sharded):  # over shards the page asks for it
        name = name_of(loader.dataset)
    trains = torch.is_grad_enabled()
    status = LoaderStatus(page, owner, name=name, role=role, is_named=is_named, trains=trains)
    page.add_loader(status)
    if address := os.environ.get(SERVE):
        from dataflow.telemetry.serving.serve import serve_as_asked

        serve_as_asked(address)
    return status
