"""Loaders over shards as rows of a table: what every one of them keeps is in `test_contracts.py`.

A capability that changes what a loader delivers adds a row here, and brings no matrix of its own.
"""

from __future__ import annotations

import functools
import json
import signal
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch
from datasets_kit import MAKERS, make_ints_tar, npy, rank, rows_of, write_tar
from numpy.typing import NDArray

from dataflow import (
    Bucketed,
    DataLoader,
    Image,
    Mixture,
    Optional,
    Packed,
    ShardedDataset,
    Shuffle,
    TokenBudget,
)
from dataflow.batch.packed import PackedRows, PaddedRows
from sharding.lengths.batching import Batching

GLOBAL_ROWS = 12
"""Rows of a global batch that two, three and four ranks share out evenly."""
FEW_ROWS = 6
WINDOW = Shuffle("window", 2)
NODES = Shuffle("window", 4, canonical_nodes=3)
_MAKERS: dict[str, Callable[..., Any]] = {**MAKERS, "ints": make_ints_tar}


@dataclass(frozen=True)
class Row:
    """A loader, and how to look at what it delivers."""

    write: Callable[[Path], object]
    """Writes the data into a folder, once."""
    open: Callable[[Path], Any]
    """Opens the dataset there."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of the loader."""
    samples: Callable[[Any], list[Any]] = rows_of
    """What a batch holds, in values that compare with `==`."""
    weights: Mapping[int, Sequence[float]] = field(default_factory=dict)
    """Set after so many batches of an epoch."""
    is_measured: bool = False
    """Lengths are those of what a transform makes: ranks tell each other, in a process group."""
    transforms: bool = False
    """Samples are made by a function of the user's."""

    @property
    def is_whole(self) -> bool:
        """Whether the last batch leaves out and repeats nothing, in any world."""
        return self.options.get("tail", "uneven") == "uneven"

    @property
    def has_rows(self) -> bool:
        """Whether ranks take parts of one global batch of so many rows; else whole batches in turn."""
        batching = self.options.get("batching")
        return batching is None or isinstance(batching, Packed)

    @property
    def has_plan_by_length(self) -> bool:
        """Whether stored lengths say which samples share a batch, and their pieces are copied into it."""
        return "batching" in self.options and not self.is_measured and not self.transforms

    def loader(
        self, folder: Path, r: int = 0, world_size: int = 1, rows: int = FEW_ROWS, **more: Any
    ) -> DataLoader[Any, Any]:
        """The loader of a rank; `rows`: of the batches of all ranks together."""
        size = {"batch_size": rows // world_size} if self.has_rows else {}
        place = {} if self.is_measured and world_size > 1 else {"topology": rank(r, world_size)}
        options = {"shuffle": WINDOW, "seed": 5, "tail": "uneven", "num_workers": 0}
        return DataLoader(self.open(folder), **{**options, **size, **place, **self.options, **more})

    def run(
        self,
        loader: DataLoader[Any, Any],
        *,
        done: int = 0,
        steps: int | None = None,
        states: list[dict[str, Any]] | None = None,
    ) -> list[list[Any]]:
        """The batches that are left of an epoch of which so many are `done`, or the next few."""
        got: list[list[Any]] = []
        loop = iter(loader)
        while len(got) != steps and (batch := next(loop, None)) is not None:
            got.append(self.samples(batch))
            if weights := self.weights.get(done + len(got)):
                loader.dataset.set_weights(weights)
            if states is not None:
                states.append(through_json(loader.state_dict()))
        return got


def through_json(state: Mapping[str, Any]) -> dict[str, Any]:
    """A state as a checkpoint keeps it."""
    text = json.dumps(state)
    assert len(text) < 1000
    return dict(json.loads(text))


# ---- data: written once, opened as often as asked -------------------------------------------------------


def write(name: str, folder: Path) -> None:
    """One of the small datasets of every format."""
    folder.mkdir(exist_ok=True)
    (folder / "arguments.json").write_text(json.dumps(_MAKERS[name](folder).kwargs))


@functools.cache
def opened(folder: Path, **more: Any) -> ShardedDataset:
    return ShardedDataset(**arguments(folder), **more)


def arguments(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "arguments.json").read_text()))


