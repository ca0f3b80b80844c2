"""Datasets on the Hub: requests of a job, time to the first batch, rows/s beside `datasets` and LitData.

    python -m benchmarks.remote.hub                                        about four minutes
    python -m benchmarks.remote.hub --json benchmarks/results/hub.json     also saves the figures
    python -m benchmarks.remote.hub --part start|first|rows|small-rows|faults         one of the parts

The Hub is hub_server.py on this machine, in a process of its own, with 50 ms before each answer of the
Hub and of its content network (another port; signed addresses). All contestants are asked through
`HF_ENDPOINT`, each run in a process of its own, with caches of its own, in turns. Parts:

- start: API calls and other requests of a job of 1 and of 64 ranks. The ranks are processes in sequence with
  one launcher's environment and one cache folder, each opens the dataset and reads one batch. Of `datasets`,
  whose ranks do not share a listing, fewer are run.
- first: 10,000 files of 10 rows; from the constructor to the first batch: with nothing known, and again.
- rows: 200 files of 125 documents of 8 KB (Parquet, one row group): an epoch in file order, in batches of
  32. Peers run with several numbers of workers; the best counts. Each row must come once.
- small-rows: the same bytes in documents of 1 KB.
- faults: the same with 5 % of requests failing (429, 500, 503, cut bodies), beside none failing; `datasets`
  is given 100 s, as it waits for a minute after some.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import multiprocessing
import os
import random
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks import REPOSITORY
from benchmarks.harness import LIMIT_S, in_own_process
from benchmarks.report import save_figures

LATENCY_S = 0.05
FAULTY = 0.05
BATCH = 32
NAME = "org/name"
FILES, ROWS, ROW_BYTES = 200, 125, 8000
WORKERS = {"datasets": (4, 8), "litdata": (4,)}


# ---- the Hub, in a process of its own ---------------------------------------------------------------------


def _parquet(first: int, rows: int, row_bytes: int) -> bytes:
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    rng = np.random.default_rng(first)
    text = [rng.bytes(row_bytes // 2).hex() for _ in range(rows)]
    out = io.BytesIO()
    table = pa.table({"n": np.arange(first, first + rows), "text": text})
    pq.write_table(table, out, row_group_size=1000, compression="none", use_dictionary=False)
    return out.getvalue()


def _serve(pipe: Any, files: int, rows: int, row_bytes: int) -> None:
    sys.path.insert(0, str(REPOSITORY / "tests" / "kits"))
    from hub_server import Answer, HubServer, Repo, Request

    hub = HubServer()
    repo = hub.repos[NAME] = Repo()
    content = {
        f"data/train-{i:05d}-of-{files:05d}.parquet": _parquet(i * rows, rows, row_bytes)
        for i in range(files)
    }
    repo.commit({**content, "README.md": b"---\nlicense: mit\n---\n"})
    for body in content.values():
        hub.hashes_of(body)
    drawn = random.Random(0)

    def fault(request: Request) -> Answer | None:
        if drawn.random() >= FAULTY:
            return None
        status = drawn.choice([0, 429, 500, 503])
        return Answer(status, cut=True) if not status else Answer(status)

    hub.latency_s = LATENCY_S
    with hub.serving():
        pipe.send(hub.url)
        while (command := pipe.recv()) != "end":
            if command == "counts":
                kinds = ("api", "resolve", "content")
                pipe.send({kind: len(hub.of_kind(kind)) for kind in kinds})
                hub.forget()
            else:
                hub.fault = fault if command == "faults" else lambda request: None
                pipe.send(None)


class _Hub:
    """The server's process, as seen from here."""

    def __init__(self, pipe: Any) -> None:
        self._pipe = pipe

    def counts(self) -> dict[str, int]:
        """Requests since the last call."""
        counted: dict[str, int] = self.ask("counts")
        return counted

    def ask(self, command: str) -> Any:
        self._pipe.send(command)
        return self._pipe.recv()


@contextlib.contextmanager
def serving(files: int, rows: int, row_bytes: int) -> Iterator[_Hub]:
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    process = spawn.Process(target=_serve, args=(there, files, rows, row_bytes))
    process.start()
    try:
        os.environ["HF_ENDPOINT"] = here.recv()
        yield _Hub(here)
    finally:
        here.send("end")
        process.join()


