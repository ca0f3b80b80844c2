"""Forks workers beside threads that are busy, under torch's loader and ours, and tells how many hang.

    python tests/fuzz/forks.py --forks 200                        every kind under both, a table
    python tests/fuzz/forks.py ours --forks 2000 --only ours      beside loaders of ours at full load
    python tests/fuzz/forks.py openmp s3fs --json forks.json

Each kind runs in a process of its own, under each library: threads do something over and over, while loops
over a small dataset begin, with two workers each that do the same once an item. Where no batch comes for 10 s
the loop hangs; `--verbose` shows where its workers stand. Exit status 1 if
loops of ours hang where none of torch's does.

The kinds "after ..." are hangs that were reported to torch: its numbers 1355 (threads of OpenCV), 45198 and
75147 (a parallel region of OpenMP before the fork), 369 of s3fs (the event loop of fsspec), 26085 of
ultralytics (a thread that pins memory holds a lock of the C library).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(TESTS / "kits"), str(TESTS.parent)]
_HANGS_S = 10
_ENDS_IN_S = 60
"""After the time for a kind, a process that has not ended hangs itself: what some libraries do at a fork."""
_THREADS = 2
rounds: list[int] = []
"""What busy threads have done, up to 1,000."""
_open = contextlib.ExitStack()
"""Servers."""
Item = Callable[[int], Any]


class Items:
    """A map-style dataset."""

    def __init__(self, item: Item) -> None:
        self.item = item

    def __len__(self) -> int:
        return 4

    def __getitem__(self, i: int) -> Any:
        return self.item(i)


def busy(work: Callable[[], Any], threads: int = _THREADS) -> None:
    """Have threads do this over and over."""

    def run() -> None:
        while True:
            work()
            rounds.append(1)
            del rounds[1000:]

    work()

    for _ in range(threads):
        threading.Thread(target=run, daemon=True).start()


# ---- kinds: each makes its threads busy, and gives what a worker does for an item --------------------------


def nothing() -> Item:
    """No thread."""
    return int


def pyarrow() -> Item:
    """Groups of a table, in pyarrow's pool of threads."""
    import numpy as np
    import pyarrow as pa

    def sums(table: Any) -> int:
        return int(table.group_by("b").aggregate([("a", "sum")]).num_rows)

    def table(rows: int) -> Any:
        return pa.table({"a": np.arange(rows), "b": np.arange(rows) % 7})

    large, small = table(200_000), table(2000)
    busy(lambda: sums(large))
    return lambda i: sums(small)


def opencv() -> Item:
    """A filter, in OpenCV's pool of threads."""
    import cv2
    import numpy as np

    image = np.zeros((512, 512, 3), np.uint8)
    busy(lambda: cv2.resize(cv2.GaussianBlur(image, (5, 5), 1), (300, 300)))
    return lambda i: int(cv2.resize(image, (100, 100)).sum())


def after_opencv() -> Item:
    """torch 1355: OpenCV has worked with threads before the fork, and does in the worker."""
    import cv2
    import numpy as np

    cv2.setNumThreads(4)
    image = np.random.default_rng(0).integers(0, 255, (1024, 1024, 3), np.uint8)
    cv2.GaussianBlur(image, (21, 21), 3)
    return lambda i: int(cv2.cvtColor(cv2.GaussianBlur(image, (21, 21), 3), cv2.COLOR_BGR2HSV).sum())


def openblas() -> Item:
    """Products of numpy's matrices."""
    import numpy as np

    a = np.random.default_rng(0).random((300, 300))
    busy(lambda: a @ a)
    return lambda i: float((a @ a)[0, 0])


def openmp() -> Item:
    """Products of torch's matrices."""
    import torch

    a = torch.rand(300, 300)
    busy(lambda: a @ a)
    return lambda i: float((a @ a)[0, 0])


def after_openmp() -> Item:
    """torch 45198 and 75147: a parallel region before the fork, and one with several threads after it."""
    import torch

    torch.set_num_threads(4)
    a = torch.rand(1 << 20)
    a.exp().sum()

    def item(i: int) -> float:
        torch.set_num_threads(2)
        return float(a.exp().sum())

    return item


def tokenizers() -> Item:
    """Batches of texts, in the pool of threads of tokenizers."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.train_from_iterator(["hello world foo bar"] * 50, trainers.BpeTrainer(vocab_size=100))
    busy(lambda: tokenizer.encode_batch(["hello world foo"] * 200))
    return lambda i: len(tokenizer.encode_batch(["hello world"] * 8)[0].ids)


def aiohttp() -> Item:
    """Requests over HTTP, in the event loop of fsspec."""
    import fsspec
    from http_kit import RangeServer, serving

    folder = Path(tempfile.mkdtemp())
    (folder / "x").write_bytes(bytes(1000))
    server = _open.enter_context(serving(RangeServer(folder)))
    files, url = fsspec.filesystem("http"), f"{server.url}/x"
    busy(lambda: files.cat(url))
    return int


def _s3() -> Callable[[], Any]:
    import s3fs
    from http_kit import s3_server

    server = _open.enter_context(s3_server())
    server.objects["bucket/x"] = bytes(1000)
    options = server.options
    return lambda: s3fs.S3FileSystem(**options, skip_instance_cache=True)


def s3fs() -> Item:
    """Reads of s3fs."""
    files = _s3()()
    busy(lambda: files.cat_file("bucket/x"))
    return int


def after_s3fs() -> Item:
    """s3fs 369: files were read before the fork, and are by a file system of the worker's own."""
    made = _s3()
    made().cat_file("bucket/x")
    return lambda i: len(made().cat_file("bucket/x"))


