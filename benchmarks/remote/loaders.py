"""The loaders of W5, and what is measured of one: tars behind HTTP, read as each project documents it.

Each takes a `Remote` and a number of workers, and returns an iterable of batches that is run through once.
Nothing is cached from an earlier run: caches lie in a folder of the run.
"""

from __future__ import annotations

import io
import os
import resource
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from benchmarks.memory import tree_cpu_s
from benchmarks.peers.measured import touch
from benchmarks.runner import Tell


@dataclass(frozen=True)
class Remote:
    """Where a run's data lies."""

    server: str
    """`http://host:port`, the folder of all workloads."""
    workload: str
    root: str
    """The same folder on this machine, for names and for what was made beforehand."""
    scratch: str
    """An empty folder of this run."""

    @property
    def names(self) -> list[str]:
        return sorted(p.name for p in (Path(self.root) / self.workload).glob("*.tar"))

    @property
    def urls(self) -> list[str]:
        return [f"{self.server}/{self.workload}/{name}" for name in self.names]

    @property
    def field(self) -> str:
        return {"W1": "jpg", "W4": "bin"}[self.workload]

    @property
    def batch(self) -> int:
        return {"W1": 64, "W4": 256}[self.workload]

    @property
    def catalog(self) -> str:
        return str(Path(self.root) / "converted" / "remote" / f"{self.workload}.catalog")


def collated(remote: Remote) -> Callable[[list[Any]], Any]:
    """(value, label) pairs -> a batch: ragged bytes stay a list, records become one tensor."""

    def collate(samples: list[Any]) -> Any:
        values, labels = zip(*samples, strict=True)
        if remote.workload == "W4":
            return torch.from_numpy(np.stack([np.frombuffer(v, np.uint8) for v in values])), torch.tensor(
                labels
            )
        return list(values), torch.tensor(labels)

    return collate


# ---- ours ------------------------------------------------------------------------------------------------


def prepare_ours(remote: Remote) -> None:
    from dataflow import ShardedDataset

    os.makedirs(os.path.dirname(remote.catalog), exist_ok=True)
    Path(remote.catalog).unlink(missing_ok=True)  # of another port
    ShardedDataset(remote.urls, catalog=remote.catalog)


def ours(remote: Remote, workers: int) -> Any:
    """With the catalog at hand, as `dataflow index` makes it, and no settings."""
    from dataflow import DataLoader as Loader, ShardedDataset

    dataset = ShardedDataset(remote.catalog, decode={remote.field: None, "cls": "int"})
    return Loader(dataset, remote.batch, shuffle=True, memory_limit="512MB")


# ---- peers -----------------------------------------------------------------------------------------------


def webdataset(remote: Remote, workers: int) -> Any:
    import webdataset as wds

    urls = [f"pipe:curl -s -f {url}" for url in remote.urls]
    pipeline = (
        wds.WebDataset(urls, shardshuffle=len(urls), empty_check=False)
        .shuffle(200 if remote.workload == "W1" else 1000)
        .map(lambda fields: (fields[remote.field], int(fields["cls"])))
        .batched(remote.batch, collation_fn=collated(remote), partial=False)
    )
    return wds.WebLoader(pipeline, batch_size=None, num_workers=workers)


class _Tars(IterableDataset):
    """Whole tars through fsspec, one after the other in each worker."""

    def __init__(self, remote: Remote) -> None:
        self._remote = remote

    def __iter__(self) -> Iterator[Any]:
        import fsspec

        worker = get_worker_info()
        urls = self._remote.urls[worker.id :: worker.num_workers] if worker else self._remote.urls
        for url in urls:
            with fsspec.open(url) as stored:
                whole = io.BytesIO(stored.read())  # one request: faster than reading ahead in pieces
            with tarfile.open(fileobj=whole, mode="r:") as tar:
                value = b""
                for member in tar:
                    extracted = tar.extractfile(member)
                    assert extracted is not None
                    data = extracted.read()
                    if member.name.endswith(".cls"):
                        label = int(data)
                    else:
                        value = data
                        continue
                    yield value, label


def torch_fsspec(remote: Remote, workers: int) -> Any:
    return DataLoader(_Tars(remote), remote.batch, num_workers=workers, collate_fn=collated(remote))