@contextlib.contextmanager
def new_caches() -> Iterator[None]:
    """Nothing known to anybody."""
    with tempfile.TemporaryDirectory() as folder:
        names = ("XDG_CACHE_HOME", "HF_HOME", "TMPDIR", "LITDATA_CACHE_DIR", "LITDATA_HF_CACHE_DIR")
        before = {name: os.environ.get(name) for name in names}
        os.environ.update(dict.fromkeys(names, folder))
        try:
            yield
        finally:
            for name, value in before.items():
                os.environ.pop(name, None)
                if value is not None:
                    os.environ[name] = value


# ---- contestants, each in a process of its own ------------------------------------------------------------


def _ours(workers: int) -> Iterator[tuple[Any, int]]:
    from dataflow import DataLoader, ShardedDataset

    dataset = ShardedDataset(f"hf://datasets/{NAME}", split="train", progress=False)
    yield None, 0
    with DataLoader(dataset, batch_size=BATCH, shuffle=False) as loader:
        for batch in loader:
            yield batch["n"].numpy(), sum(map(len, batch["text"]))


def _datasets(workers: int) -> Iterator[tuple[Any, int]]:
    import datasets
    from torch.utils.data import DataLoader

    datasets.disable_progress_bars()
    dataset = datasets.load_dataset(NAME, split="train", streaming=True).batch(BATCH)
    yield None, 0
    for batch in DataLoader(dataset, batch_size=None, num_workers=workers):
        yield batch["n"], sum(map(len, batch["text"]))


def _litdata(workers: int) -> Iterator[tuple[Any, int]]:
    import litdata
    from litdata.streaming.item_loader import ParquetLoader

    url = f"hf://datasets/{NAME}/data"
    dataset = litdata.StreamingDataset(url, item_loader=ParquetLoader(), shuffle=False)
    yield None, 0
    context = {"multiprocessing_context": "spawn"} if workers else {}  # Polars forbids fork
    loader = litdata.StreamingDataLoader(
        dataset, batch_size=BATCH, num_workers=workers, collate_fn=_columns, **context
    )
    for batch in loader:
        yield batch["n"], sum(map(len, batch["text"]))


def _columns(samples: list[dict[str, Any]]) -> dict[str, list[Any]]:
    return {name: [sample[name] for sample in samples] for name in samples[0]}


CONTESTANTS: dict[str, Callable[[int], Iterator[tuple[Any, int]]]] = {
    "dataflow": _ours,
    "datasets": _datasets,
    "litdata": _litdata,
}


def epoch(who: str, workers: int, most_batches: int | None) -> dict[str, Any]:
    """Open the dataset and read it, or its first batches."""
    import numpy as np
    import torch  # noqa: F401 - loading it is nobody's cost

    numbers, num_bytes, opened_s, first_s = [], 0, 0.0, 0.0
    began_s = time.perf_counter()
    for count, (rows, text_bytes) in enumerate(CONTESTANTS[who](workers)):
        if rows is None:
            opened_s = time.perf_counter() - began_s
            continue
        if not numbers:
            first_s = time.perf_counter() - began_s
        numbers.append(np.asarray(rows))
        num_bytes += text_bytes
        if most_batches is not None and count >= most_batches:
            break
    seconds = time.perf_counter() - began_s
    counted = np.concatenate(numbers)
    told = {"opened_s": round(opened_s, 2), "first_batch_s": round(first_s, 2)}
    if most_batches is not None:
        return told
    after_s = seconds - first_s
    return told | {
        "rows": len(counted),
        "each_once": bool((np.sort(counted) == np.arange(len(counted))).all()),
        "rows_per_s": round((len(counted) - len(numbers[0])) / after_s),
        "mb_per_s": round(num_bytes / after_s / 1e6, 1),
        "rows_per_s_from_the_loop_on": round(len(counted) / (seconds - opened_s)),
    }


