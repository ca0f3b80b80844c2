"""LitData over its own chunks, made by `optimize`; `TokensLoader` for tokens, `StreamingDataLoader`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import litdata
import numpy as np
import torch
from litdata.streaming.item_loader import TokensLoader

from benchmarks.data import LENGTH, Data
from benchmarks.peers.torch import TarFields, collate_images


def _optimize(data: Data, name: str, inputs: list[Any], convert: Callable[..., Any], **options: Any) -> str:
    def make(folder: Path) -> None:
        litdata.optimize(
            convert, inputs, str(folder), num_workers=1, chunk_bytes="64MB", verbose=False, **options
        )

    return str(data.converted(name, make))


def _ranges(n: int, pieces: int) -> list[tuple[int, int]]:
    ends = np.linspace(0, n, pieces + 1).astype(int).tolist()
    return list(pairwise(ends))


def _convert_members(rows: tuple[int, int], *, data: Data, workload: str, extension: str) -> Iterator[Any]:
    fields = TarFields(data.index(workload), extension)
    for i in range(*rows):
        yield {extension: fields.read(i), "cls": int(fields.labels[i])}


def _members(data: Data, workload: str, extension: str) -> str:
    convert = partial(_convert_members, data=data, workload=workload, extension=extension)
    return _optimize(data, f"litdata-{workload}", _ranges(len(data.index(workload)), 8), convert)


def _convert_tokens(path: str) -> Iterator[torch.Tensor]:
    tokens = np.fromfile(path, np.uint16)
    for at in range(0, len(tokens), 1 << 22):
        yield torch.from_numpy(tokens[at : at + (1 << 22)])


def _tokens(data: Data) -> str:
    return _optimize(data, "litdata-W2", data.files("W2"), _convert_tokens, item_loader=TokensLoader())


class _Mapped(litdata.StreamingDataset):
    def __init__(self, folder: str, sample: Callable[[Any], Any], **options: Any) -> None:
        super().__init__(folder, shuffle=True, drop_last=True, **options)
        self._sample = sample

    def __getitem__(self, at: Any) -> Any:
        return self._sample(super().__getitem__(at))


def _loader(dataset: _Mapped, batch: int, collate: Callable[..., Any], workers: int) -> Any:
    options = {"num_workers": workers, "persistent_workers": workers > 0}
    return litdata.StreamingDataLoader(
        dataset, batch_size=batch, collate_fn=collate, drop_last=True, **options
    )


def prepare_w1(data: Data) -> None:
    _members(data, "W1", "jpg")


prepare_w1_raw = prepare_w1


def w1(data: Data, workers: int) -> Iterable[Any]:
    from benchmarks.peers.images import decode_crop_resize

    def sample(fields: dict[str, Any]) -> Any:
        return decode_crop_resize(fields["jpg"]), fields["cls"]

    return _loader(_Mapped(_members(data, "W1", "jpg"), sample), 64, collate_images, workers)


def w1_raw(data: Data, workers: int) -> Iterable[Any]:
    def collate(samples: list[Any]) -> Any:
        return [s["jpg"] for s in samples], torch.tensor([s["cls"] for s in samples])

    return _loader(_Mapped(_members(data, "W1", "jpg"), lambda s: s), 64, collate, workers)


def prepare_w2(data: Data) -> None:
    _tokens(data)


def w2(data: Data, workers: int) -> Iterable[Any]:
    """Blocks of 2,049 tokens: LitData's blocks do not overlap."""

    def collate(samples: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack(samples).to(torch.int64)

    loader = TokensLoader(block_size=LENGTH + 1)
    return _loader(_Mapped(_tokens(data), lambda s: s, item_loader=loader), 16, collate, workers)


def prepare_w4(data: Data) -> None:
    _members(data, "W4", "bin")


def w4(data: Data, workers: int) -> Iterable[Any]:
    def collate(samples: list[Any]) -> Any:
        values = np.stack([np.frombuffer(s["bin"], np.uint8) for s in samples])
        return torch.from_numpy(values), torch.tensor([s["cls"] for s in samples])

    return _loader(_Mapped(_members(data, "W4", "bin"), lambda s: s), 256, collate, workers)
