"""Mosaic Streaming over MDS shards, local; samples decoded in `__getitem__`, `StreamingDataLoader` batches.

`streaming` imports torchvision and transformers for ready-made datasets, not used here. PyPI's torchvision
does not load beside a CPU build of torch, so both get empty stand-ins.
"""

# ruff: noqa: E402 -- the stand-ins must be there before `streaming` is imported
from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any


class _StandIn(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


for _name in (
    "torchvision",
    "torchvision.datasets",
    "torchvision.transforms",
    "torchvision.transforms.functional",
    "transformers",
    "transformers.feature_extraction_utils",
    "transformers.models",
    "transformers.models.auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.tokenization_utils_base",
):
    sys.modules[_name] = _StandIn(_name)

import numpy as np
import torch
from streaming import MDSWriter, StreamingDataLoader, StreamingDataset
from streaming.base.util import clean_stale_shared_memory

from benchmarks.data import Data
from benchmarks.peers.torch import TarFields, Tokens, collate_images


def _write(
    data: Data, name: str, columns: dict[str, str], samples: Callable[[], Iterator[dict[str, Any]]]
) -> str:
    def make(folder: Path) -> None:
        with MDSWriter(out=str(folder), columns=columns, size_limit=1 << 26) as writer:
            for sample in samples():
                writer.write(sample)

    return str(data.converted(name, make))


def _members(data: Data, workload: str, extension: str) -> str:
    def samples() -> Iterator[dict[str, Any]]:
        fields = TarFields(data.index(workload), extension)
        for i in range(len(fields)):
            yield {extension: fields.read(i), "cls": int(fields.labels[i])}

    return _write(data, f"mosaic-{workload}", {extension: "bytes", "cls": "int"}, samples)


def _tokens(data: Data) -> str:
    def samples() -> Iterator[dict[str, Any]]:
        tokens = Tokens(data)
        for i in range(len(tokens)):
            yield {"tokens": tokens[i].numpy().astype(np.uint16)}

    return _write(data, "mosaic-W2", {"tokens": "ndarray:uint16"}, samples)


class _Mapped(StreamingDataset):
    def __init__(self, local: str, batch_size: int, sample: Callable[[Any], Any]) -> None:
        clean_stale_shared_memory()
        super().__init__(local=local, shuffle=True, batch_size=batch_size)
        self._sample = sample

    def __getitem__(self, at: Any) -> Any:
        return self._sample(super().__getitem__(at))


def _loader(dataset: _Mapped, batch: int, collate: Callable[..., Any], workers: int) -> Any:
    options = {"num_workers": workers, "persistent_workers": workers > 0}
    return StreamingDataLoader(dataset, batch_size=batch, collate_fn=collate, drop_last=True, **options)


def prepare_w1(data: Data) -> None:
    _members(data, "W1", "jpg")


prepare_w1_raw = prepare_w1


def w1(data: Data, workers: int) -> Iterable[Any]:
    from benchmarks.peers.images import decode_crop_resize

    def sample(fields: dict[str, Any]) -> Any:
        return decode_crop_resize(fields["jpg"]), fields["cls"]

    return _loader(_Mapped(_members(data, "W1", "jpg"), 64, sample), 64, collate_images, workers)


def w1_raw(data: Data, workers: int) -> Iterable[Any]:
    def collate(samples: list[Any]) -> Any:
        return [s["jpg"] for s in samples], torch.tensor([s["cls"] for s in samples])

    return _loader(_Mapped(_members(data, "W1", "jpg"), 64, lambda s: s), 64, collate, workers)


def prepare_w2(data: Data) -> None:
    _tokens(data)


def w2(data: Data, workers: int) -> Iterable[Any]:
    def collate(samples: list[Any]) -> Any:
        return torch.from_numpy(np.stack(samples).astype(np.int64))

    return _loader(_Mapped(_tokens(data), 16, lambda s: s["tokens"]), 16, collate, workers)


def prepare_w4(data: Data) -> None:
    _members(data, "W4", "bin")


def w4(data: Data, workers: int) -> Iterable[Any]:
    def collate(samples: list[Any]) -> Any:
        values = np.stack([np.frombuffer(s["bin"], np.uint8) for s in samples])
        return torch.from_numpy(values), torch.tensor([s["cls"] for s in samples])

    return _loader(_Mapped(_members(data, "W4", "bin"), 256, lambda s: s), 256, collate, workers)
