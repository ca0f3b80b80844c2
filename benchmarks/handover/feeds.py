"""What is handed over: datasets whose samples cost next to nothing, so that what remains is the hand-over.

Sources that are tensors are made at the first access, in the process that reads them: a loader that pickles
the dataset for its workers is not charged for them. The tokens are the exception: a dataset that holds its
data in memory has to reach each worker, and that array (32 MB) does.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, default_collate

EPOCH_BATCHES = 1 << 16
"""Batches of an epoch where no epoch end is wanted."""
IMAGE = (3, 224, 224)
FIELD_FLOATS = 8
TOKENS, WINDOW, STEP = 1 << 24, 2049, 2048
BASE_S, DELAY_S, DELAYED_SHARE = 0.001, 0.005, 0.01
_GOLDEN = 0.6180339887498949


class Images(Dataset[torch.Tensor]):
    """Sample i is image i % 64 of a bank in memory."""

    def __init__(self, length: int) -> None:
        self._length, self._bank = length, None

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, i: int) -> torch.Tensor:
        if self._bank is None:
            fill = torch.arange(64, dtype=torch.uint8).view(-1, 1, 1, 1)
            self._bank = fill.expand(64, *IMAGE).contiguous()
        return self._bank[i % 64]


class Fields(Dataset[dict[str, torch.Tensor]]):
    """Sample i is a dict of `num` float32 tensors of 8 values, ready in memory."""

    def __init__(self, length: int, num: int) -> None:
        self._length, self._num, self._bank = length, num, None

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        if self._bank is None:
            values = torch.arange(16.0).view(-1, 1, 1).repeat(1, self._num, FIELD_FLOATS)
            names = [f"field{n:03d}" for n in range(self._num)]
            self._bank = [dict(zip(names, rows, strict=True)) for rows in values]
        return self._bank[i % 16]


class Scalars(Dataset[int]):
    """Sample i is the int i."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, i: int) -> int:
        return i


class Tokens(Dataset[torch.Tensor]):
    """Windows of 2,049 tokens of a uint16 array, spread over it, a whole batch in one gather."""

    def __init__(self, length: int) -> None:
        self._length = length
        self._tokens = np.arange(TOKENS, dtype=np.uint32).astype(np.uint16)

    def __len__(self) -> int:
        return self._length

    def __getitems__(self, picks: Sequence[int]) -> torch.Tensor:
        count = TOKENS // STEP - 1
        rows = torch.as_tensor(picks) * 7919 % count  # neighbours are far apart, as after a shuffle
        windows = torch.from_numpy(self._tokens.view(np.int16)).as_strided((count, WINDOW), (STEP, 1))
        return windows.index_select(0, rows).view(torch.uint16).to(torch.int64)

    def __getitem__(self, i: int) -> torch.Tensor:
        return self.__getitems__([i])[0]


class Waits(Dataset[int]):
    """Each sample sleeps 1 ms, as if it were read; with `delayed`, one in 100 sleeps 5 ms more.

    The delayed ones are spread evenly (a golden-ratio sequence), at no fixed distance.
    """

    def __init__(self, length: int, delayed: bool) -> None:
        self._length, self._delayed = length, delayed

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, i: int) -> int:
        late = self._delayed and is_delayed(i)
        time.sleep(BASE_S + DELAY_S if late else BASE_S)
        return i


def is_delayed(i: int) -> bool:
    return i * _GOLDEN % 1 < DELAYED_SHARE


@dataclass(frozen=True)
class Feed:
    """A dataset and how its batches are made."""

    dataset: Any
    batch_size: int
    collate: Callable[[Any], Any]
    delivers: str
    batch_bytes: int
    held: int = 1
    """Batches the consumer keeps at a time."""


def _as_is(batch: torch.Tensor) -> torch.Tensor:
    return batch


def images(batches: int = EPOCH_BATCHES) -> Feed:
    dataset, size = Images(64 * batches), 64 * 3 * 224 * 224
    return Feed(dataset, 64, default_collate, "uint8[64, 3, 224, 224]", size)


def fields(num: int, *, held: int = 1) -> Feed:
    size, delivers = num * 16 * FIELD_FLOATS * 4, f"{num} x float32[16, {FIELD_FLOATS}]"
    return Feed(Fields(16 * EPOCH_BATCHES, num), 16, default_collate, delivers, size, held)


def scalars() -> Feed:
    return Feed(Scalars(256 * EPOCH_BATCHES), 256, default_collate, "int64[256]", 256 * 8)


def tokens() -> Feed:
    return Feed(Tokens(16 * EPOCH_BATCHES), 16, _as_is, f"int64[16, {WINDOW}]", 16 * WINDOW * 8)


def waits(*, delayed: bool) -> Feed:
    return Feed(Waits(32 * EPOCH_BATCHES, delayed), 32, default_collate, "int64[32]", 32 * 8)


class Fetch:
    """Indices of a batch -> the batch, as torch's workers do it; for loaders that take a function."""

    def __init__(self, feed: Feed) -> None:
        self._dataset, self._collate = feed.dataset, feed.collate

    def __call__(self, picks: Sequence[int]) -> Any:
        if hasattr(self._dataset, "__getitems__"):
            return self._collate(self._dataset.__getitems__(picks))
        return self._collate([self._dataset[i] for i in picks])


def described(batch: Any) -> str:
    """Type and shape of a batch, as in `Feed.delivers`."""
    if isinstance(batch, Mapping):
        shapes = {described(value) for value in batch.values()}
        return f"{len(batch)} x {' or '.join(sorted(shapes))}"
    return f"{str(batch.dtype).removeprefix('torch.')}{list(batch.shape)}"


def first_tensor(batch: Any) -> torch.Tensor:
    return next(iter(batch.values())) if isinstance(batch, Mapping) else batch
