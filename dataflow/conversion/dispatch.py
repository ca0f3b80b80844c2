"""Have the shards of a conversion written: by this process, its worker processes, or an executor."""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Executor
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

import cloudpickle

from dataflow.conversion.folder import ConversionError, index_name
from dataflow.conversion.rows import GivenRows, StoredRows
from dataflow.conversion.source import ConvertSource
from dataflow.conversion.work import TaskSpec, write_packed, write_shard
from dataflow.executors import engine, process_pool, run_all
from dataflow.progress.bar import ProgressBar
from sharding.errors import DataflowError
from sharding.urls import protocol_of

_MOST_BYTES_SENT = 1 << 16
_SAME_ITEMS = "it must give the same items each time; overwrite=True begins anew"


class ShownShards(ProgressBar):
    """Receipts of finished shards by number, which get more, and their bar: samples, bytes, and the rate."""

    def __init__(
        self, receipts: dict[int, dict[str, Any]], bounds: Sequence[int] | None, visible: bool | None
    ) -> None:
        total, self.receipts = None if bounds is None else len(bounds) - 1, receipts
        super().__init__("converting", total=total, done=len(receipts), unit="shard", visible=visible)
        self._samples = sum(receipt["samples"] for receipt in receipts.values())
        self._bytes = sum(receipt["bytes"] for receipt in receipts.values())
        self._before, self._began = self._bytes, time.monotonic()

    def add(self, receipt: dict[str, Any]) -> None:
        """Count a shard."""
        self.receipts[receipt["shard"]] = receipt
        self._samples += receipt["samples"]
        self._bytes += receipt["bytes"]
        rate = (self._bytes - self._before) / max(1e-3, time.monotonic() - self._began) / 1e6
        text = f"{self._samples:,} samples, {self._bytes / 1e6:,.0f} MB, {rate:,.1f} MB/s"
        self.show(len(self.receipts), text=text)


def write_all(task: TaskSpec, shown: ShownShards, *, workers: int | None, executor: Executor | None) -> None:
    """Have all shards written that have no receipt yet."""
    num_shards = len(task.bounds) - 1
    missing = [number for number in range(num_shards) if number not in shown.receipts]
    if not missing:
        return
    urls = [task.folder.url, *(task.rows.catalog.urls[:1] if isinstance(task.rows, StoredRows) else ())]
    if any(protocol_of(url) == "memory" for url in urls):
        workers = 1  # no other process sees it
    workers = workers or len(os.sched_getaffinity(0))
    written: Iterable[tuple[int, dict[str, Any]]]
    try:
        with ExitStack() as opened:
            if executor is None and (workers == 1 or len(missing) == 1):
                written = enumerate(write_shard(task, number) for number in missing)
            else:
                call = partial(write_packed, _packed(task))
                pool = executor or opened.enter_context(engine("processes", workers=workers))
                written = run_all(pool, call, missing)
            for _, receipt in written:
                shown.add(receipt)
    except (DataflowError, KeyboardInterrupt) as error:
        finished = len(shown.receipts)
        error.add_note(f"{finished} of {num_shards} shards are finished: start it again to go on")
        raise


def warm_up(inputs: Any, to: str, functions: Iterable[Any]) -> None:
    """Start what worker processes come from, while this process has one thread and can be forked."""
    codec = getattr(inputs, "codec", None)
    preload = [write_shard.__module__, "fsspec.implementations.local"]
    preload.append("sharding.formats.arrow.parquet" if codec is None else type(codec).__module__)
    if to == "parquet":
        preload.append("pyarrow.parquet")
    modules = {getattr(function, "__module__", None) or "__main__" for function in functions}
    process_pool.warm_up({*modules, *preload})


def _packed(task: TaskSpec) -> bytes:
    """Return what each task is sent. A large index of the source is read from the destination instead."""
    if isinstance(task.rows, StoredRows):
        light, index = task.rows.without_index()
        if len(index) > _MOST_BYTES_SENT:
            task.folder.write(index_name(index), index)
            task = replace(task, rows=light, index_at=index_name(index))
    try:
        return bytes(cloudpickle.dumps(task))  # functions of the main module go by value
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ValueError(
            f"worker processes cannot be sent this conversion ({error}): make what functions and datasets "
            "hold inside of them, or give workers=1"
        ) from error


def write_iterable(task: TaskSpec, inputs: ConvertSource, shown: ShownShards, shard_samples: int) -> None:
    """Write an iterable, shard by shard; what finished shards hold is taken from it again, and skipped."""
    items, number, receipts = inputs.items(), 0, shown.receipts
    while samples := list(islice(items, shard_samples)):
        if number not in receipts:
            rows = GivenRows(samples, number * shard_samples)
            shown.add(write_shard(replace(task, rows=rows), number))
        elif receipts[number]["read"] != len(samples):
            had = receipts[number]["read"]
            raise ConversionError(
                f"the iterable has {len(samples)} items for shard {number}, had {had} when written: "
                f"{_SAME_ITEMS}"
            )
        number += 1
    if beyond := [shard for shard in receipts if shard >= number]:
        raise ConversionError(
            f"the iterable ends before shard {min(beyond)}, which was written: {_SAME_ITEMS}"
        )