def gloo() -> Item:
    """Sums over a process group."""
    import torch
    import torch.distributed as dist

    store = f"file://{tempfile.mkdtemp()}/store"
    dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    x = torch.zeros(1000)
    busy(lambda: dist.all_reduce(x), 1)
    return int


def lightning() -> Item:
    """Loggers and bars as a Trainer has them: a thread that writes events, one that draws."""
    import torch
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.loggers import CSVLogger

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(8, 1)

        def training_step(self, batch: Any, _: int) -> Any:
            loss = self.layer(batch).sum()
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.01)

    folder = tempfile.mkdtemp()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    def fit() -> None:
        trainer = Trainer(
            max_epochs=1,
            logger=CSVLogger(folder),
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
            accelerator="cpu",
            log_every_n_steps=1,
        )
        trainer.fit(Module(), torch.utils.data.DataLoader(torch.rand(80, 8), 4))  # type: ignore[arg-type]

    busy(fit, 1)
    return int


def libc() -> Item:
    """ultralytics 26085: threads inside of the C library: memory, time zones, names, streams."""
    import ctypes
    import socket

    library = ctypes.CDLL(None)

    def work() -> None:
        time.localtime()
        time.strftime("%c")
        with contextlib.suppress(OSError):
            socket.getaddrinfo("localhost", 80)
        blocks = [bytes(100_000 + 1000 * i) for i in range(50)]
        del blocks
        library.malloc_trim(0)
        library.fflush(None)

    busy(work)

    def item(i: int) -> str:
        library.fflush(None)
        socket.getaddrinfo("localhost", 80)
        return time.strftime("%c")

    return item


def pinned() -> Item:
    """ultralytics 26085 as it was: a thread copies batches as one that pins memory does, and prints."""
    import cv2
    import numpy as np
    import torch

    encoded = cv2.imencode(".jpg", np.zeros((64, 64, 3), np.uint8))[1]
    sink = os.open(os.devnull, os.O_WRONLY)

    def work() -> None:
        batch = torch.empty(4, 3, 64, 64).clone()
        os.write(sink, f"{batch.shape}".encode())
        cv2.imdecode(encoded, cv2.IMREAD_COLOR)

    busy(work)
    return lambda i: int(cv2.imdecode(encoded, cv2.IMREAD_COLOR).sum())


def logs() -> Item:
    """Threads that log and print."""
    log = logging.getLogger("forks")
    log.addHandler(logging.StreamHandler(open(os.devnull, "w")))  # noqa: SIM115
    busy(lambda: log.warning("a line"))

    def item(i: int) -> int:
        log.warning("a line")
        return i

    return item


def ours() -> Item:
    """Everything of ours at full load: threads, processes, a store, a cache, copies, a drop-in."""
    import torch
    from datasets_kit import make_ints_tar
    from http_kit import slowstore

    from dataflow import Cache, DataLoader, ShardedDataset

    folder = Path(tempfile.mkdtemp())
    made = make_ints_tar(folder, 2000)
    url = _open.enter_context(slowstore(folder, "--latency-ms", "2"))
    names, cache = [f"{url}/{path.name}" for path in made.shards], Cache(folder / "cache", "1MB")
    makers: list[Callable[[], Any]] = [
        lambda: DataLoader(made.open(), 32, shuffle=True, num_workers=4, workers="thread"),
        lambda: DataLoader(made.open(transform=dict), 32, shuffle=True, num_workers=2, workers="process"),
        lambda: DataLoader(ShardedDataset(names), 32, shuffle=True),
        lambda: DataLoader(ShardedDataset(names, cache=cache), 32, shuffle=True, pin_memory=True),
        lambda: DataLoader(Items(torch.zeros(1000).add), 2, num_workers=2, workers="thread"),
        lambda: DataLoader(Items(torch.zeros(1000).add), 2, num_workers=1, persistent_workers=True),
    ]
    started = threading.Barrier(len(makers) + 1)

    def run(make: Callable[[], Any]) -> None:
        first = True
        while True:
            with make() as loader:
                for _ in range(20):
                    for batch in loader:
                        del batch
                        if first:
                            first = False
                            started.wait()

    for make in makers:
        threading.Thread(target=run, args=(make,), daemon=True).start()
    started.wait(60)
    return lambda i: torch.zeros(1000) + i