def hf(remote: Remote, workers: int) -> Any:
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": remote.scratch}
    import datasets

    stream = datasets.load_dataset(
        "webdataset", data_files={"train": remote.urls}, split="train", streaming=True
    )
    stream = stream.decode(False) if hasattr(stream, "decode") else stream

    def collate(rows: list[Any]) -> Any:
        values = [row[remote.field] for row in rows]
        values = [value["bytes"] if isinstance(value, dict) else value for value in values]
        return collated(remote)([(value, int(row["cls"])) for value, row in zip(values, rows, strict=True)])

    return DataLoader(stream, remote.batch, num_workers=workers, collate_fn=collate)


def spdl(remote: Remote, workers: int) -> Iterable[Any]:
    import urllib.request

    import spdl.io
    from spdl.pipeline import PipelineBuilder

    def fetch(url: str) -> list[Any]:
        with urllib.request.urlopen(url) as answer:
            data = answer.read()
        members = [bytes(content) for _, content in spdl.io.iter_tarfile(data)]
        pairs = [(value, int(label)) for value, label in zip(members[::2], members[1::2], strict=True)]
        cuts = range(0, len(pairs), remote.batch)
        return [collate(pairs[at : at + remote.batch]) for at in cuts]

    collate = collated(remote)
    pipeline = PipelineBuilder().add_source(remote.urls).pipe(fetch, concurrency=max(1, workers)).add_sink(2)
    built = pipeline.build(num_threads=max(1, workers))
    with built.auto_stop():
        for batches in built:
            yield from batches


# ---- what is measured ------------------------------------------------------------------------------------

LOADERS: Mapping[str, tuple[Callable[[Remote, int], Iterable[Any]], Sequence[str]]] = {
    "ours": (ours, ("dataflow.stream.loader", "fsspec.implementations.http")),
    "webdataset": (webdataset, ("webdataset",)),
    "torch_fsspec": (torch_fsspec, ("fsspec", "aiohttp")),
    "hf": (hf, ("datasets",)),
    "spdl": (spdl, ("spdl.io", "spdl.pipeline")),
}
"""Each with what is imported before the clock starts."""


def measured(job: dict[str, Any], tell: Tell) -> None:
    """Tell what a cold epoch of a loader takes, and at most some seconds of it.

    The clock starts when everything is imported and the loader's function is called, so opening the dataset,
    starting workers and the first requests count.
    """
    with tempfile.TemporaryDirectory() as scratch:
        _run(job, Remote(job["server"], job["workload"], job["root"], scratch), tell)


def _run(job: dict[str, Any], remote: Remote, tell: Tell) -> None:
    target = job["target"]
    if job["prepare_only"]:
        if target == "ours":
            prepare_ours(remote)
        tell("done")
        return
    make, libraries = LOADERS[target]
    for name in libraries:
        __import__(name)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 4096)), hard))
    tell("imported")
    asked = _count_reads() if target == "ours" else []
    cpu_s, began = tree_cpu_s(os.getpid()), time.perf_counter()
    loader = make(remote, job["workers"])
    first_s, samples = 0.0, 0
    for batch in loader:
        first_s = first_s or time.perf_counter() - began
        samples += touch(batch)
        if time.perf_counter() - began > job["at_most_s"]:
            break
    elapsed_s = time.perf_counter() - began
    tell(
        "done",
        samples=samples,
        elapsed_s=elapsed_s,
        first_batch_s=first_s,
        cpu_s=tree_cpu_s(os.getpid()) - cpu_s,
        planned={"requests": len(asked), "bytes": sum(asked)},
    )


def _count_reads() -> list[int]:
    """Bytes of each read that our loader plans, those for the next epoch included, which it begins early."""
    from prefetch.store.reader import StoreReader

    asked: list[int] = []
    read_into = StoreReader.read_into

    def counting(self: StoreReader, shard: Any, offset: int, out: Any, **more: Any) -> None:
        asked.append(out.nbytes)
        read_into(self, shard, offset, out, **more)

    StoreReader.read_into = counting  # type: ignore[method-assign]
    return asked
