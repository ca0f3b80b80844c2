"""Does a loader stay as it is for a long time over a store that misbehaves: memory, descriptors, samples.

    python -m benchmarks.remote.soak --minutes 20 --json benchmarks/results/soak.json

The store is slowstore.py with all its faults (those of `faults`), the data 256 MiB of
tokens, read again and again in a new order. The consumer checks every value and then rests until 20 MB/s are
used up, as if an accelerator made a step. Once a second resident memory,
descriptors and threads of this process are noted. After two minutes of warming up, a line is fitted to the
means of half minutes; memory grows if the 95 % confidence interval of its slope lies above zero, and
descriptors likewise.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.remote.faults import FAULTS, STORE
from benchmarks.remote.line_fit import means_of_bins, slope
from benchmarks.remote.slow_server import LENGTH, assert_all_once, checked, make_shards, serving
from benchmarks.report import save_figures

WARM_UP_S = 120.0
BIN_S = 30.0
MIB = 1 << 20


@dataclass
class Notes:
    """What was measured, one entry a second."""

    seconds: list[float] = field(default_factory=list)
    rss_bytes: list[int] = field(default_factory=list)
    descriptors: list[int] = field(default_factory=list)
    threads: list[int] = field(default_factory=list)

    def take(self, process: psutil.Process, now_s: float) -> None:
        with process.oneshot():
            self.seconds.append(round(now_s, 1))
            self.rss_bytes.append(process.memory_info().rss)
            self.descriptors.append(process.num_fds())
            self.threads.append(process.num_threads())


def judged(notes: Notes, *, warm_up_s: float = WARM_UP_S, bin_s: float = BIN_S) -> dict[str, Any]:
    """The slopes after warming up, and whether anything grows."""
    kept = np.array(notes.seconds) >= warm_up_s
    found: dict[str, Any] = {"bins": 0}
    for name, values, unit in (("rss", notes.rss_bytes, MIB), ("descriptors", notes.descriptors, 1)):
        measured = np.array(values)[kept] / unit
        x, y = means_of_bins(np.array(notes.seconds)[kept] / 3600, measured, bin_s / 3600)
        fit = slope(x, y)
        found["bins"] = len(x)
        found[name] = {
            "per_hour": round(fit.value, 2),
            "low_95": round(fit.low, 2),
            "high_95": round(fit.high, 2),
            "least": round(float(measured.min()), 1),
            "most": round(float(measured.max()), 1),
            "grows": fit.low > 0,
        }
    return found


class Epochs:
    """Whether every sample of every epoch came once, with its values."""

    def __init__(self, num_shards: int) -> None:
        self._num_shards = num_shards
        self._numbers: list[np.ndarray[Any, Any]] = []
        self.whole = self.samples = 0

    def check(self, tokens: np.ndarray[Any, Any]) -> None:
        self._numbers.append(checked(tokens))
        self.samples += len(tokens)

    def ended(self) -> None:
        assert_all_once(self._numbers, self._num_shards)
        self._numbers.clear()
        self.whole += 1


def soak(url: str, *, num_shards: int, minutes: float, bytes_per_s: float) -> dict[str, Any]:
    """Train for that long; every sample checked."""
    from dataflow import DataLoader, ShardedDataset

    notes, process, epochs = Notes(), psutil.Process(), Epochs(num_shards)
    cpu, began, used = time.process_time(), time.perf_counter(), 0
    over, accelerator = False, threading.Event()  # nobody sets it
    with DataLoader(ShardedDataset(f"{url}/x.catalog"), 64, True, memory_limit="256MB") as loader:
        while not over:
            for batch in loader:
                epochs.check(batch["tokens"].numpy())
                used += 4 * LENGTH * len(batch["tokens"])
                now = time.perf_counter() - began
                if not notes.seconds or now >= notes.seconds[-1] + 1:
                    notes.take(process, now)
                over = now >= 60 * minutes
                if over:
                    break
                accelerator.wait(max(0.0, used / bytes_per_s - now))  # a step
            else:
                epochs.ended()
                print(f"{now:6.0f} s, {epochs.whole} epochs, {notes.rss_bytes[-1] / MIB:.0f} MiB", flush=True)
        seconds = time.perf_counter() - began
        stats = loader.stats()
    return {
        "seconds": round(seconds, 1),
        "cpu_s": round(time.process_time() - cpu, 1),
        "epochs": epochs.whole,
        "samples": epochs.samples,
        "mb_per_s": round(used / seconds / 1e6, 2),
        "stall_share": round(stats.stall_share, 4),
        "faults": asdict(stats.faults),
        "depth": f"{stats.depth}: {stats.depth_reason}",
        "in_flight": f"{stats.in_flight_limit}: {stats.in_flight_reason}",
        "notes": asdict(notes),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--mb-per-s", type=float, default=20.0, help="what the consumer uses")
    parser.add_argument("--shards", type=int, default=8)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as name:
        make_shards(Path(name), asked.shards)
        with serving(Path(name), STORE | FAULTS) as server:
            told = soak(
                server.url,
                num_shards=asked.shards,
                minutes=asked.minutes,
                bytes_per_s=1e6 * asked.mb_per_s,
            )
    notes = told.pop("notes")
    short = min(1.0, asked.minutes / 20)
    told["verdict"] = judged(Notes(**notes), warm_up_s=short * WARM_UP_S, bin_s=short * BIN_S)
    print(json.dumps(told, indent=1))
    if asked.json:
        save_figures(asked.json, store=STORE | FAULTS, shards=asked.shards, **told, every_second=notes)
    if any(told["verdict"][name]["grows"] for name in ("rss", "descriptors")):
        sys.exit("memory or descriptors grow")


if __name__ == "__main__":
    main()
