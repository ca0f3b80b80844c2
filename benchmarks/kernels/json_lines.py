"""How fast lines of JSON become columns, and what a training thread loses while they do.

    python -m benchmarks.kernels.json_lines --before ../other --json benchmarks/results/json-lines.json

Four kinds of lines, 16 MB of each: flat ones of five columns, chats, token ids (200 integers a line), and
embeddings (64 floats a line). For each, in MB a second of processor time: to index the file, and to decode
all columns of its blocks of 2 MB. And what another thread of the same process loses that counts in Python,
and so always wants the interpreter lock: its seconds lost while 100 MB are decoded beside it. A real training
thread is in torch most of the time and loses less.

Each kind is measured in a process of its own, of this checkout and the other one by turns; medians are shown.
"""

from __future__ import annotations

import io
import json
import math
import os
import random
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

REPOSITORY = Path(__file__).resolve().parents[2]
MEGABYTES = 16
BLOCK_BYTES = 2 << 20
COUNTED_S = 1.5
LIMIT_S = 300.0


def flat(rng: random.Random) -> dict[str, Any]:
    """Five columns."""
    number = rng.randrange(10**9)
    text = f"some words here, {number} and more of them"
    return {"id": number, "score": rng.random(), "label": number % 10, "text": text, "ok": number % 2 == 0}


def chat(rng: random.Random) -> dict[str, Any]:
    """Four turns."""
    turns = [
        {"role": ("user", "assistant")[k % 2], "content": "word " * rng.randrange(10, 60)} for k in range(4)
    ]
    return {"id": rng.randrange(10**9), "messages": turns}


def tokens(rng: random.Random) -> dict[str, Any]:
    """Ids of a vocabulary."""
    return {"input_ids": [rng.randrange(50_000) for _ in range(200)], "label": rng.randrange(10)}


def embedding(rng: random.Random) -> dict[str, Any]:
    """A vector."""
    return {"vector": [rng.gauss(0, 1) for _ in range(64)], "label": rng.randrange(10)}


KINDS: dict[str, Callable[[random.Random], dict[str, Any]]] = {
    one.__name__: one for one in (flat, chat, tokens, embedding)
}


def content_of(kind: str) -> bytes:
    """The lines, always the same ones."""
    rng, lines, size = random.Random(0), list[str](), 0
    while size < MEGABYTES * 1_000_000:
        lines.append(json.dumps(KINDS[kind](rng)) + "\n")
        size += len(lines[-1])
    return "".join(lines).encode()


def measured(kind: str) -> dict[str, float]:
    """One process's figures."""
    from sharding.blocks import Block, Shard
    from sharding.formats.arrow.jsonl import JsonlFormat

    content, codec = content_of(kind), JsonlFormat()
    shard = Shard("a.jsonl", len(content), "")
    scan = codec.scan(io.BytesIO(content), shard, block_bytes=BLOCK_BYTES)
    bounds = np.cumsum(scan.num_samples) - scan.num_samples
    blocks = [
        Block(
            shard,
            int(scan.offset[i]),
            int(scan.length[i]),
            int(scan.nbytes[i]),
            first_sample=int(bounds[i]),
            first_in_shard=int(bounds[i]),
            num_samples=int(scan.num_samples[i]),
            number=i,
            number_in_shard=i,
            footer=scan.footer,
        )
        for i in range(len(scan.offset))
    ]

    def decode() -> Iterator[int]:
        for block in blocks:
            codec.decode(block, memoryview(content)[block.offset : block.offset + block.length], None)
            yield block.length

    list(decode())
    began = time.process_time()
    codec.scan(io.BytesIO(content), shard, block_bytes=BLOCK_BYTES)
    indexed = time.process_time()
    list(decode())
    decoded = time.process_time()
    megabytes = len(content) / 1e6
    return {
        "index_mb_per_s": megabytes / (indexed - began),
        "decode_mb_per_s": megabytes / (decoded - indexed),
        "lost_s_per_100_mb": lost_s(decode),
    }


def lost_s(decode: Callable[[], Iterator[int]]) -> float:
    """Seconds that a thread which only counts loses while 100 MB are decoded by another one."""
    alone = counted(COUNTED_S)
    stop, done = threading.Event(), [0]

    def decode_on() -> None:
        while True:
            for num_bytes in decode():
                done[0] += num_bytes
                if stop.is_set():
                    return

    thread = threading.Thread(target=decode_on)
    thread.start()
    before = done[0]
    beside = counted(COUNTED_S)
    num_bytes = done[0] - before
    stop.set()
    thread.join()
    lost = COUNTED_S * max(0.0, 1 - beside / alone)
    return lost / (num_bytes / 1e8) if num_bytes else math.inf


def counted(seconds: float) -> int:
    """How far one counts in so many seconds."""
    end, count = time.perf_counter() + seconds, 0
    while time.perf_counter() < end:
        for _ in range(1000):
            count += 1
    return count


def in_process(tree: Path, kind: str) -> dict[str, float]:
    """The figures of a checkout: a process runs this file with the packages of that one."""
    done = subprocess.run(
        [sys.executable, __file__, "--child", kind],
        env={**os.environ, "PYTHONPATH": str(tree)},
        capture_output=True,
        check=True,
        timeout=LIMIT_S,
        cwd=tree,
    )
    figures: dict[str, float] = json.loads(done.stdout)
    return figures


def main() -> None:
    """Measure, print a table, and write the figures."""
    import click
    from rich.console import Console
    from rich.table import Table

    from benchmarks.report import save_figures

    @click.command(help=__doc__, context_settings={"max_content_width": 120})
    @click.option("--before", type=click.Path(exists=True, path_type=Path), help="Another checkout.")
    @click.option("--repeats", default=5, show_default=True)
    @click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write all figures.")
    def command(before: Path | None, repeats: int, json_path: Path | None) -> None:
        trees = {"now": REPOSITORY, **({"before": before.resolve()} if before else {})}
        runs = [
            {"kind": kind, "checkout": name, **in_process(tree, kind)}
            for _ in range(repeats)
            for kind in KINDS
            for name, tree in trees.items()
        ]
        table = Table("lines", "checkout", "index MB/s", "decode MB/s", "another thread loses s per 100 MB")
        medians = []
        for kind in KINDS:
            for name in trees:
                own = [run for run in runs if (run["kind"], run["checkout"]) == (kind, name)]
                figures = ("index_mb_per_s", "decode_mb_per_s", "lost_s_per_100_mb")
                median = {figure: statistics.median(run[figure] for run in own) for figure in figures}
                medians.append({"kind": kind, "checkout": name, **median})
                table.add_row(kind, name, *(f"{median[figure]:.3g}" for figure in figures))
        Console().print(table)
        if json_path:
            save_figures(json_path, medians=medians, runs=runs)

    command()


if __name__ == "__main__":
    if "--child" in sys.argv:
        print(json.dumps(measured(sys.argv[-1])))
    else:
        main()