def of_format(name: str, shuffle: Shuffle | None = WINDOW, tail: str = "uneven", **more: Any) -> Row:
    return Row(partial(write, name), partial(opened, **more), {"shuffle": shuffle, "tail": tail})


def write_three(folder: Path) -> None:
    for name, kind in (("a", "parquet"), ("b", "jsonl"), ("c", "arrow")):
        write(kind, folder / name)


@functools.cache
def three(folder: Path, transform: Documents | None = None) -> list[ShardedDataset]:
    """Of three formats, of unlike sizes, with documents and where they came from."""
    columns = {"n": "label", "tokens": "lst", "url": "__url__"}
    how = {"columns": columns, "transform": transform}
    a, b, c = (ShardedDataset(**arguments(folder / name), **how) for name in "abc")
    return [a, b.take(20), c.take(9)]


def numbered(batch: Any) -> list[Any]:
    """Which samples of which source a batch has."""
    return [(Path(url).parent.name, int(n)) for url, n in zip(batch["url"], batch["n"], strict=True)]


def packed_rows(batch: Any, column: str = "tokens") -> list[Any]:
    """Rows of tokens, with the pieces in them."""
    value: PackedRows | PaddedRows = batch[column]
    if isinstance(value, PaddedRows):
        return [
            tokens[:length]
            for tokens, length in zip(value.tokens.tolist(), value.lengths.tolist(), strict=True)
        ]
    return list(zip(value.tokens.tolist(), value.segment_ids.tolist(), value.positions.tolist(), strict=True))


# ---- functions of the user's ------------------------------------------------------------------------------

ctrl_c_at: list[int] = []
"""Numbers of samples at which a Ctrl-C comes, once each, in the process that makes the sample."""


def _made(number: int) -> None:
    if number in ctrl_c_at:
        ctrl_c_at.remove(number)
        signal.raise_signal(signal.SIGINT)


