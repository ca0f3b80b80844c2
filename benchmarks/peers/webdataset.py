"""WebDataset as documented: shard shuffle, a shuffle buffer, batches made in the pipeline, `WebLoader`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
import webdataset as wds

from benchmarks.data import Data


def _loader(
    urls: list[str], workers: int, batch: int, buffer: int, sample: Callable[..., Any], collate: Any
) -> Any:
    pipeline = (
        wds.WebDataset(urls, shardshuffle=len(urls), empty_check=False)
        .shuffle(buffer)
        .map(sample)
        .batched(batch, collation_fn=collate, partial=False)
    )
    return wds.WebLoader(pipeline, batch_size=None, num_workers=workers, persistent_workers=workers > 0)


def w1(data: Data, workers: int) -> Iterable[Any]:
    from benchmarks.peers.images import decode_crop_resize
    from benchmarks.peers.torch import collate_images

    def sample(fields: dict[str, Any]) -> Any:
        return decode_crop_resize(fields["jpg"]), int(fields["cls"])

    return _loader(data.files("W1"), workers, 64, 1000, sample, collate_images)


def w1_raw(data: Data, workers: int) -> Iterable[Any]:
    def sample(fields: dict[str, Any]) -> Any:
        return fields["jpg"], int(fields["cls"])

    def collate(samples: list[Any]) -> Any:
        values, labels = zip(*samples, strict=True)
        return list(values), torch.tensor(labels)

    return _loader(data.files("W1-raw"), workers, 64, 200, sample, collate)


def w4(data: Data, workers: int) -> Iterable[Any]:
    def sample(fields: dict[str, Any]) -> Any:
        return np.frombuffer(fields["bin"], np.uint8), int(fields["cls"])

    def collate(samples: list[Any]) -> Any:
        values, labels = zip(*samples, strict=True)
        return torch.from_numpy(np.stack(values)), torch.tensor(labels)

    return _loader(data.files("W4"), workers, 256, 1000, sample, collate)