def job(who: str, ranks: int) -> dict[str, Any]:
    """Ranks of one launcher: forked one after the other, as that is quicker than importing torch 64 times."""
    import torch  # noqa: F401

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511", "WORLD_SIZE": str(ranks)}
    failed = 0
    for rank in range(ranks):
        child = os.fork()
        if not child:
            try:
                os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks)}
                epoch(who, 0, 1)
                os._exit(0)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        failed += os.waitpid(child, 0)[1] != 0
    return {"failed": failed}


# ---- parts ------------------------------------------------------------------------------------------------


def start(repeats: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with serving(64, 10, 100) as hub:
        for who, ranks in (
            ("dataflow", 1),
            ("dataflow", 64),
            ("datasets", 1),
            ("datasets", 4),
            ("litdata", 1),
        ):
            with new_caches():
                told = in_own_process(job, who, ranks)
            assert not told["failed"], f"{told} of {who}"
            found[f"{who}, {ranks} ranks"] = hub.counts()
            print(f"{who:9} {ranks:3} ranks {found[f'{who}, {ranks} ranks']}", flush=True)
    return found


def first(repeats: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with serving(10_000, 10, 20) as hub:
        for who in ("dataflow", "datasets"):
            with new_caches():
                for when in ("first", "again"):
                    told = in_own_process(epoch, who, 0, 1) | {"requests": hub.counts()}
                    found[f"{who}, {when}"] = told
                    print(f"{who:9} {when:6} {told}", flush=True)
    return found


def _rows(
    hub: _Hub, repeats: int, who_to_run: dict[str, tuple[int, ...]], limit_s: float = LIMIT_S
) -> dict[str, Any]:
    runs: dict[str, list[dict[str, Any]]] = {}
    with contextlib.ExitStack() as caches:
        caches.enter_context(new_caches())
        for _ in range(repeats):
            for who, workers in who_to_run.items():
                for number in workers:
                    key = f"{who}, {number} workers"
                    try:
                        told = in_own_process(epoch, who, number, None, limit_s=limit_s)
                    except Exception as error:  # a peer that gives up is a result
                        told = {"failed": str(error), "rows_per_s": 0, "mb_per_s": 0}
                    told["requests"] = hub.counts()
                    runs.setdefault(key, []).append(told)
                    print(f"{key:22} {told}", flush=True)
    return {
        key: {
            "rows_per_s": statistics.median(one["rows_per_s"] for one in each),
            "mb_per_s": statistics.median(one["mb_per_s"] for one in each),
            "runs": each,
        }
        for key, each in runs.items()
    }


def rows(repeats: int) -> dict[str, Any]:
    return _rows_beside_peers(repeats, ROWS, ROW_BYTES)


def small_rows(repeats: int) -> dict[str, Any]:
    return _rows_beside_peers(repeats, 8 * ROWS, ROW_BYTES // 8)


def _rows_beside_peers(repeats: int, num_rows: int, row_bytes: int) -> dict[str, Any]:
    with serving(FILES, num_rows, row_bytes) as hub:
        found = _rows(hub, repeats, {"dataflow": (0,), **WORKERS})
    peers = {key: one["rows_per_s"] for key, one in found.items() if not key.startswith("dataflow")}
    best = max(peers, key=lambda key: peers[key])
    ratio = found["dataflow, 0 workers"]["rows_per_s"] / peers[best]
    print(f"{ratio:.1f} times {best} (bar: >= 2, {'held' if ratio >= 2 else 'MISSED'})")
    return found | {"ratio": round(ratio, 2), "best_peer": best}


def faults(repeats: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with serving(FILES, ROWS, ROW_BYTES) as hub:
        for command in ("no faults", "faults"):
            hub.ask(command)
            found[command] = _rows(hub, repeats, {"dataflow": (0,)})
        return found | {"peers": _rows(hub, 1, {"datasets": (8,)}, limit_s=100.0)}


PARTS = {"start": start, "first": first, "rows": rows, "small-rows": small_rows, "faults": faults}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", choices=list(PARTS), action="append")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args(arguments)
    found = {part: PARTS[part](asked.repeats) for part in asked.part or PARTS}
    if asked.json:
        save_figures(asked.json, latency_ms=1000 * LATENCY_S, **found)


if __name__ == "__main__":
    main()
