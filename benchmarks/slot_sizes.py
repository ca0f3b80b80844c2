"""How much it costs to write batches into more memory than the caches hold.

    python -m benchmarks.slot_sizes --json benchmarks/results/slot-sizes.json

One thread gathers rows of 2,049 uint16 tokens from memory and widens them to int64, sixteen at a time, as
W2 does, into slots that are used in turn. Nothing else runs: what differs is only how many bytes are written
before the first slot is written again.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from benchmarks.report import save_figures

TOKENS = 2049
BATCH = 16
CASES = ((16, 1), (16, 8), (64, 4), (64, 16), (512, 1), (512, 4), (512, 16))
"""Rows of a slot, number of slots."""
_ROWS = 100_000


def rows_per_s(stored: torch.Tensor, slot_rows: int, slots: int, seconds: float) -> float:
    """Rows a second of this thread's processor time."""
    outs = [np.zeros((slot_rows, TOKENS), np.int64) for _ in range(slots)]
    scratch = np.empty((BATCH, TOKENS), np.uint16)
    raw = torch.from_numpy(scratch.view(np.int16))
    order = torch.from_numpy(np.random.default_rng(0).permutation(len(stored)))
    done = at = 0
    began = time.thread_time()
    while (took := time.thread_time() - began) < seconds:
        for out in outs:
            for start in range(0, slot_rows, BATCH):
                at = at if at + BATCH <= len(stored) else 0
                torch.index_select(stored, 0, order[at : at + BATCH], out=raw)
                np.copyto(out[start : start + BATCH], scratch)
                at += BATCH
                done += BATCH
    return done / took


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=0.4, help="of processor time, for each case")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args(arguments)
    torch.set_num_threads(1)
    tokens = np.random.default_rng(1).integers(0, 2**15, (_ROWS, TOKENS), np.int16)
    stored = torch.from_numpy(tokens)
    runs: dict[tuple[int, int], list[float]] = {case: [] for case in CASES}
    for _ in range(asked.repeats):
        for case, found in runs.items():
            found.append(rows_per_s(stored, *case, asked.seconds))
    rows = [
        {
            "slot_mib": round(slot * TOKENS * 8 / 2**20, 2),
            "slots": slots,
            "written_mib": round(slot * slots * TOKENS * 8 / 2**20, 1),
            "rows_per_s": round(statistics.median(found)),
        }
        for (slot, slots), found in runs.items()
    ]
    for row in rows:
        print(row)
    if asked.json:
        save_figures(asked.json, rows=rows)


if __name__ == "__main__":
    main()
