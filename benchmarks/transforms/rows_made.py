"""`python -m benchmarks.transforms.rows_made`: samples with pixels that are made before their row is due.

240 chats with 1 to 4 pictures each, of which a transform makes float32 patches: 9 GB in all. Rows hold 8,192
tokens, the loader 1 GiB at most, and two builders make rows: threads, or processes. `measure`: the transform
tells lengths, on a first run. `made`: it does not, so packing windows are made to be planned, as is shown
beside. Bars: samples made before the first batch, beside those of its row and of two rows a builder, with
`depth=1`; the peak of anonymous and shared memory of all processes beyond the start, beside the limit and a
row a builder; after a stop in the middle, samples that were delivered before and are made again, beside those
of a row a builder.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.console import Console

from benchmarks import REPOSITORY
from benchmarks.harness import run_child
from benchmarks.memory import tree_memory
from benchmarks.options import data_option, json_option
from benchmarks.report import ReportSummary, machine, save_figures, versions
from benchmarks.runner import Tell

CHATS, ROW, LIMIT, BUILDERS = 240, 8_192, 1 << 30, 2
PATCH, MERGED, VALUES = 14, 4, 1_176
ROW_MB = ROW * MERGED * VALUES * 4 / 1e6
SETUPS = [(told, workers) for told in ("measure", "made") for workers in ("thread", "process")]
LIMIT_S = 400.0


def written(folder: Path) -> Path:
    """A file of chats: their numbers, tokens of text, and the sizes of their pictures."""
    folder.mkdir(parents=True, exist_ok=True)
    draw, path = random.Random(0), folder / "chats.jsonl"
    with path.open("w") as file:
        for number in range(CHATS):
            sides = [draw.randint(300, 900) // PATCH // 2 * 2 for _ in range(2 * draw.randint(1, 4))]
            file.write(json.dumps({"id": number, "text": draw.randint(20, 150), "sides": sides}) + "\n")
    return path


class Made:
    """Makes the patches of a chat, and notes its number in a file."""

    fingerprint = "rows-made"
    releases_gil = False

    def __init__(self, notes: str) -> None:
        self.notes = notes

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        with open(self.notes, "ab", buffering=0) as file:
            file.write(int(sample["id"]).to_bytes(4, "little"))
        patches = patches_of(sample)
        pixels = np.random.default_rng(sample["id"]).random((patches, VALUES), np.float32)
        return {"ids": np.ones(length_of(sample), np.int64), "pixels": pixels, "id": sample["id"]}

    def made(self) -> list[int]:
        """The numbers that were noted so far."""
        data = Path(self.notes).read_bytes() if os.path.exists(self.notes) else b""
        numbers: list[int] = np.frombuffer(data, "<u4").tolist()
        return numbers


class Measured(Made):
    """The same, which tells lengths before."""

    def measure(self, sample: dict[str, Any]) -> dict[str, int]:
        return {"ids": length_of(sample), "pixels": patches_of(sample)}


def patches_of(sample: dict[str, Any]) -> int:
    sides = sample["sides"]
    return sum(int(a) * int(b) for a, b in zip(sides[::2], sides[1::2], strict=True))


def length_of(sample: dict[str, Any]) -> int:
    return int(sample["text"]) + patches_of(sample) // MERGED


def measured(job: dict[str, Any], tell: Tell) -> None:
    """Tell what a loop over the chats made before its first batch, and the state in its middle."""
    from dataflow import DataLoader, Packed, ShardedDataset

    transform = (Measured if job["told"] == "measure" else Made)(job["notes"])
    dataset = ShardedDataset(job["path"], transform=transform)
    batching = Packed(ROW, "ids", whole=["pixels"], overlong="error")
    loader = DataLoader(
        dataset,
        1,
        shuffle=True,
        batching=batching,
        num_workers=BUILDERS,
        workers=job["workers"],
        memory_limit=LIMIT,
        depth=job["depth"],
    )
    if job["state"]:
        loader.load_state_dict(job["state"])
    before, began_s, rows, cut = (
        tree_memory(os.getpid()).held_mb,
        time.perf_counter(),
        list[list[int]](),
        None,
    )
    tell("loading", before_mb=before)
    for batch in loader:
        rows.append(batch["id"].tolist())
        if len(rows) == 1:
            tell("loading", first_made=len(transform.made()), first_s=time.perf_counter() - began_s)
        if len(rows) == job["cut"]:
            cut = loader.state_dict()
            if job["stops"]:
                break
        del batch
    all_s = time.perf_counter() - began_s
    tell(
        "done",
        rows=rows,
        made=transform.made(),
        all_s=all_s,
        cut=cut,
        filled=loader.stats().lengths.efficiency,
    )


def bars_of(told: str, workers: str, folder: Path) -> tuple[list[ReportSummary], dict[str, Any]]:
    """What one setup reaches, and its figures."""
    job = {
        "told": told,
        "workers": workers,
        "path": str(written(folder)),
        "state": None,
        "cut": 0,
        "stops": False,
    }
    name, figures = f"{told}, {workers}", dict[str, Any](told=told, workers=workers)

    def run(number: int, **changes: Any) -> tuple[dict[str, Any], float]:
        notes = folder / f"{told}-{workers}-{number}.notes"
        notes.unlink(missing_ok=True)
        cache = folder / f"{told}-{workers}-{number}.cache"
        environment = {"XDG_CACHE_HOME": str(cache) + str(time.time_ns())}
        events, peak = run_child(
            measured, {**job, "notes": str(notes), **changes}, limit_s=LIMIT_S, environment=environment
        )
        if "rows" not in events:
            raise RuntimeError(f"{name}: {events}")
        return events, peak.held_mb - events["before_mb"]

    bars = []
    for depth in (1, None) if told == "measure" else (1,):
        events, peak_mb = run(depth or 0, depth=depth)
        own = {name: round(events[name], 2) for name in ("first_s", "all_s", "filled")}
        own |= {"first_made": events["first_made"], "made": len(events["made"]), "peak_mb": round(peak_mb)}
        figures[f"depth {depth or 'default'}"] = own
        if depth:
            rows = sum(map(len, events["rows"][: 1 + 2 * BUILDERS]))
            bars.append(
                ReportSummary(
                    name, "samples before the first batch", events["first_made"], rows, at_most=True
                )
            )
        bars.append(
            ReportSummary(
                name, f"MB at the peak, depth={depth}", peak_mb, LIMIT / 1e6 + BUILDERS * ROW_MB, at_most=True
            )
        )
    if told != "measure":
        return bars, figures
    half = len(events["rows"]) // 2
    first, _ = run(2, depth=1, cut=half, stops=True)
    rest, _ = run(3, depth=1, state=first["cut"])
    assert first["rows"] + rest["rows"] == events["rows"]
    delivered = {number for row in first["rows"] for number in row}
    again = sum(number in delivered for number in rest["made"])
    figures["resumed"] = {"again": again, "ahead": len(first["made"]) - len(delivered)}
    row = max(map(len, events["rows"]))
    bars.append(ReportSummary(name, "samples made again after a stop", again, BUILDERS * row, at_most=True))
    return bars, figures


@click.command()
@data_option
@json_option
def main(root: Path | None, output: Path | None) -> None:
    """Count the samples that are made early, and measure the memory that they take."""
    console = Console(width=None if sys.stdout.isatty() else 110)
    console.print(machine(), versions())
    found, figures = list[ReportSummary](), list[dict[str, Any]]()
    for told, workers in SETUPS:
        bars, own = bars_of(told, workers, (root or REPOSITORY / ".bench-data").resolve() / "rows-made")
        console.print(own)
        for verdict in bars:
            console.print(verdict.line)
        found, figures = found + bars, [*figures, own]
    if output:
        save_figures(output, figures=figures, verdicts=[vars(bar) | {"verdict": bar.says} for bar in found])


if __name__ == "__main__":
    main()
