"""Reads damaged shards and catalogs of every format, and judges what comes out by other readers.

    python tests/fuzz/damage.py --mutants 6600 --seed 1  # 300 a format, half an hour

A mutant is a small dataset with one shard, its kept catalog, or a shard behind its catalog's back, changed.
Each is opened and read by a process that is killed when it takes too long or too much memory. Verdicts:

    error      the library's own error, or a ValueError: what is wrong was said
    same       the samples that were written: the damage is where nothing is
    as stored  other samples, and another reader finds just those: the format cannot show the damage
    raw error  an exception that says nothing of the dataset
    silent     other samples than another reader finds, or than an untampered catalog has
    crash, hang, memory

All but the first three are defects: they are listed, kept with `--keep FOLDER`, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gzip
import io
import json
import math
import os
import random
import resource
import select
import shutil
import struct
import subprocess
import sys
import tarfile
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(TESTS / "kits"), str(TESTS.parent)]
DEFECTS = ("raw error", "silent", "crash", "hang", "memory")
_MUTANT_S = 30.0
_MUTANTS_PER_CHILD = 100
_MEMORY_BYTES = 512 << 20
"""More than this beyond what a child holds after its first dataset is a defect."""
_ADDRESS_BYTES = 16 << 30
_FEW_SAMPLES = 23

Rows = list[dict[str, Any]]


# ---- damage ---------------------------------------------------------------------------------------------

_NUMBERS = (0, 1, -1, 255, 1 << 15, 1 << 31, (1 << 31) - 1, (1 << 32) - 1, 1 << 62, -(1 << 63))


def damaged_bytes(data: bytes, rng: random.Random) -> tuple[bytes, str]:
    """Bytes with one thing changed, and what was done."""
    size, out = len(data), bytearray(data)
    at = rng.randrange(size)
    end = min(size, at + rng.choice((1, 4, 8, 16, 100)))
    kind = rng.choice(
        ("bit", "byte", "zeros", "sector", "cut", "block cut", "number", "delete", "double", "swap")
    )
    if kind == "bit":
        out[at] ^= 1 << rng.randrange(8)
    elif kind == "byte":
        out[at] = rng.randrange(256)
    elif kind == "zeros":
        out[at:end] = bytes(end - at)
    elif kind == "sector":
        at -= at % 512
        out[at : at + 512] = bytes(min(512, size - at))
    elif kind == "cut":
        del out[at:]
    elif kind == "block cut":
        at -= at % 512
        del out[at:]
    elif kind == "number":
        form = rng.choice(("<i", "<q", "<h"))
        width = struct.calcsize(form)
        at = min(at - at % width, max(0, size - width))
        value = rng.choice(_NUMBERS) & ((1 << (8 * width)) - 1)
        out[at : at + width] = value.to_bytes(width, "little")[: size - at]
    elif kind == "delete":
        del out[at:end]
    elif kind == "double":
        out[at:at] = data[at:end]
    else:
        other = rng.randrange(size)
        width = min(8, size - at, size - other)
        out[at : at + width], out[other : other + width] = data[other : other + width], data[at : at + width]
    return bytes(out), f"{kind} at {at}"


# ---- other readers --------------------------------------------------------------------------------------


def _tar_rows(path: Path, layout: Path | None = None) -> Rows:
    """Members as bytes, by key; of a catalog's tar, where the original of it, `layout`, has them."""
    data = _plain(path)
    rows: dict[str, dict[str, Any]] = {}
    with tarfile.open(fileobj=io.BytesIO(data if layout is None else _plain(layout)), mode="r:") as archive:
        for info in archive:
            if info.isfile():
                key, _, column = info.name.partition(".")
                content = data[info.offset_data : info.offset_data + info.size]
                if len(content) < info.size:
                    raise EOFError("a member is cut off")
                rows.setdefault(key, {})[column] = list(content)
    return [dict(sorted(row.items())) for row in rows.values()]


def _plain(path: Path) -> bytes:
    data = path.read_bytes()
    return _unzstd(data) if path.suffix == ".zst" else gzip.decompress(data) if path.suffix == ".gz" else data


def _unzstd(data: bytes) -> bytes:
    import zstandard

    with zstandard.ZstdDecompressor().stream_reader(io.BytesIO(data), read_across_frames=True) as reader:
        return reader.read()