class Draws:
    """Adds a random number, of the sample and the epoch alone."""

    fingerprint = "draws"

    def __call__(self, sample: Mapping[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        _made(int(sample["cls"]))
        return {"cls": sample["cls"], "draw": rng.random()}


class Documents:
    """Makes a document of unknown length of a sample."""

    fingerprint = "documents"

    def __call__(self, sample: Mapping[str, Any]) -> dict[str, Any]:
        number = int(sample["n"])
        _made(number)
        return {"n": number, "url": sample["url"], "tokens": torch.full((number * 7 % 11,), number)}


class NumberedDocuments(Documents):
    """Has the number in a list, too, which comes whole: such samples are made when their row is built."""

    def __call__(self, sample: Mapping[str, Any]) -> dict[str, Any]:
        made = super().__call__(sample)
        return made | {"own": [made["n"]]}


# ---- rows -----------------------------------------------------------------------------------------------

RULES: dict[str, Callable[..., Mixture]] = {
    "first": lambda a, b, c, **how: Mixture({a: 0.7, b: 0.2, c: 0.1}, **how),
    "all": lambda a, b, c, **how: Mixture({a: 0.5, b: 0.3, c: 0.2}, stop="all", **how),
    "repeats": lambda a, b, c: Mixture([a, b, c], repeats=[1, 2, 2.5]),
    "schedule": lambda a, b, c: Mixture(
        [a, b, c], schedule={0: [1, 0, 1], 15: [1, 1, 1]}, stop="all", run_length=3
    ),
    "nested": lambda a, b, c: Mixture({Mixture({a: 2, c: 1}): 2, b: 1}, stop="all"),
    "views": lambda a, b, c: Mixture(
        {a.skip(5): 2, b.subset(slice(None, None, 3)): 1, c.take(4): 1}, stop="all"
    ),
}
BATCHINGS: dict[str, Callable[[str], Batching]] = {
    "packed": lambda column: Packed(6, column, window=16, pad=7),
    "split": lambda column: Packed(3, column, window=16),
    "truncated": lambda column: Packed(3, column, overlong="truncate", window=16),
    "budget": lambda column: TokenBudget(24, column, window=16, multiple=2),
    "buckets": lambda column: Bucketed(5, column, boundaries=(2, 4), window=16, pad=1),
}
WEIGHTS = {1: [1, 1, 1], 3: [0, 1, 2]}


def mixture(rule: str, shuffle: Shuffle = NODES, tail: str = "uneven", **more: Any) -> Row:
    return Row(
        write_three, lambda folder: RULES[rule](*three(folder)), {"shuffle": shuffle}, numbered, **more
    )


def packed(batching: str, **more: Any) -> Row:
    """Documents of known lengths."""
    options = {"batching": BATCHINGS[batching]("tokens"), **more}
    return Row(partial(write, "megatron"), opened, options, packed_rows)


def packed_mixture(batching: str, rule: str, is_measured: bool = False, weights: Any = (), **how: Any) -> Row:
    """Of known lengths, or of those that a transform makes."""
    return Row(
        write_three,
        lambda folder: RULES[rule](*three(folder, Documents() if is_measured else None), **how),
        {"batching": BATCHINGS[batching]("tokens"), "shuffle": NODES},
        packed_rows,
        dict(weights),
        is_measured,
        is_measured,
    )


def measured(batching: str, shuffle: Shuffle | None = NODES) -> Row:
    """Documents that a transform makes."""
    return Row(
        write_three,
        lambda folder: three(folder, Documents())[0],
        {"batching": BATCHINGS[batching]("tokens"), "shuffle": shuffle},
        packed_rows,
        is_measured=True,
        transforms=True,
    )


def document_lengths(catalog: Any) -> NDArray[np.int64]:
    """What `Documents` makes of each sample."""
    return np.arange(catalog.num_samples) * 7 % 11


def planned(batching: Batching, **more: Any) -> Row:
    """Documents that a transform makes where their row is built: lengths are known."""
    rule = replace(batching, lengths=document_lengths, whole=["own"])
    return Row(
        write_three,
        lambda folder: three(folder, NumberedDocuments())[0],
        {"batching": rule, "shuffle": NODES, **more},
        packed_rows,
        transforms=True,
    )


def write_joined(folder: Path) -> None:
    """Captions of four in five samples."""
    write("parquet", folder / "own")
    for shard, numbers in enumerate((range(15), range(15, 47))):
        rows = [{"label": n, "caption": f"caption {n} " + "é" * (n % 4)} for n in numbers if n % 5 != 2]
        pq.write_table(pa.Table.from_pylist(rows), folder / f"captions-{shard}.parquet", row_group_size=4)


def joined(folder: Path) -> ShardedDataset:
    captions = ShardedDataset(str(folder / "captions-*.parquet"), block_bytes=1)
    with warnings.catch_warnings():  # of the samples that are left out
        warnings.simplefilter("ignore")
        return opened(folder / "own").join(captions, on="label")


def write_nulls(folder: Path) -> None:
    rows = [
        {
            "n": n,
            "i": None if n % 3 == 1 else n,
            "s": None if n % 4 == 1 else f"text {n}",
            "l": None if n % 5 == 1 else [n] * (n % 3),
        }
        for n in range(47)
    ]
    pq.write_table(pa.Table.from_pylist(rows), folder / "nulls.parquet", row_group_size=4)


def with_nulls(folder: Path, **more: Any) -> ShardedDataset:
    return ShardedDataset(str(folder / "nulls.parquet"), block_bytes=1, **more)


def declared(folder: Path) -> ShardedDataset:
    long = Optional(default=[7] * 300, mask=True)
    return with_nulls(folder, decode={"i": Optional(default=-1, mask=True), "s": Optional(), "l": long})


def write_members(folder: Path) -> None:
    """Samples that lack one member or another, and of which one comes in each."""
    members = [
        (f"{n:02d}.{name}", data)
        for n in range(47)
        for every, name, data in (
            (48, "cls", b"%d" % n),
            (2, "txt", b"text %d" % n),
            (3, "json", b"[%d]" % n),
            (4, "npy", npy([n / 2, n])),
            (5, "bin", bytes([n] * (n % 4))),
        )
        if n % every or every == 48
    ]
    write_tar(folder / "members.tar", members)


@functools.cache
def with_members(folder: Path) -> ShardedDataset:
    decode = {
        "txt": Optional(default="none"),
        "json": Optional(),
        "npy": Optional(mask=True),
        "bin": Optional(default=b"gap", mask=True),
    }
    return ShardedDataset(str(folder / "members.tar"), decode=decode, block_bytes=20_000)


def filtered(folder: Path) -> ShardedDataset:
    return with_nulls(folder, columns=["n", "i"]).filter(pc.field("i").is_valid())


@functools.cache
def with_companions(folder: Path) -> ShardedDataset:
    return ShardedDataset(**arguments(folder), columns={"tokens": "lst", "mask": "lst", "n": "label"})


def write_images(folder: Path) -> None:
    """Noise, in which no two crops are alike."""
    noise = np.random.default_rng(0).integers(0, 256, (47, 24, 32, 3), np.uint8)
    images = [bytes(cv2.imencode(".png", pixels)[1].tobytes()) for pixels in noise]
    write_tar(folder / "images.tar", [(f"{n:02d}.png", image) for n, image in enumerate(images)])


@functools.cache
def with_crops(folder: Path) -> ShardedDataset:
    crop = Image(size=6, crop="random_resized", flip=0.5)
    return ShardedDataset(str(folder / "images.tar"), decode={"png": crop}, block_bytes=10_000)


def write_classes(folder: Path) -> None:
    """Of three classes in unlike numbers."""
    kinds = ["cat" if n % 4 else "owl" if n % 3 else "dog" for n in range(47)]
    rows = [{"n": n, "kind": kind, "tokens": [n] * (n * 7 % 11)} for n, kind in enumerate(kinds)]
    pq.write_table(pa.Table.from_pylist(rows), folder / "classes.parquet", row_group_size=4)


@functools.cache
def balanced(folder: Path, *columns: str) -> ShardedDataset:
    dataset = ShardedDataset(str(folder / "*.parquet"), columns=["kind", *columns], block_bytes=1)
    return dataset.balanced("kind", {"cat": 1, "dog": 2, "owl": 1.5}).select(columns)


def write_alternatives(folder: Path) -> None:
    """One shard has the first member only, one the second, one both or the second."""
    for shard, numbers in enumerate((range(15), range(15, 30), range(30, 47))):
        members = []
        for n in numbers:
            members.append((f"{n:03d}.n.cls", str(n).encode()))
            if shard == 0 or (shard == 2 and n % 2):
                members.append((f"{n:03d}.a.txt", f"a {n}".encode()))
            if shard > 0:
                members.append((f"{n:03d}.b.txt", f"b {n}".encode()))
        write_tar(folder / f"{shard}.tar", members)


def alternatives(folder: Path) -> ShardedDataset:
    columns = {"n": "n.cls", "text": "a.txt|b.txt|c.txt", "other": "b.txt|a.txt"}
    return ShardedDataset(str(folder / "*.tar"), columns=columns, block_bytes=5000)


def write_nested(folder: Path) -> None:
    rows = [{"id": n, "tags": ["a", None, "日"][: n % 4], "grid": [[n] * (n % 3), []]} for n in range(47)]
    (folder / "nested.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


ROWS: dict[str, Row] = {
    **{
        name: of_format(name)
        for name in (
            "tar",
            "tar.gz",
            "parquet",
            "tokens.bin",
            "megatron",
            "files",
            "mds",
            "litdata",
            "array_record",
            "tfrecord",
            "energon",
            "delta",
            "iceberg",
        )
        if name in MAKERS  # TFRecord's checksums are of an extra
    },
    "in file order": of_format("ints", None),
    "blocks": of_format("ints", Shuffle("blocks", 2)),
    "lanes of nodes": of_format("ints", NODES),
    "full shuffle": of_format("ints", Shuffle("full")),
    **{f"tail {tail}": of_format("ints", NODES, tail) for tail in ("drop", "pad", "even")},
    "draws": replace(of_format("ints", NODES, transform=Draws()), transforms=True),
    "view": Row(
        partial(write, "parquet"),
        lambda folder: opened(folder).subset([n for n in range(47) if n % 5]),
        {"shuffle": NODES},
    ),
    "random crops": Row(write_images, with_crops, {"shuffle": NODES}),
    "balanced": Row(write_classes, lambda folder: balanced(folder, "n"), {"shuffle": NODES}),
    "balanced, full shuffle": Row(
        write_classes, lambda folder: balanced(folder, "n"), {"shuffle": Shuffle("full")}
    ),
    "balanced, split": Row(
        write_classes,
        lambda folder: balanced(folder, "tokens"),
        {"batching": BATCHINGS["split"]("tokens"), "shuffle": NODES},
        packed_rows,
    ),
    "balanced, mixture": Row(
        write_classes,
        lambda folder: Mixture(
            {balanced(folder, "n"): 2, balanced(folder, "n").select(["n"]): 1}, stop="all"
        ),
        {"shuffle": NODES},
    ),
    "joined": Row(write_joined, joined),
    "missing values": Row(write_nulls, declared),
    "absent members": Row(write_members, with_members),
    "filter": Row(write_nulls, filtered),
    "left out": Row(write_nulls, partial(with_nulls, on_error="skip")),
    "alternatives": Row(write_alternatives, alternatives),
    "nested values": Row(
        write_nested, lambda folder: ShardedDataset(str(folder / "*.jsonl"), block_bytes=400)
    ),
    **{f"mixture, {rule}": mixture(rule) for rule in RULES},
    "mixture, tail even": mixture("all", tail="even"),
    "mixture, blocks": mixture("all", Shuffle("blocks", 2)),
    "mixture, in file order": mixture("all", Shuffle("none", 2, 2)),
    "mixture, weights set": mixture("all", weights=WEIGHTS),
    "mixture, weights set, first": mixture("first", weights=WEIGHTS),
    **{name: packed(name) for name in BATCHINGS},
    **{f"{name} mixture": packed_mixture(name, "all") for name in BATCHINGS},
    **{f"packed mixture, {rule}": packed_mixture("split", rule) for rule in RULES if rule != "all"},
    "companion columns": Row(
        partial(write, "parquet"),
        with_companions,
        {"batching": Packed(3, columns=["tokens", "mask"], window=16), "shuffle": NODES},
        lambda batch: list(zip(packed_rows(batch), batch["mask"].tolist(), strict=True)),
    ),
    "packed, tail pad": packed("packed", tail="pad"),
    "buckets, tail drop": packed("buckets", tail="drop"),
    "packed mixture, tokens": packed_mixture("split", "first", shares="tokens"),
    "buckets mixture, tokens": packed_mixture("buckets", "all", shares="tokens"),
    "packed mixture, weights set": packed_mixture("split", "all", weights=WEIGHTS.items()),
    "budget mixture, weights set, tokens": packed_mixture(
        "budget", "all", weights=WEIGHTS.items(), shares="tokens"
    ),
    **{f"measured {name}": measured(name) for name in BATCHINGS},
    **{f"planned {name}": planned(rule("tokens")) for name, rule in BATCHINGS.items()},
    "planned long rows": planned(Packed(12, "tokens", overlong="error", window=16)),
    "planned long rows, tail pad": planned(Packed(12, "tokens", window=16), tail="pad"),
    **{
        f"{name}, passed over": replace(row, options={**row.options, "skip_steps": [(1, 2), (10, 12)]})
        for name, row in {
            "lanes of nodes": of_format("ints", NODES),
            "full shuffle": of_format("ints", Shuffle("full")),
            "mixture": mixture("all"),
            "packed": packed("split"),
            "buckets": packed("buckets"),
            "planned packed": planned(BATCHINGS["packed"]("tokens")),
        }.items()
    },
    "measured packed, in file order": measured("packed", None),
    "measured packed mixture": packed_mixture("packed", "all", is_measured=True),
    "measured packed mixture, tokens": packed_mixture("packed", "first", is_measured=True, shares="tokens"),
    "measured packed mixture, weights set": packed_mixture(
        "split", "all", is_measured=True, weights=WEIGHTS.items()
    ),
}
