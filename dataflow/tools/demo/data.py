"""Input that every machine has: the source text of Python's standard library, as shards.

Two forms of the same bytes: flat files of uint8 tokens (a byte is a token), cut where the volume of a shard
is reached, and WebDataset tars with one module a sample. Both are the same for the same Python, whatever
the machine: modules in sorted order, no times, no names of users.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from time import perf_counter
from typing import Any

from dataflow.dataset import ShardedDataset
from dataflow.loader import DataLoader
from sharding.write.writer import ShardWriter

LENGTH = 128
"""Tokens a sample is trained on."""
_SHARD_BYTES = 2 << 20
_LEFT_OUT = {"__pycache__", "dist-packages", "idlelib", "lib2to3", "site-packages", "test", "tests"}
_SEPARATOR = b"\n\0\n"
"""Stands between modules, so that the model sees where one ends."""


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """The shards that were written."""

    folder: str
    num_modules: int
    num_bytes: int
    """The bytes of source text."""
    token_shards: int
    tar_shards: int
    seconds: float


@dataclass(frozen=True)
class TarPass:
    """One pass over the tars."""

    modules: tuple[dict[str, Any], ...]
    """Name, bytes and lines of each, as its JSON tells them, in the order of the tars."""
    num_bytes: int
    """Bytes of source text delivered."""
    seconds: float


def write_corpus(folder: Path, max_modules: int | None = None) -> Corpus:
    """Write `tokens-*.bin` with their catalog, and `modules-*.tar`."""
    began = perf_counter()
    texts = list(islice(_modules(), max_modules))
    return Corpus(
        folder=str(folder),
        num_modules=len(texts),
        num_bytes=sum(len(text) for _, text in texts),
        token_shards=_write_tokens(folder, texts),
        tar_shards=_write_tars(folder, texts),
        seconds=perf_counter() - began,
    )


def tokens(folder: str | Path) -> ShardedDataset:
    """The token files; their catalog lies beside them."""
    return ShardedDataset(
        f"{folder}/tokens-*.bin",
        format="tokens",
        dtype="uint8",
        length=LENGTH,
        catalog=f"{folder}/tokens.catalog",
    )


def read_tars(folder: str | Path) -> TarPass:
    """Stream all modules through a loader; text and JSON arrive decoded."""
    began = perf_counter()
    dataset = ShardedDataset(f"{folder}/modules-*.tar", catalog=f"{folder}/modules.catalog")
    modules: list[dict[str, Any]] = []
    num_bytes = 0
    with DataLoader(dataset, batch_size=32, shuffle=False) as loader:
        for batch in loader:
            num_bytes += sum(len(text.encode()) for text in batch["txt"])
            modules += batch["json"]
    return TarPass(tuple(modules), num_bytes, perf_counter() - began)


def _modules() -> Iterator[tuple[str, bytes]]:
    """Dotted name and UTF-8 source of each module, in sorted order."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).with_suffix("")
        text = b"" if _LEFT_OUT.intersection(name.parts) else path.read_bytes()
        try:
            text.decode()
        except UnicodeDecodeError:
            continue
        if text:
            yield ".".join(name.parts), text


def _write_tokens(folder: Path, texts: list[tuple[str, bytes]]) -> int:
    joined = _SEPARATOR.join(text for _, text in texts)
    starts = range(0, len(joined), _SHARD_BYTES)
    for number, start in enumerate(starts):
        (folder / f"tokens-{number:06d}.bin").write_bytes(joined[start : start + _SHARD_BYTES])
    tokens(folder)  # indexes them, once for all ranks
    return len(starts)


def _write_tars(folder: Path, texts: list[tuple[str, bytes]]) -> int:
    with ShardWriter(f"{folder}/modules-%06d.tar", max_count=200, overwrite=True) as writer:
        for number, (name, text) in enumerate(texts):
            about = {"name": name, "bytes": len(text), "lines": text.count(b"\n")}
            # Keys are numbers: WebDataset ends a key at its first dot and skips names like `__init__`.
            writer.write({"__key__": f"{number:06d}", "txt": text.decode(), "json": about})
    return len(writer.shards)
