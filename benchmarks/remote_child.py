"""The measured process of W5: one loader, one epoch at most, cold; started afresh for every run by `remote`.

The clock starts when everything is imported and the loader's function is called, so opening the dataset,
starting workers and the first requests count.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import tempfile
import time
from typing import Any

import torch  # noqa: F401 - imports are not timed

from benchmarks import remote_peers
from benchmarks.child import touch
from benchmarks.child_events import Tell, telling
from benchmarks.memory import tree_cpu_s
from benchmarks.remote_peers import Remote

IMPORTS = {
    "ours": ("dataflow.stream.loader", "fsspec.implementations.http"),
    "webdataset": ("webdataset",),
    "torch_fsspec": ("fsspec", "aiohttp"),
    "hf": ("datasets",),
    "spdl": ("spdl.io", "spdl.pipeline"),
}


def main() -> None:
    job: dict[str, Any] = json.loads(sys.argv[1])
    with telling() as tell, tempfile.TemporaryDirectory() as scratch:
        run(job, Remote(job["server"], job["workload"], job["root"], scratch), tell)
    os._exit(0)


def run(job: dict[str, Any], remote: Remote, tell: Tell) -> None:
    target = job["target"]
    if job["prepare_only"]:
        prepare = getattr(remote_peers, f"prepare_{target}", None)
        if prepare:
            prepare(remote)
        tell("prepared")
        return
    for name in IMPORTS[target]:
        __import__(name)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 4096)), hard))
    tell("imported")
    asked = _count_reads() if target == "ours" else []
    cpu_s, began = tree_cpu_s(os.getpid()), time.perf_counter()
    loader = getattr(remote_peers, target)(remote, job["workers"])
    first_s, samples = 0.0, 0
    for batch in loader:
        first_s = first_s or time.perf_counter() - began
        samples += touch(batch)
        if time.perf_counter() - began > job["at_most_s"]:
            break
    elapsed_s = time.perf_counter() - began
    tell(
        "timed",
        samples=samples,
        elapsed_s=elapsed_s,
        first_batch_s=first_s,
        cpu_s=tree_cpu_s(os.getpid()) - cpu_s,
        planned={"requests": len(asked), "bytes": sum(asked)},
    )
    tell("watched")


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


if __name__ == "__main__":
    main()