def _json_rows(path: Path) -> Rows:
    data = _plain(path)
    return [json.loads(line) for line in data.split(b"\n") if line.strip()]


def _parquet_rows(path: Path) -> Rows:
    import pyarrow.parquet as pq

    table = pq.read_table(path)
    table.validate(full=True)
    return table.to_pylist()


def _arrow_rows(path: Path) -> Rows:
    import pyarrow as pa

    opened = pa.ipc.open_file if path.suffix == ".arrow" else pa.ipc.open_stream
    with pa.OSFile(str(path)) as file, opened(file) as reader:
        table = reader.read_all()
    table.validate(full=True)
    return table.to_pylist()


def _token_rows(path: Path) -> Rows:
    import numpy as np

    tokens = np.load(path).tolist() if path.suffix == ".npy" else np.fromfile(path, np.uint16).tolist()
    return _token_windows(tokens)


def _token_windows(tokens: list[int]) -> Rows:
    from datasets_kit import LENGTH

    count = max(0, (len(tokens) - 1) // LENGTH)
    return [{"tokens": tokens[i * LENGTH : (i + 1) * LENGTH + 1]} for i in range(count)]


def _megatron_documents(path: Path) -> list[list[int]]:
    import numpy as np

    index, tokens = path.with_suffix(".idx").read_bytes(), path.read_bytes()
    _, code, count, num_bounds = struct.unpack_from("<QBQQ", index, 9)
    dtype = {1: "u1", 2: "i1", 3: "i2", 4: "i4", 5: "i8", 8: "u2"}[code]
    lengths = np.frombuffer(index, np.int32, count, 34)
    pointers = np.frombuffer(index, np.int64, count, 34 + 4 * count)
    bounds = np.frombuffer(index, np.int64, num_bounds, 34 + 12 * count).tolist()
    sequences = [
        np.frombuffer(tokens, dtype, n, at).tolist()
        for n, at in zip(lengths.tolist(), pointers.tolist(), strict=True)
    ]
    return [[*chain.from_iterable(sequences[first:last])] for first, last in pairwise(bounds)]


def _megatron_rows(path: Path) -> Rows:
    return [{"tokens": document} for document in _megatron_documents(path)]


def _megatron_windows(path: Path) -> Rows:
    return _token_windows([token for document in _megatron_documents(path) for token in document])


def _mds_rows(path: Path, layout: Path | None = None) -> Rows:
    """Samples; of a catalog's shard, where the original of it, `layout`, has them."""
    import numpy as np

    data, head, rows = path.read_bytes(), (layout or path).read_bytes(), []
    (count,) = struct.unpack_from("<I", head)
    offsets = struct.unpack_from(f"<{count + 1}I", head, 4)
    config = json.loads(head[4 * (count + 2) : offsets[0]])
    names = config["column_names"]
    if offsets[-1] != len(data) or names != ["label", "lst", "txt", "vec", "x"]:
        raise ValueError("another file")
    for begin, end in pairwise(offsets):
        lst, txt = struct.unpack_from("<II", data, begin)
        at = begin + 16
        if at + lst + txt + 16 != end or data[at] >> 2 != 1:
            raise ValueError("columns of other lengths")
        width = 1 << (data[at] & 3)
        length = int.from_bytes(data[at + 1 : at + 1 + width], "little")
        if 1 + width + 4 * length != lst:
            raise ValueError("an array of another length")
        after = at + lst + txt
        rows.append(
            {
                "label": int.from_bytes(data[at - 8 : at], "little", signed=True),
                "lst": np.frombuffer(data, "<i4", length, at + 1 + width).tolist(),
                "txt": data[at + lst : after].decode(),
                "vec": np.frombuffer(data, "<f4", 3, after).tolist(),
                "x": np.frombuffer(data, "<f4", 1, after + 12).tolist()[0],
            }
        )
    return rows


def _tfrecord_rows(path: Path) -> Rows:
    """Records one after the other; what their checksums do not show is never another sample."""
    from formats.records_kit import tfrecord_of

    data, at, rows = path.read_bytes(), 0, []
    while at < len(data):
        (size,) = struct.unpack_from("<Q", data, at)
        record = data[at + 12 : at + 12 + size]
        if tfrecord_of([record]) != data[at : at + 16 + size]:
            raise ValueError("a wrong checksum")
        rows.append(_example_row(record))
        at += 16 + size
    return rows


def _example_row(record: bytes) -> dict[str, Any]:
    """The sample of an Example as the kit writes it, found by its values alone."""
    from formats.records_kit import example_of

    text = int(record.partition(b"text ")[2].partition(b" ")[0])
    from datasets_kit import plain_sample

    row = plain_sample(text)
    bytes_ = row["txt"].encode()
    lists = {"lst": row["lst"], "vec": row["vec"]}
    if example_of(label=[row["label"]], x=[row["x"]], txt=[bytes_], **lists) != record:
        raise ValueError("a record that nobody wrote")
    return dict(sorted({**row, "txt": list(bytes_)}.items()))


def _litdata_rows(path: Path, layout: Path | None = None) -> Rows:
    """Likewise, of a chunk."""
    import numpy as np

    data, head, rows = path.read_bytes(), (layout or path).read_bytes(), []
    (count,) = struct.unpack_from("<I", head)
    offsets = struct.unpack_from(f"<{count + 1}I", head, 4)
    if offsets[-1] != len(data):
        raise ValueError("another file")
    for begin, end in pairwise(offsets):
        label, txt, lst = struct.unpack_from("<III", data, begin)
        at = begin + 12
        if label != 8 or at + 8 + txt + lst != end:
            raise ValueError("leaves of other lengths")
        rows.append(
            {
                "label": int.from_bytes(data[at : at + 8], "little", signed=True),
                "txt": data[at + 8 : at + 8 + txt].decode(),
                "lst": np.frombuffer(data[at + 8 + txt : end], "<i4").tolist(),
            }
        )
    return rows


def _text_rows(path: Path) -> Rows:
    data = path.read_bytes().removeprefix(b"\xef\xbb\xbf" if path.name == "shard-0.txt" else b"")
    lines = data.decode().replace("\r\n", "\n").removesuffix("\n").split("\n") if data else []
    return [{"text": line} for line in lines]


def _folder_rows(path: Path) -> Rows:
    """Lines of JSON with the value that their folder is called by."""
    return [{**row, "n": int(path.parent.name.removeprefix("n="))} for row in _json_rows(path)]


UNJUDGED = {
    "array_record": "its hashes are not verified",
    "csv": "types follow from all rows",
    "energon": "its files say which members are what",
}
"""Formats of which no other reader says what a mutant means, and why: limits and errors are judged alone."""
READERS: dict[str, Callable[[Path], Rows]] = {
    "tar": _tar_rows,
    "tar.gz": _tar_rows,
    "tar.zst": _tar_rows,
    "parquet": _parquet_rows,
    "arrow": _arrow_rows,
    "arrow-stream": _arrow_rows,
    "jsonl": _json_rows,
    "jsonl.gz": _json_rows,
    "jsonl.zst": _json_rows,
    "images": _tar_rows,
    "tokens.bin": _token_rows,
    "tokens.npy": _token_rows,
    "megatron": _megatron_rows,
    "megatron-windows": _megatron_windows,
    "mds": _mds_rows,
    "tfrecord": _tfrecord_rows,
    **dict.fromkeys(UNJUDGED, lambda _: []),
    "text": _text_rows,
    "hive": _folder_rows,
    "litdata": _litdata_rows,
}


_OF_LAYOUTS: dict[str, Callable[[Path, Path], Rows]] = {
    **dict.fromkeys(("tar", "tar.gz", "tar.zst"), _tar_rows),
    "mds": _mds_rows,
    "litdata": _litdata_rows,
}
"""Those that find values where the original of a file has them."""


# ---- the process that reads ------------------------------------------------------------------------------


def child() -> None:
    """Read what stdin names, a dataset a line, and tell what came out."""
    resource.setrlimit(resource.RLIMIT_AS, (_ADDRESS_BYTES, _ADDRESS_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    from datasets_kit import rows_of

    from dataflow import DataLoader, ShardedDataset
    from sharding.errors import DataflowError

    warnings.simplefilter("ignore")
    for line in sys.stdin:
        answer: dict[str, Any] = {}
        try:
            with DataLoader(ShardedDataset(**json.loads(line)), 4, num_workers=1, workers="thread") as loader:
                rows = [row for batch in loader for row in rows_of(batch)]
                answer["rows"] = repr(rows)
        except (DataflowError, FileNotFoundError) as error:
            answer["error"] = str(error)
        except Exception as error:
            told = type(error) is ValueError
            answer["error" if told else "raw"] = f"{type(error).__name__}: {error}"
        answer["peak"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
        print(json.dumps(answer), flush=True)


class Reader:
    """A child process that is replaced when it dies, hangs or has read enough."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._read = self._base = 0

    def read(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """What the child tells of a dataset; `crash` or `hang` if it does not."""
        process = self._running()
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(json.dumps(kwargs) + "\n")
            process.stdin.flush()
        ready, _, _ = select.select([process.stdout], [], [], _MUTANT_S)
        line = process.stdout.readline() if ready else ""
        if not line:
            if not ready:
                process.kill()
            code = process.wait()
            self._process = None
            return (
                {"crash": f"exit status {code}"} if ready else {"hang": f"nothing within {_MUTANT_S:.0f} s"}
            )
        answer: dict[str, Any] = json.loads(line)
        self._read += 1
        self._base = self._base or answer["peak"]
        if answer["peak"] > self._base + _MEMORY_BYTES:
            answer["memory"] = f"{answer['peak'] >> 20} MiB, {self._base >> 20} at first"
        if self._read >= _MUTANTS_PER_CHILD or "memory" in answer:
            self.close()
        return answer

    def _running(self) -> subprocess.Popen[str]:
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, __file__, "--child"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            self._read = self._base = 0
        return self._process

    def close(self) -> None:
        """End the child."""
        if self._process is not None:
            self._process.communicate()
            self._process = None


# ---- mutants --------------------------------------------------------------------------------------------


class Original:
    """A sound dataset of one format, with its catalog."""

    def __init__(self, name: str, folder: Path, reader: Reader) -> None:
        folder.mkdir()
        self.name, self.folder = name, folder
        self.made = _makers()[name](folder, _FEW_SAMPLES)
        files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
        self.files = [path.relative_to(folder) for path in files]
        """All of them; those that are damaged are `shards`."""
        named = [path for path in files if path.name.startswith("shard") or ".nv-meta" in path.parts]
        self.shards = [p for p in named if p.stat().st_size and p.suffix != ".idx"]
        answer = reader.read(self.made.kwargs)
        if "rows" not in answer:
            raise RuntimeError(f"the sound {name} cannot be read: {answer}")
        self.rows = answer["rows"]

    def copied(self, folder: Path) -> tuple[dict[str, Any], dict[Path, Path]]:
        """A copy: arguments of `ShardedDataset`, and where each file is now."""
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(self.folder, folder)
        kwargs = {
            name: value.replace(str(self.folder), str(folder)) if isinstance(value, str) else value
            for name, value in self.made.kwargs.items()
        }
        return kwargs, {self.folder / path: folder / path for path in self.files}


def _makers() -> dict[str, Callable[..., Any]]:
    from datasets_kit import MAKERS, make_jsonl

    return {
        **MAKERS,
        "jsonl.zst": lambda folder, n: make_jsonl(folder, n, "jsonl.zst"),
        "images": _make_images,
        "csv": _make_csv,
        "text": _make_text,
        "hive": _make_hive,
    }


def _make_csv(folder: Path, num_samples: int) -> Any:
    from datasets_kit import Made, plain_sample

    rows = [plain_sample(i) for i in range(num_samples)]
    for shard in range(2):
        lines = [f'{row["label"]},{row["x"]},"{row["txt"]}"' for row in rows[shard::2]]
        (folder / f"shard-{shard}.csv").write_text("\n".join(["label,x,txt", *lines, ""]))
    source = {"source": str(folder / "*.csv"), "format": "csv", "catalog": str(folder / "kept.catalog")}
    return Made(source, rows, folder)


def _make_text(folder: Path, num_samples: int) -> Any:
    from datasets_kit import Made, plain_sample

    for shard in range(2):
        lines = [plain_sample(i)["txt"] for i in range(shard, num_samples, 2)]
        (folder / f"shard-{shard}.txt").write_text("\n".join([*lines, ""]))
    source = {"source": str(folder / "*.txt"), "format": "text", "catalog": str(folder / "kept.catalog")}
    return Made({**source, "block_bytes": 40}, [], folder)


def _make_hive(folder: Path, num_samples: int) -> Any:
    from datasets_kit import Made, make_jsonl

    for number in range(2):
        (folder / f"n={number}").mkdir()
        make_jsonl(folder / f"n={number}", num_samples // 2)
    source = {"source": str(folder / "*/*.jsonl"), "catalog": str(folder / "kept.catalog")}
    return Made({**source, "block_bytes": 300}, [], folder)


def _make_images(folder: Path, num_samples: int) -> Any:
    """JPEGs and PNGs in tars."""
    import cv2
    import numpy as np
    from datasets_kit import Made, write_tar

    draw = np.random.default_rng(0)
    for shard in range(2):
        members = []
        for i in range(shard, num_samples, 2):
            pixels = cv2.resize(draw.integers(0, 256, (5, 4, 3), np.uint8), (40, 30))
            members += [
                (f"{i:03d}.{end}", cv2.imencode(f".{end}", pixels)[1].tobytes()) for end in ("jpg", "png")
            ]
        write_tar(folder / f"shard-{shard}.tar", members)
    return Made({"source": str(folder / "*.tar"), "catalog": str(folder / "kept.catalog")}, [], folder)


def mutant(original: Original, folder: Path, rng: random.Random) -> tuple[dict[str, Any], str]:
    """Damage a copy: arguments of `ShardedDataset`, and what was done to which part."""
    kwargs, files = original.copied(folder)
    catalog = Path(kwargs["catalog"])
    part = rng.choice(("shard", "shard", "behind", "catalog"))
    if original.name == "energon":  # what its catalog names is tars
        part = "shard"
    if part == "catalog":
        from catalog_mutations import mutate

        what = mutate(catalog.read_bytes(), catalog, rng)
        return {"source": str(catalog)}, f"{part}: {what}"
    shard = files[rng.choice(original.shards)]
    if shard.with_suffix(".idx").exists() and rng.random() < 0.6:
        shard = shard.with_suffix(".idx")
    times = shard.stat()
    data, what = damaged_bytes(shard.read_bytes(), rng)
    shard.write_bytes(data)
    if part == "shard":
        catalog.unlink()
    else:  # where the size is the same, nothing shows it
        os.utime(shard, ns=(times.st_atime_ns, times.st_mtime_ns))
        kwargs = {"source": str(catalog)}
    return kwargs, f"{part} {shard.name}: {what}"


def verdict(
    original: Original, kwargs: dict[str, Any], folder: Path, what: str, reader: Reader
) -> tuple[str, str]:
    """What the library made of a mutant in a folder, and its words."""
    part = what.split(maxsplit=1)[0].rstrip(":")
    signed = "signed: " in what  # somebody wrote another catalog, of shards that are there
    answer = reader.read(kwargs)
    for kind in ("crash", "hang", "memory"):
        if kind in answer:
            return kind, answer[kind]
    if "raw" in answer:
        return "raw error", answer["raw"]
    if "error" in answer:
        return "error", answer["error"]
    if answer["rows"] == original.rows:
        return "same", ""
    if original.name == "images" and part != "catalog":
        return "as stored", "decoders need not agree about damaged pixels"
    if original.name in UNJUDGED and part != "catalog":
        return "as stored", UNJUDGED[original.name]
    if part == "catalog":
        return "as stored" if signed else "silent", answer["rows"][:400]
    if original.name.startswith("tar"):  # members as they are, whatever their decoders make of them
        names = "cls", "txt", "json", "npy", "bin", "key"
        answer = reader.read({**kwargs, "decode": dict.fromkeys(names, "bytes")})
    try:
        expected = _expected(original, folder, behind=part == "behind")
    except Exception as error:
        return "silent", f"another reader raises {type(error).__name__}: {error}"
    found = answer.get("rows", str(answer))
    if original.name.startswith("tar"):
        found = repr(
            [{name: list(value) for name, value in sorted(row.items())} for row in _evaluated(found)]
        )
    if original.name in ("jsonl", "jsonl.gz", "jsonl.zst", "hive") and "rows" in answer:
        delivered = _evaluated(found)
        if part == "behind" and delivered:  # the catalog says which columns there are
            expected = [{name: row.get(name, math.nan) for name in delivered[0]} for row in expected]
        if len(delivered) == len(expected) and all(map(_same_json, delivered, expected)):
            return "as stored", ""
    if found == repr(expected):
        return "as stored", ""
    return "silent", f"ours {found[:300]}, another reader's {repr(expected)[:300]}"


def _expected(original: Original, folder: Path, *, behind: bool) -> Rows:
    """What another reader finds. `behind` a catalog it gets the headers and footers that the catalog has."""
    rows = []
    for path in original.shards:
        copy = folder / path.relative_to(original.folder)
        if behind and original.name in _OF_LAYOUTS:
            rows += _OF_LAYOUTS[original.name](copy, path)
            continue
        if behind:
            whole, data = path.read_bytes(), copy.read_bytes()
            head = 128 if path.suffix == ".npy" else 0
            tail = 0
            if path.suffix == ".parquet":
                tail = 8 + int.from_bytes(whole[-8:-4], "little")
            elif path.suffix == ".arrow":
                tail = 10 + int.from_bytes(whole[-10:-6], "little")
            elif path.suffix == ".arrows":
                head = 8 + int.from_bytes(whole[4:8], "little")  # the schema
                tail = 8  # the mark of the end
            copy.write_bytes(whole[:head] + data[head : len(data) - tail] + whole[len(whole) - tail :])
            if (index := path.with_suffix(".idx")).exists():
                shutil.copy(index, folder)
        rows += READERS[original.name](copy)
    return rows


def _same_json(ours: dict[str, Any], stored: dict[str, Any]) -> bool:
    """Whether a row is what JSON Lines hold: in a column of fractions 2 is 2.0, and what lacks is NaN."""

    def same(mine: Any, other: Any) -> bool:
        if isinstance(mine, float) and math.isnan(mine):
            return other is None or (isinstance(other, float) and math.isnan(other))
        return bool(mine == other)

    names = ours.keys() | stored.keys()
    return all(same(ours.get(name), stored.get(name, math.nan)) for name in names)


def _evaluated(rows: str) -> Rows:
    found: Rows = eval(rows, {"nan": float("nan"), "inf": float("inf")})  # our own repr
    return found


def run(mutants: int, seed: int, formats: list[str], keep: Path | None) -> Counter[tuple[str, str]]:
    """Judge so many mutants: (format, verdict) -> how many. Defects are printed."""
    from rich.progress import track

    counts: Counter[tuple[str, str]] = Counter()
    with tempfile.TemporaryDirectory() as text, contextlib.closing(Reader()) as reader:
        folder = Path(text)
        originals = [Original(name, folder / name, reader) for name in formats]
        for number in track(range(mutants), "reading", disable=not sys.stderr.isatty()):
            rng = random.Random(f"{seed} {number}")
            original = originals[number % len(originals)]
            copy = folder / "copy"
            kwargs, what = mutant(original, copy, rng)
            found, words = verdict(original, kwargs, copy, what, reader)
            counts[original.name, found] += 1
            if found in DEFECTS:
                print(f"{found}: mutant {number} of seed {seed}, {original.name}, {what}: {words}")
                if keep is not None:
                    shutil.copytree(copy, keep / f"{seed}-{number}", dirs_exist_ok=True)
    return counts


def main() -> int:
    """Judge, and print the counts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mutants", type=int, default=5000, help="how many (default: 5000)")
    parser.add_argument("--seed", type=int, default=0, help="of the damage (default: 0)")
    parser.add_argument("--format", action="append", choices=READERS, help="only this one; may be repeated")
    parser.add_argument("--keep", type=Path, help="where to leave the datasets that show a defect")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        child()
        return 0
    began = time.monotonic()
    counts = run(given.mutants, given.seed, given.format or list(READERS), given.keep)
    for name in READERS:
        found = ", ".join(f"{n} {verdict}" for (of, verdict), n in sorted(counts.items()) if of == name)
        print(f"{name:17} {found}")
    total: Counter[str] = functools.reduce(
        lambda a, b: a + b, (Counter({v: n}) for (_, v), n in counts.items())
    )
    found = ", ".join(f"{n} {verdict}" for verdict, n in total.most_common())
    print(f"{'all':17} {found}; {time.monotonic() - began:.0f} s")
    return int(any(total[kind] for kind in DEFECTS))


if __name__ == "__main__":
    sys.exit(main())
