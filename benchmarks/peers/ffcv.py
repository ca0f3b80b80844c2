"""FFCV over its own `.beton` files, written by its `DatasetWriter` from the same bytes.

Python loops of its operations are compiled by numba when an epoch begins, which the first batch pays for.
It has no wheel and is not part of an extra: see docs/notes/benchmarks.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from ffcv.fields import BytesField, IntField, NDArrayField, RGBImageField
from ffcv.fields.decoders import (
    BytesDecoder,
    IntDecoder,
    NDArrayDecoder,
    RandomResizedCropRGBImageDecoder,
)
from ffcv.loader import Loader, OrderOption
from ffcv.transforms import Convert, Squeeze, ToTensor, ToTorchImage
from ffcv.writer import DatasetWriter

from benchmarks.data import LENGTH, Data
from benchmarks.peers.torch import TarFields, Tokens


class _Members:
    """Map-style samples of a tar workload: the value as FFCV's writer wants it, and the class."""

    def __init__(self, data: Data, workload: str, extension: str, value: Callable[[bytes], Any]) -> None:
        self._fields, self._value = TarFields(data.index(workload), extension), value

    def __len__(self) -> int:
        return len(self._fields)

    def __getitem__(self, i: int) -> tuple[Any, int]:
        return self._value(self._fields.read(i)), int(self._fields.labels[i])


class _Windows:
    """The windows of tokens, as stored."""

    def __init__(self, data: Data) -> None:
        self._tokens, self._n = np.fromfile(data.files("W2")[0], np.uint16), len(Tokens(data))

    def __len__(self) -> int:
        return self._n

    def __getitem__(self, i: int) -> tuple[Any]:
        return (self._tokens[i * LENGTH : i * LENGTH + LENGTH + 1],)


def _pixels(jpeg: bytes) -> Any:
    import simplejpeg

    return simplejpeg.decode_jpeg(jpeg)


def _bytes(value: bytes) -> Any:
    return np.frombuffer(value, np.uint8)


def _beton(data: Data, name: str, make: Callable[[], Any], fields: Mapping[str, Any]) -> str:
    def write(folder: Path) -> None:
        folder.mkdir(parents=True)
        DatasetWriter(str(folder / "data.beton"), dict(fields), num_workers=2).from_indexed_dataset(make())

    return str(data.converted(f"ffcv-{name}", write) / "data.beton")


def _loader(path: str, batch: int, workers: int, pipelines: Mapping[str, list[Any]]) -> Any:
    options = {"order": OrderOption.RANDOM, "os_cache": True, "drop_last": True}
    return Loader(path, batch_size=batch, num_workers=max(1, workers), pipelines=dict(pipelines), **options)


def _label() -> list[Any]:
    return [IntDecoder(), ToTensor(), Squeeze(1)]


def _w1(data: Data) -> str:
    """Its writer takes pixels: it encodes them anew, at its default quality of 90."""
    fields = {"image": RGBImageField(write_mode="jpg"), "label": IntField()}
    return _beton(data, "W1", lambda: _Members(data, "W1", "jpg", _pixels), fields)


def prepare_w1(data: Data) -> None:
    _w1(data)


def w1(data: Data, workers: int) -> Iterable[Any]:
    image = [RandomResizedCropRGBImageDecoder((224, 224)), ToTensor(), ToTorchImage()]
    return _loader(_w1(data), 64, workers, {"image": image, "label": _label()})


def _w1_raw(data: Data) -> str:
    """Of W1's 4,000 images, not of the links to them, of which it would make copies."""
    fields = {"jpg": BytesField(), "label": IntField()}
    return _beton(data, "W1-raw", lambda: _Members(data, "W1", "jpg", _bytes), fields)


def prepare_w1_raw(data: Data) -> None:
    _w1_raw(data)


def w1_raw(data: Data, workers: int) -> Iterable[Any]:
    """Values in rows as long as the longest: FFCV has no other form."""
    return _loader(_w1_raw(data), 64, workers, {"jpg": [BytesDecoder(), ToTensor()], "label": _label()})


def _w2(data: Data) -> str:
    fields = {"tokens": NDArrayField(np.dtype(np.uint16), (LENGTH + 1,))}
    return _beton(data, "W2", lambda: _Windows(data), fields)


def prepare_w2(data: Data) -> None:
    _w2(data)


def w2(data: Data, workers: int) -> Iterable[Any]:
    import torch

    return _loader(_w2(data), 16, workers, {"tokens": [NDArrayDecoder(), ToTensor(), Convert(torch.int64)]})


def _w4(data: Data) -> str:
    fields = {"bin": NDArrayField(np.dtype(np.uint8), (data.sizes.record_bytes,)), "label": IntField()}
    return _beton(data, "W4", lambda: _Members(data, "W4", "bin", _bytes), fields)


def prepare_w4(data: Data) -> None:
    _w4(data)


def w4(data: Data, workers: int) -> Iterable[Any]:
    return _loader(_w4(data), 256, workers, {"bin": [NDArrayDecoder(), ToTensor()], "label": _label()})
