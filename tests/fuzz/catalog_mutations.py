"""Catalogs that were damaged or tampered with, opened and read one after the other in a process of its own.

`python tests/fuzz/catalog_mutations.py SEED COUNT FORMAT...` mutates the catalog of a small dataset of each
format COUNT times and prints JSON lines: ["begun", format, number, what was done], then ["ended", ..., what
came of it, the error]: "same" samples, an "error" of the library, "refused" as a mistaken argument, no
"memory", "other samples", or something "raw"; or ["skipped", format, why] where a library is missing. Half
of the mutations of values keep the checksums as they were (damage); half, told as "signed", compute them
anew (an attacker). The last of each format raises the samples of a block by 20,000.
"""

from __future__ import annotations

import errno
import json
import random
import resource
import sys
import tempfile
import traceback
import warnings
from pathlib import Path
from typing import Any

# As a script: the folders beside this file are named like the packages.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "kits"))

import numpy as np
import pyarrow as pa
import pytest
from datasets_kit import MAKERS, Made, Row, rows_of

from dataflow import DataLoader, ShardedDataset
from sharding.catalog.file import BLOCK_TYPE, stored_table
from sharding.errors import DataflowError

_MAGIC = b"dataflow-catalog"
_EXTREMES = (0, 1, -1, 7, 2**31, 2**32 + 1, 2**62, 2**63 - 1, -(2**63))
_OTHER_KINDS = (None, 1.5, float("nan"), float("inf"), "", "x", True, [], [1], {}, {"a": 1}, 2**70, -1, 0)


def mutated_value(value: Any, draw: random.Random) -> Any:
    """Another value in the place of one of a JSON document: near it, far from it, or of another kind."""
    if isinstance(value, int) and not isinstance(value, bool) and draw.random() < 0.6:
        return draw.choice([value + draw.choice([-20_000, -1, 1, 20_000]), -value, *_EXTREMES])
    if isinstance(value, str) and value and draw.random() < 0.5:
        at = draw.randrange(len(value))
        return value[:at] + chr(ord(value[at]) ^ draw.choice([1, 2, 4, 64])) + value[at + 1 :]
    return draw.choice(_OTHER_KINDS)


def mutate_facts(facts: Any, draw: random.Random) -> str:
    """Change, drop or add one thing somewhere in a JSON document, in place; says where."""
    path = "facts"
    here = facts
    while True:
        keys = list(here) if isinstance(here, dict) else range(len(here))
        if not keys or draw.random() < 0.05:
            if isinstance(here, dict):
                here["added"] = draw.choice(_OTHER_KINDS)
            else:
                here.append(draw.choice(_OTHER_KINDS))
            return f"{path} + something"
        key = draw.choice(list(keys))
        path = f"{path}[{key!r}]"
        if isinstance(here[key], dict | list) and draw.random() < 0.85:
            here = here[key]
        elif isinstance(here, dict) and draw.random() < 0.2:
            del here[key]
            return f"{path} dropped"
        else:
            here[key] = mutated_value(here[key], draw)
            return f"{path} = {here[key]!r}"


def mutate_rows(rows: pa.Table, draw: random.Random) -> tuple[pa.Table, str]:
    """Change one number, text or blob of the table of shards; says which."""
    shards = rows.to_pylist()
    if draw.random() < 0.05:
        at = draw.randrange(len(shards))
        del shards[at]
        return _table(shards, rows.schema), f"shard {at} dropped"
    filled = [shard for shard in shards if shard["blocks"]]
    shard = draw.choice(filled)
    here, name = shard, draw.choice([name for name in rows.schema.names if name != "blocks"])
    if draw.random() < 0.8:
        here, name = draw.choice(shard["blocks"]), draw.choice(BLOCK_TYPE.names)
    if draw.random() < 0.05:
        blocks = shard["blocks"]
        draw.choice([blocks.pop, blocks.reverse, lambda: blocks.append(dict(blocks[0]))])()
        return _table(shards, rows.schema), "blocks dropped, doubled or reversed"
    value = here[name]
    if isinstance(value, int):
        near = value + draw.choice([-20_000, -1, 1, 20_000])
        here[name] = draw.choice([near, near, near, *_EXTREMES])
        if name == "schema":  # an int32
            here[name] = max(-(1 << 31), min(here[name], (1 << 31) - 1))
    elif isinstance(value, bytes) and value:
        here[name] = mutated_bytes(value, draw)
    elif isinstance(value, str):
        here[name] = mutated_value(value or "x", draw)
    else:
        here[name] = draw.choice([None, b"x", b"\0" * 8])
    if name in ("url", "version") and not isinstance(here[name], str):
        here[name] = None
    if name.endswith("crc") or name == "checksums":
        here[name] = [1] if isinstance(value, list) else 1
    return _table(shards, rows.schema), f"{name}: {value!r} -> {here[name]!r}"


