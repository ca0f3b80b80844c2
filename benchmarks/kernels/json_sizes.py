"""What the estimates of decoded nested columns are worth, beside a constant times the stored bytes.

    python -m benchmarks.kernels.json_sizes

A catalog says of each block how many bytes it takes at most when it is decoded, and windows are admitted by
that: too little breaks `memory_limit`, too much makes windows smaller. For each kind of column and each
format: bytes stored, and held when decoded (JSON text, starts and lengths); held over stored, which is what a
constant would have to be at least; the estimate over held, which must be 1 or more; and the same of the
constant that is right for all columns of the format.
"""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from sharding.blocks import Spans
from sharding.catalog.build import catalog_of, scan_shards
from sharding.formats import resolve_format

MESSAGE = pa.struct([("role", pa.string()), ("content", pa.string())])
LABEL = pa.dictionary(pa.int32(), pa.string())
FORMATS = ("jsonl", "arrow", "parquet")


def columns(rows: int) -> dict[str, pa.Array]:
    rng = np.random.default_rng(0)
    lengths = (rng.pareto(1.5, (rows, 2)) * 400).astype(int).clip(0, 20_000)
    chats = [
        [{"role": "user", "content": "wörd " * a}, {"role": "assistant", "content": "x" * b}]
        for a, b in lengths.tolist()
    ]
    system = [{"role": "system", "content": "You are a helper. " * 30}]
    return {
        "long texts": pa.array(chats, pa.list_(MESSAGE)),
        "short texts": pa.array([["train", "chat"][: i % 3] for i in range(rows)], pa.list_(pa.string())),
        "matrices": pa.array([rng.random((3, 4)).tolist() for _ in range(rows)]),
        "bools": pa.array([[[True, False, None]]] * rows),
        "nulls": pa.array([[None] * 6] * rows, pa.list_(pa.null())),
        "labels of a dictionary": pa.array([["a long name of a label " * 3] * 4] * rows, pa.list_(LABEL)),
        "one text in all rows": pa.array([system] * rows, pa.list_(MESSAGE)),
    }


def write(name: str, table: pa.Table, path: Path) -> None:
    if name == "jsonl":
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in table.to_pylist()))
    elif name == "parquet":
        pq.write_table(table, path, row_group_size=500)
    else:
        with pa.ipc.new_file(path, table.schema) as out:
            out.write_table(table, max_chunksize=500)


def measured(name: str, table: pa.Table, folder: str) -> tuple[int, int, int]:
    """Bytes stored, held and estimated of all blocks."""
    path = Path(folder, f"x.{name}")
    write(name, table, path)
    urls, block_bytes = [str(path)], 1 << 18
    codec = resolve_format(name, urls)
    scans = scan_shards(urls, codec, storage_options=None, block_bytes=block_bytes, listed={})
    catalog = catalog_of(urls, codec, scans, block_bytes=block_bytes)
    codec, data, held = catalog.codec(), path.read_bytes(), 0
    for block in map(catalog.block, range(catalog.num_blocks)):
        stored = memoryview(data)[block.offset : block.offset + block.length]
        for column in codec.decode(block, stored, None).values():
            assert isinstance(column, Spans)
            held += column.buffer.nbytes + column.starts.nbytes + column.lengths.nbytes
    return int(catalog.blocks.length.sum()), held, int(catalog.blocks.nbytes.sum())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rows", type=int, default=5000)
    rows = parser.parse_args().rows
    print(f"Python {platform.python_version()}, pyarrow {pa.__version__}, {rows} rows a column\n")
    print("| column | format | stored | held | held / stored | estimate / held | constant / held |")
    print("|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for name in FORMATS:
            found = {kind: measured(name, pa.table({"x": c}), folder) for kind, c in columns(rows).items()}
            constant = max(held / stored for stored, held, _ in found.values())
            for kind, (stored, held, estimate) in found.items():
                ratios = (held / stored, estimate / held, constant * stored / held)
                print(f"| {kind} | {name} | {stored} | {held} |", " | ".join(f"{r:.2f}" for r in ratios), "|")


if __name__ == "__main__":
    main()
