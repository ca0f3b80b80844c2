"""Reads damaged manifests of loose files: what is wrong must be said, by an error that names the manifest.

    python tests/fuzz/manifests.py --mutants 5000 --seed 1

Tables of each kind are changed in one to four places, opened with and without classes and sizes, and read.
Any other exception than the library's own, a `ValueError` that does not name the table, and an opening that
takes more than two seconds are defects: they are listed, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import io
import random
import sys
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from dataflow import DataflowError, Manifest, ShardedDataset

FILES = ("1.jpg", "2 ü.jpg", "a.png")
SLOW_S = 2.0
TOKENS = (
    *(b'"', b",", b"\n", b"\t", b"\r", b"../", b"/", b"\0", b"\xff", b"\xef\xbb\xbf", b" ", b"-"),
    *(b"null", b"true", b"nan", b"1e999", b"9" * 30, b"{", b"}", b"[", b"file_name"),
)


def tables() -> dict[str, bytes]:
    out = io.BytesIO()
    lists = pa.array([[1.0, 2.0], [3.0]])
    columns = {"file_name": ["1.jpg", "a.png"], "label": ["c", "d"], "n": [1, None], "v": lists}
    pq.write_table(pa.table(columns), out)
    return {
        "csv": (
            'file_name,label,n,x,d\n1.jpg,cat,1,0.5,2020-01-01\n"2 ü.jpg","d ""q"",\n",2,,\n'
            "a.png,cat,3,1e3,\n"
        ).encode(),
        "tsv": "file_name\tlabel\tn\n1.jpg\tcat\t1\n2 ü.jpg\tdog\t2\n".encode(),
        "jsonl": (
            '{"file_name": "1.jpg", "label": "cat", "b": [1, 2], "m": {"k": [1, {"a": 2}]}}\n'
            '{"file_name": "2 ü.jpg", "label": null, "b": [], "m": null}\n'
        ).encode(),
        "parquet": out.getvalue(),
    }


def damaged(table: bytes, rng: random.Random) -> bytes:
    data = bytearray(table)
    for _ in range(rng.randint(1, 4)):
        at, kind = rng.randrange(len(data) + 1), rng.randrange(5)
        if kind == 0:
            data[at:at] = rng.choice(TOKENS)
        elif kind == 1:
            data[at : at + rng.randint(1, 8)] = b""
        elif kind == 2:
            data[at : at + 1] = bytes([rng.randrange(256)])
        elif kind == 3:
            data[at:at] = data[rng.randrange(len(data) + 1) :][:20]
        else:
            data = data[:at] if rng.random() < 0.3 else data
    return bytes(data)


def verdict(folder: Path, path: Path, rng: random.Random) -> str:
    manifest = Manifest(path, classes=rng.choice(["", "", "label"]), size=rng.choice(["", "", "n"]))
    began = time.monotonic()
    try:
        dataset = ShardedDataset(folder, manifest=manifest, decode=None)
        for number in range(len(dataset)):
            try:
                _ = dataset[number]
            except DataflowError:
                continue
    except (DataflowError, ValueError) as error:
        return "error" if path.name in str(error) else f"DEFECT: names no table: {error!r}"
    except Exception as error:
        return f"DEFECT: {error!r}"
    took_s = time.monotonic() - began
    return "read" if took_s < SLOW_S else f"DEFECT: took {took_s:.1f} s"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mutants", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    verdicts = Counter[str]()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch, "files")
        folder.mkdir()
        for name in FILES:
            (folder / name).write_bytes(b"x" * 5)
        for ending, table in tables().items():
            Path(scratch, f"m.{ending}").write_bytes(table)
            assert len(ShardedDataset(folder, manifest=Path(scratch, f"m.{ending}"), decode=None)) > 1
        for number in range(given.mutants):
            rng = random.Random(f"{given.seed}/{number}")
            ending, table = rng.choice([*tables().items()])
            path = Path(scratch, f"m.{ending}")
            path.write_bytes(damaged(table, rng))
            found = verdict(folder, path, rng)
            verdicts[found.partition(":")[0]] += 1
            if found.startswith("DEFECT"):
                print(f"mutant {number} ({ending}): {found}")
    print(dict(verdicts))
    return int("DEFECT" in verdicts)


if __name__ == "__main__":
    sys.exit(main())
