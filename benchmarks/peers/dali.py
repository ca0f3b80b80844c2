"""DALI over the plain tars: its native reader with an index file a shard, on the CPU (`device_id=None`).

Classes arrive as the digits they are written in: they are padded to one width and read as a batch.
It is not part of an extra, its wheels being CUDA builds: see docs/notes/benchmarks.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from nvidia.dali import fn, pipeline_def, types
from nvidia.dali.plugin.pytorch import DALIGenericIterator, DALIRaggedIterator, LastBatchPolicy
from wds2idx import IndexCreator

from benchmarks.data import Data

READER = "members"
LIST, DENSE = DALIRaggedIterator.SPARSE_LIST_TAG, DALIRaggedIterator.DENSE_TAG


def _indexes(data: Data, workload: str) -> list[str]:
    """One index a shard, as its own `wds2idx` writes it."""

    def write(folder: Path) -> None:
        folder.mkdir(parents=True)
        for path in data.files(workload):
            with IndexCreator(path, str(folder / f"{Path(path).stem}.idx"), verbose=False) as creator:
                creator.create_index()

    return sorted(str(path) for path in data.converted(f"dali-{workload}", write).glob("*.idx"))


class _Batches:
    """An epoch each time it is iterated over: the columns, with the classes as numbers."""

    def __init__(self, iterator: Any) -> None:
        self._iterator = iterator

    def __iter__(self) -> Iterator[tuple[Any, torch.Tensor]]:
        for (batch,) in self._iterator:
            digits = batch["label"].numpy()
            labels = digits.view(f"S{digits.shape[1]}").ravel().astype(np.int64)
            yield batch["value"], torch.from_numpy(labels)


def _loader(
    data: Data,
    workload: str,
    extension: str,
    batch: int,
    threads: int,
    buffer: int,
    value: Callable[[Any], Any],
    ragged: bool = False,
) -> Iterable[Any]:
    paths, indexes = data.files(workload), _indexes(data, workload)

    @pipeline_def(batch_size=batch, num_threads=max(1, threads), device_id=None)
    def pipeline() -> Any:
        encoded, label = fn.readers.webdataset(
            paths=paths,
            index_paths=indexes,
            ext=[extension, "cls"],
            random_shuffle=True,
            initial_fill=buffer,
            missing_component_behavior="error",
            name=READER,
        )
        return value(encoded), fn.pad(label, shape=[3])

    made = pipeline()
    made.build()
    options = {
        "reader_name": READER,
        "auto_reset": True,
        "last_batch_policy": LastBatchPolicy.DROP,
    }
    names = ["value", "label"]
    if ragged:
        return _Batches(DALIRaggedIterator([made], names, output_types=[LIST, DENSE], **options))
    return _Batches(DALIGenericIterator([made], names, **options))


def prepare_w1(data: Data) -> None:
    _indexes(data, "W1")


def w1(data: Data, workers: int) -> Iterable[Any]:
    def image(encoded: Any) -> Any:
        pixels = fn.decoders.image_random_crop(encoded, device="cpu", output_type=types.RGB)
        pixels = fn.resize(pixels, size=[224, 224])
        return fn.crop_mirror_normalize(pixels, dtype=types.UINT8, output_layout="CHW")

    return _loader(data, "W1", "jpg", 64, workers, 1000, image)


def prepare_w1_raw(data: Data) -> None:
    _indexes(data, "W1-raw")


def w1_raw(data: Data, workers: int) -> Iterable[Any]:
    return _loader(data, "W1-raw", "jpg", 64, workers, 200, lambda encoded: encoded, ragged=True)


def prepare_w4(data: Data) -> None:
    _indexes(data, "W4")


def w4(data: Data, workers: int) -> Iterable[Any]:
    return _loader(data, "W4", "bin", 256, workers, 1000, lambda encoded: encoded)
