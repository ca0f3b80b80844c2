"""How fast chunks are copied and windows mixed: by the compiled core, by torch's own gather, by numpy.

    python -m benchmarks.kernels.executors --json benchmarks/results/executors.json

One thread copies values that lie anywhere in 64 MiB of memory into one slot of 8 MiB, as chunks of W4, W2,
W1-raw and W3 do, turns 20 columns into rows, as staging of W3 does, mixes the samples of windows of eight
lanes, and draws sources of mixtures by tokens. Rows a second of processor time, the ways in turns, medians.
torch has no gather for values of different lengths and none that widens: there it is `index_select` over
values of one length, and numpy widens tiles that stay in the cache. numpy stacks columns, and mixes as
`sharding.order.permutations` defines it.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.report import save_figures
from prefetch.core.copy_table import PlanColumn
from prefetch.core.kernels import kernels
from sharding.order.permutations import SeededPermutations, seeded_permutations

CASES = {
    "W4 record": (3072, 64, ""),
    "W2 tokens": (4098, 64, "uint16"),
    "W1-raw image": (100_000, 64, ""),
    "W3 row": (80, 80, ""),
}
"""Bytes of a stored value, of what values begin at multiples of, and the dtype of what is widened."""
WINDOWS = {"W1-raw window": 80, "W4 window": 1_560, "W3 window": 96_000}
"""Samples of each lane."""
TURNS = {f"turns by tokens, {number} sources": number for number in (2, 5, 16)}
_LANES = 8
_DRAWS = 1 << 16
SLOT_BYTES = 8 << 20
_TILE_BYTES = 1 << 20


def by_torch(
    memory: NDArray[np.uint8], places: NDArray[np.int64], step: int, each: int, widen: str, out: NDArray[Any]
) -> Callable[[], object]:
    """The same copies by `index_select` over a view of all memory between the values."""
    view = torch.from_numpy(memory).as_strided(((len(memory) - each) // step + 1, each), (step, 1))
    index, rows = torch.from_numpy(places), len(places)
    if not widen:
        target = torch.from_numpy(out.reshape(rows, each))
        return lambda: torch.index_select(view, 0, index, out=target)
    tile = _TILE_BYTES // each
    scratch = np.empty((tile, each), np.uint8)

    def copy() -> None:
        for start in range(0, rows, tile):
            stop = min(rows, start + tile)
            part = scratch[: stop - start]
            torch.index_select(view, 0, index[start:stop], out=torch.from_numpy(part))
            np.copyto(out.reshape(rows, -1)[start:stop], part.view(widen))

    return copy


def interleaving(rows: int) -> dict[str, Callable[[], object]]:
    columns = [np.random.default_rng(i).random(rows, np.float32) for i in range(20)]
    out = np.zeros((rows, 20), np.float32)
    return {
        "compiled": lambda: kernels().interleave(columns, out),
        "numpy": lambda: np.stack(columns, axis=-1, out=out),
    }


def mixing(mix: SeededPermutations, samples: int) -> Callable[[], object]:
    sizes, out = np.full(_LANES, samples), np.zeros(_LANES * samples, np.int64)
    return lambda: mix(sizes, range(_LANES), out)


def drawing(num_sources: int) -> Callable[[], object]:
    """Draws of sources whose samples have 1 to 4,000 elements, in shares 1, 2, 3 ..."""
    take = kernels().token_draws
    lengths = np.random.default_rng(0).integers(1, 4000, num_sources * _DRAWS)
    shares, out = np.arange(1, num_sources + 1), np.zeros(_DRAWS, np.uint16)

    def run() -> int:
        first = np.arange(num_sources) * _DRAWS
        return take(shares, np.zeros(num_sources, np.int64), lengths, first, first + _DRAWS, out)

    return run


def ways() -> dict[str, tuple[int, dict[str, Callable[[], object]]]]:
    """Each case's rows, and what makes its copies."""
    rng = np.random.default_rng(0)
    memory = rng.integers(0, 256, 64 << 20, np.uint8)
    found: dict[str, tuple[int, dict[str, Callable[[], object]]]] = {}
    for name, (each, step, widen) in CASES.items():
        factor = 8 // np.dtype(widen).itemsize if widen else 1
        rows = SLOT_BYTES // (each * factor)
        places = rng.integers(0, (len(memory) - each) // step, rows)
        out = np.zeros(rows * each * factor, np.uint8).view("int64" if widen else "uint8")
        column = PlanColumn(
            name=name, base=memory.ctypes.data, step=step, index=places, each=each, out=out, widen=widen
        )
        found[name] = (
            rows,
            {
                "compiled": partial(kernels().run, rows, [column]),
                "torch": by_torch(memory, places, step, each, widen, out),
            },
        )
    rows = 1 << 16
    found["W3 columns"] = rows, interleaving(rows)
    for name, samples in WINDOWS.items():
        mixes: dict[str, SeededPermutations] = {
            "compiled": kernels().seeded_permutations,
            "numpy": seeded_permutations,
        }
        found[name] = _LANES * samples, {by: mixing(mix, samples) for by, mix in mixes.items()}
    for name, number in TURNS.items():
        found[name] = _DRAWS, {"compiled": drawing(number)}
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=15, help="of each, in turns (default: 15)")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args(arguments)
    torch.set_num_threads(1)
    rows = []
    for case, (count, made) in ways().items():
        took: dict[str, list[float]] = {way: [] for way in made}
        for _ in range(asked.repeats + 1):  # the first one is to warm up
            for way, copy in made.items():
                began = time.thread_time()
                copy()
                took[way].append(time.thread_time() - began)
        rows += [
            {"case": case, "by": way, "rows_per_s": round(count / statistics.median(all_s[1:]))}
            for way, all_s in took.items()
        ]
        print(*(row for row in rows if row["case"] == case), sep="\n")
    if asked.json:
        save_figures(asked.json, rows=rows)


if __name__ == "__main__":
    main()