def _table(shards: list[Any], schema: pa.Schema) -> pa.Table:
    return pa.Table.from_pylist(shards, schema=schema)


def mutated_bytes(data: bytes, draw: random.Random) -> bytes:
    """Some bits flipped, a sector zeroed, bytes cut off or added."""
    changed = bytearray(data)
    at = draw.randrange(len(changed))
    match draw.randrange(6):
        case 0:
            return bytes(changed[:at])
        case 1:
            return bytes(changed) + b"\xff" * draw.choice([1, 8, 512])
        case 2:
            changed[at : at + 512] = bytes(len(changed[at : at + 512]))
        case 3:
            changed[at] ^= 1 << draw.randrange(8)
        case _:
            for _ in range(draw.choice([1, 3, 9])):
                changed[draw.randrange(len(changed))] = draw.choice([0, 1, 0x7F, 0x80, 0xFF])
    return bytes(changed)


def write(path: Path, rows: pa.Table, facts: Any, *, checksums: bool) -> None:
    """A catalog of these rows and facts, as they are; `checksums` computes all of them anew."""
    if checksums:
        facts.pop("checksum", None)
        table = stored_table(rows, facts)
    else:
        table = rows.replace_schema_metadata({_MAGIC: json.dumps(facts).encode()})
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)


def mutate(whole: bytes, path: Path, draw: random.Random) -> str:
    """Write a mutation of a whole catalog; says what was done."""
    if draw.random() < 0.25:
        path.write_bytes(mutated_bytes(whole, draw))
        return "bytes of the file"
    rows = pa.ipc.open_file(pa.BufferReader(whole)).read_all()
    facts = json.loads(rows.schema.metadata[_MAGIC])
    signed = draw.random() < 0.5
    if draw.random() < 0.4:
        what = mutate_facts(facts, draw)
    else:
        rows, what = mutate_rows(rows, draw)
    write(path, rows, facts, checksums=signed)
    return f"{'signed: ' if signed else ''}{what}"


def samples_of(catalog: Path) -> list[Row]:
    """All samples of the dataset of a catalog, read by windows; a few must be the same one by one."""
    dataset: ShardedDataset[Any] = ShardedDataset(str(catalog))
    with DataLoader(dataset, batch_size=8, memory_limit=32 << 20) as loader:
        rows = [row for batch in loader for row in rows_of(batch)]
    for at in (0, len(rows) // 2, len(rows) - 1):
        dataset[at]
    return rows


def outcome(catalog: Path, expected: list[Row]) -> tuple[str, str]:
    """What comes of a catalog, and the error in words."""
    try:
        ShardedDataset(str(catalog))
    except ValueError as error:  # a format or columns that nobody knows
        return "refused", str(error)
    except DataflowError as error:
        return "error", f"{type(error).__name__}: {error}"
    try:
        rows = samples_of(catalog)
    except DataflowError as error:
        return "error", f"{type(error).__name__}: {error}"
    except OSError as error:
        return "memory" if error.errno == errno.ENOMEM else "raw", traceback.format_exc(limit=-4)
    except Exception:
        return "raw", traceback.format_exc(limit=-4)
    return ("same", "") if rows == expected else ("other samples", "")


def raise_samples(whole: bytes, path: Path) -> str:
    """Write the catalog with 20,000 samples more in its last block, and right checksums."""
    rows = pa.ipc.open_file(pa.BufferReader(whole)).read_all()
    shards = rows.to_pylist()
    shards[-1]["blocks"][-1]["num_samples"] += 20_000
    write(path, _table(shards, rows.schema), json.loads(rows.schema.metadata[_MAGIC]), checksums=True)
    return "signed: 20,000 samples more"


def run(kind: str, folder: Path, seed: int, count: int) -> None:
    """Mutate the catalog of one format so often, and once more; prints two lines each."""
    made: Made = MAKERS[kind](folder)
    made.open()
    catalog = folder / "kept.catalog"
    whole = catalog.read_bytes()
    expected = samples_of(catalog)
    for i in range(count + 1):
        draw = random.Random(f"{seed}/{kind}/{i}")
        what = mutate(whole, catalog, draw) if i < count else raise_samples(whole, catalog)
        print(json.dumps(["begun", kind, i, what[:300]]), flush=True)
        print(json.dumps(["ended", kind, i, what[:300], *outcome(catalog, expected)]), flush=True)


def main() -> None:
    """Run all formats that the command line names."""
    resource.setrlimit(resource.RLIMIT_AS, (12 << 30, 12 << 30))
    warnings.simplefilter("ignore")
    np.seterr(all="ignore")
    seed, count, *kinds = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        for kind in kinds or MAKERS:
            (Path(folder) / kind).mkdir()
            try:
                run(kind, Path(folder) / kind, int(seed), int(count))
            except pytest.skip.Exception as missing:
                print(json.dumps(["skipped", kind, str(missing)]), flush=True)


if __name__ == "__main__":
    main()
