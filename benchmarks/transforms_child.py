"""The measured process of `transforms`: one loader over the tars of W4 whose transform burns Python."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.child import burn, consume
from benchmarks.child_events import forever, telling
from benchmarks.data import Data
from benchmarks.memory import tree_cpu_s

BATCH = 64


def scaled(record: Any, cost_s: float) -> torch.Tensor:
    """A record as floats, after so much Python."""
    burn(cost_s)
    return torch.as_tensor(record)[:1024].float() / 255


def transformed(sample: dict[str, Any], cost_s: float) -> dict[str, Any]:
    return {"x": scaled(sample["bin"], cost_s), "y": sample["cls"]}


def ours(data: Data, workers: int, cost_s: float, workers_kind: Any) -> Any:
    from dataflow import DataLoader, ShardedDataset

    folder = data.converted("dataflow-w4", lambda folder: folder.mkdir(parents=True))
    dataset = ShardedDataset(
        data.files("W4"),
        catalog=str(folder / "catalog.arrow"),
        decode={"bin": None, "cls": "int"},
        transform=partial(transformed, cost_s=cost_s),
    )
    return DataLoader(dataset, BATCH, shuffle=True, drop_last=True, num_workers=workers, workers=workers_kind)


class Records(torch.utils.data.Dataset[Any]):
    """Map-style over the same tars, read at indexed offsets."""

    def __init__(self, data: Data, cost_s: float) -> None:
        from benchmarks.peers_torch import TarFields

        self._fields, self._cost_s = TarFields(data.index("W4"), "bin"), cost_s

    def __len__(self) -> int:
        return len(self._fields)

    def __getitem__(self, i: int) -> Any:
        record = np.frombuffer(self._fields.read(int(i)), np.uint8)
        return scaled(record.copy(), self._cost_s), int(self._fields.labels[int(i)])


def torch_loader(data: Data, workers: int, cost_s: float) -> Iterable[Any]:
    from torch.utils.data import DataLoader

    return DataLoader(
        Records(data, cost_s),
        BATCH,
        shuffle=True,
        drop_last=True,
        num_workers=workers,
        persistent_workers=True,
    )


def webdataset(data: Data, workers: int, cost_s: float) -> Iterable[Any]:
    from benchmarks.peers_webdataset import _loader

    def sample(fields: dict[str, Any]) -> Any:
        return scaled(np.frombuffer(fields["bin"], np.uint8).copy(), cost_s), int(fields["cls"])

    return _loader(data.files("W4"), workers, BATCH, 1000, sample, torch.utils.data.default_collate)


def grain_processes(data: Data, workers: int, cost_s: float) -> Iterable[Any]:
    import grain

    def batched(samples: Any) -> Any:
        return tuple(map(np.stack, zip(*samples, strict=True)))

    class Values(Records):
        def __getitem__(self, i: int) -> Any:
            x, y = super().__getitem__(i)
            return x.numpy(), np.int64(y)

    dataset = grain.MapDataset.source(Values(data, cost_s)).shuffle(seed=0).repeat()
    loader = dataset.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))
    loader = loader.batch(BATCH, drop_remainder=True, batch_fn=batched)
    loader = loader.mp_prefetch(grain.MultiprocessingOptions(num_workers=workers, per_worker_buffer_size=2))
    return (tuple(map(torch.from_numpy, batch)) for batch in loader)


LOADERS = {
    "dataflow": partial(ours, workers_kind="process"),
    "dataflow, threads": partial(ours, workers_kind="thread"),
    "torch": torch_loader,
    "WebDataset": webdataset,
    "Grain": grain_processes,
}


def main() -> None:
    job = json.loads(sys.argv[1])
    data = Data(Path(job["root"]))
    with telling() as tell:
        make = LOADERS[job["loader"]]
        tell("imported")
        began = time.perf_counter()
        batches = forever(make(data, job["workers"], job["cost_s"]))
        next(batches)
        tell("first", first_batch_s=time.perf_counter() - began)
        consume(batches, job["warmup_s"], 0)
        tell("warm")
        cpu_s = tree_cpu_s(os.getpid())
        timed = consume(batches, job["timed_s"], 0)
        cpu_s = tree_cpu_s(os.getpid()) - cpu_s
        tell(
            "timed",
            samples_per_s=timed.samples / timed.elapsed_s,
            cpu_us_per_sample=1e6 * cpu_s / timed.samples,
        )
        consume(batches, 0.5, 0)
        tell("watched")
    os._exit(0)


if __name__ == "__main__":
    main()
