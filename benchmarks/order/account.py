"""The cost of the account of what was handed out, on W4, and how long it takes to verify one.

    python -m benchmarks.order.account --json benchmarks/results/account.json

Records of 3,072 bytes in plain tars, 256 a batch, shuffled, as the loader delivers them by itself. In turns,
each time in a fresh process, epochs are run as they are and with the sums left out; told are samples a
second, and the processor time of a sample. Sums are also timed alone: the processor seconds that threads were
in them, of all of the process. The bar is 1 %. Then the account of the run is verified.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.harness import run_child
from benchmarks.report import save_figures

BATCH, REPEATS, EPOCHS, SHARDS, BAR = 256, 5, 3, 100, 0.01
WAYS = ("with sums", "without")


def written(folder: Path, samples: int) -> None:
    """Tars of records and classes."""
    import numpy as np

    from benchmarks.tars import write_tar

    numbers = np.array_split(np.arange(samples), SHARDS)
    for shard, own in enumerate(numbers):
        rng = np.random.default_rng(shard)
        records = ((f"{i:08d}", {"bin": rng.bytes(3072), "cls": b"%d" % (i % 1000)}) for i in own)
        write_tar(folder / f"{shard:03d}.tar", records)


def measured(folder: str, way: str) -> dict[str, Any]:
    """Some epochs, in this process."""
    from dataflow import DataLoader, ShardedDataset, verify
    from dataflow.explain.account import BatchSums

    spent, lock, note = [0.0], threading.Lock(), BatchSums.note_rows

    def timed(*arguments: Any) -> None:
        began = time.thread_time()
        if way == WAYS[0]:
            note(*arguments)
        with lock:
            spent[0] += time.thread_time() - began

    BatchSums.note_rows = timed  # type: ignore[method-assign]
    dataset = ShardedDataset(f"{folder}/*.tar", decode={"bin": None, "cls": "int"})
    with DataLoader(dataset, batch_size=BATCH, shuffle=True) as loader:
        for _ in loader:
            pass
        spent[0], cpu, began = 0.0, time.process_time(), time.perf_counter()
        for _ in range(EPOCHS):
            for _ in loader:
                pass
        cpu, took = time.process_time() - cpu, time.perf_counter() - began
        num = EPOCHS * len(dataset)
        figures = {"samples_per_s": num / took, "cpu_us": cpu / num * 1e6, "sums_share": spent[0] / cpu}
        if way == WAYS[0]:
            began = time.perf_counter()
            report = verify(loader.state_dict(), dataset, [loader.account()])
            assert report.is_whole, str(report)
            figures["verified_per_s"] = report.rows / (time.perf_counter() - began)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--samples", type=int, default=200_000)
    parser.add_argument("--repeats", type=int, default=REPEATS)
    arguments = parser.parse_args()
    runs: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    with TemporaryDirectory() as folder:
        written(Path(folder), arguments.samples)
        for _ in range(arguments.repeats):
            for way in WAYS:
                events, _ = run_child(measured, folder, way, limit_s=300)
                runs[way].append(events["result"])
                print(way, events["result"], flush=True)
    medians = {
        way: {name: statistics.median(run[name] for run in own) for name in own[0]}
        for way, own in runs.items()
    }
    print(medians)
    if arguments.json:
        save_figures(
            arguments.json,
            command="python -m benchmarks.order.account --json benchmarks/results/account.json",
            bar=BAR,
            medians=medians,
            runs=runs,
        )


if __name__ == "__main__":
    main()