KINDS: dict[str, Callable[[], Item]] = {
    "nothing": nothing,
    "ours": ours,
    "pyarrow": pyarrow,
    "opencv": opencv,
    "openblas": openblas,
    "openmp": openmp,
    "tokenizers": tokenizers,
    "aiohttp": aiohttp,
    "s3fs": s3fs,
    "gloo": gloo,
    "lightning": lightning,
    "libc": libc,
    "pinned": pinned,
    "logs": logs,
    "after opencv": after_opencv,
    "after openmp": after_openmp,
    "after s3fs": after_s3fs,
}


_IDLE = "nothing", "ours", "after opencv", "after openmp", "after s3fs"
"""Kinds without `busy`."""

# ---- loops -------------------------------------------------------------------------------------------------


def loops(kind: str, library: str, forks: int, seconds: float) -> dict[str, Any]:
    """Begin loops beside a kind of threads; what became of them."""
    warnings.simplefilter("ignore")
    os.environ["DATAFLOW_LIVE"] = "0"
    item = KINDS[kind]()
    if library == "torch":
        from torch.utils.data import DataLoader
    else:
        from dataflow import DataLoader  # type: ignore[assignment]
    hung, slowest, done, ends = 0, 0.0, 0, time.monotonic() + seconds
    while done < forks and time.monotonic() < ends:
        done += 2
        began = time.monotonic()
        loader: Any = DataLoader(
            Items(item),  # type: ignore[arg-type]
            2,
            num_workers=2,
            timeout=_HANGS_S,
            collate_fn=list,
            multiprocessing_context="fork",
        )
        batches = iter(loader)
        try:
            for _ in batches:
                pass
        except RuntimeError as error:
            if "timed out" not in str(error):
                raise
            hung += 1
            print(error, file=sys.stderr)
        slowest = max(slowest, time.monotonic() - began)
        if done == 2:
            rounds.clear()
        with contextlib.suppress(Exception):
            batches._shutdown_workers()
    return {
        "kind": kind,
        "library": library,
        "forks": done,
        "hung": hung,
        "slowest_s": round(slowest, 2),
        "rounds": len(rounds),
    }


def main() -> int:
    """Fork, and print how many hang."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kinds", nargs="*", help=f"of: {', '.join(KINDS)} (default: all)")
    parser.add_argument("--forks", type=int, default=200, help="workers of each kind (default: 200)")
    parser.add_argument("--seconds", type=float, default=120, help="for each kind at most (default: 120)")
    parser.add_argument("--only", choices=["torch", "ours"], help="one library")
    parser.add_argument("--json", help="a file for the results")
    parser.add_argument("--verbose", action="store_true", help="show what loops that hang say")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if unknown := {*given.kinds} - {*KINDS}:
        parser.error(f"no kind: {', '.join(unknown)}")
    if given.here:
        print(json.dumps(loops(given.kinds[0], given.only, given.forks, given.seconds)), flush=True)
        _open.close()
        os._exit(0)  # the threads go on
    results = []
    print(f"{'kind':14} {'library':8} {'forks':>6} {'hung':>5} {'slowest':>9}")
    for kind in given.kinds or KINDS:
        for library in [given.only] if given.only else ["torch", "ours"]:
            options = [
                "--here",
                "--only",
                library,
                "--forks",
                f"{given.forks}",
                "--seconds",
                f"{given.seconds}",
            ]
            try:
                done = subprocess.run(
                    [sys.executable, __file__, kind, *options],
                    capture_output=True,
                    text=True,
                    check=False,
                    timeout=given.seconds + _ENDS_IN_S,
                )
                one = json.loads(done.stdout.splitlines()[-1])
            except subprocess.TimeoutExpired:
                one = {"kind": kind, "library": library, "hangs_itself": True, "hung": 0}
                print(f"{kind:14} {library:8} the process that forks hangs", flush=True)
                results.append(one)
                continue
            except (IndexError, ValueError):
                print(f"{kind:14} {library:8} failed: {(done.stderr.splitlines() or ['?'])[-1]}", flush=True)
                continue
            results.append(one)
            if kind not in _IDLE and not one["rounds"]:
                print(f"{kind:14} {library:8} its threads have ended: {done.stderr}", flush=True)
            print(
                f"{kind:14} {library:8} {one['forks']:6} {one['hung']:5} {one['slowest_s']:7.2f} s",
                flush=True,
            )
            if given.verbose:
                print(done.stderr)
    if given.json:
        Path(given.json).write_text(json.dumps(results, indent=1))
    hung = {(one["kind"], one["library"]): one["hung"] or "hangs_itself" in one for one in results}
    worse = [
        kind
        for kind, library in hung
        if library == "ours" and hung[kind, "ours"] and not hung.get((kind, "torch"))
    ]
    if worse:
        print(f"ours hangs and torch does not: {', '.join(worse)}")
    return int(bool(worse))


if __name__ == "__main__":
    sys.exit(main())
