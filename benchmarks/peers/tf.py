"""tf.data: `AUTOTUNE` parallelism and prefetching as its guide advises; torch gets batches without a copy.

It decodes with TensorFlow's own libjpeg-turbo, cropping while decoding (`decode_and_crop_jpeg`), its best.
W2 and W4 are Examples, parsed a batch at a time (`parse_example`), as its guide to performance advises.
`workers` caps its private thread pool; 0 leaves that to TensorFlow.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import tensorflow as tf
import torch

from benchmarks.data import LENGTH, Data
from benchmarks.peers.torch import TarFields, Tokens

EXAMPLE_FILES = 10
"""Files of Examples, so that tf.data has several to read at once."""


def _records(data: Data) -> list[str]:
    """The images as TFRecords, in as many files as there are tars."""

    def make(folder: Path) -> None:
        folder.mkdir(parents=True)
        fields = TarFields(data.index("W1"), "jpg")
        for shard in range(len(fields.paths)):
            with tf.io.TFRecordWriter(str(folder / f"{shard:05d}.tfrecord")) as writer:
                for i in np.flatnonzero(fields.shard == shard):
                    writer.write(int(fields.labels[i]).to_bytes(8, "little") + fields.read(i))

    return sorted(str(p) for p in data.converted("tf-W1", make).glob("*.tfrecord"))


def prepare_w1(data: Data) -> None:
    _records(data)


def _examples(data: Data, workload: str, features: Callable[[int], dict[str, Any]], count: int) -> list[str]:
    """Samples as Examples."""

    def make(folder: Path) -> None:
        folder.mkdir(parents=True)
        for shard, numbers in enumerate(np.array_split(np.arange(count), EXAMPLE_FILES)):
            with tf.io.TFRecordWriter(str(folder / f"{shard:05d}.tfrecord")) as writer:
                for i in numbers.tolist():
                    example = tf.train.Example(features=tf.train.Features(feature=features(i)))
                    writer.write(example.SerializeToString())

    return sorted(str(p) for p in data.converted(f"tf-{workload}", make).glob("*.tfrecord"))


def _ints(values: list[int]) -> Any:
    return tf.train.Feature(int64_list=tf.train.Int64List(value=values))


def _record_examples(data: Data) -> list[str]:
    fields = TarFields(data.index("W4"), "bin")

    def features(i: int) -> dict[str, Any]:
        record = tf.train.Feature(bytes_list=tf.train.BytesList(value=[fields.read(i)]))
        return {"bin": record, "cls": _ints([int(fields.labels[i])])}

    return _examples(data, "W4", features, len(fields))


def _token_examples(data: Data) -> list[str]:
    tokens = Tokens(data)
    return _examples(data, "W2", lambda i: {"tokens": _ints(tokens[i].tolist())}, len(tokens))


class _Batches:
    def __init__(self, dataset: Any, workers: int) -> None:
        options = tf.data.Options()
        options.deterministic = False
        if workers:
            options.threading.private_threadpool_size = workers
        self._dataset = dataset.prefetch(tf.data.AUTOTUNE).with_options(options)

    def __iter__(self) -> Iterator[Any]:
        for images, labels in self._dataset.as_numpy_iterator():
            yield torch.from_numpy(images).permute(0, 3, 1, 2), torch.from_numpy(labels)


def w1(data: Data, workers: int) -> Iterable[Any]:
    def sample(record: Any) -> Any:
        label = tf.bitcast(tf.io.decode_raw(tf.strings.substr(record, 0, 8), tf.uint8), tf.int64)
        jpeg = tf.strings.substr(record, 8, -1)
        begin, size, _ = tf.image.sample_distorted_bounding_box(
            tf.io.extract_jpeg_shape(jpeg),
            tf.zeros([1, 0, 4]),
            area_range=(0.08, 1.0),
            aspect_ratio_range=(3 / 4, 4 / 3),
            min_object_covered=0.0,
            use_image_if_no_bounding_boxes=True,
        )
        crop = tf.image.decode_and_crop_jpeg(jpeg, tf.concat([begin[:2], size[:2]], 0), channels=3)
        image = tf.image.resize(crop, [224, 224], method="bilinear")
        return tf.cast(image, tf.uint8), label

    files = tf.data.Dataset.from_tensor_slices(_records(data)).shuffle(100)
    dataset = files.interleave(tf.data.TFRecordDataset, cycle_length=4, num_parallel_calls=tf.data.AUTOTUNE)
    dataset = dataset.shuffle(1000).map(sample, num_parallel_calls=tf.data.AUTOTUNE)
    return _Batches(dataset.batch(64, drop_remainder=True), workers)


class _Parsed:
    """Examples of several files, shuffled, and parsed a batch at a time."""

    def __init__(self, files: list[str], batch: int, parse: Callable[[Any], Any], workers: int) -> None:
        options = tf.data.Options()
        options.deterministic = False
        if workers:
            options.threading.private_threadpool_size = workers
        names = tf.data.Dataset.from_tensor_slices(files).shuffle(len(files))
        records = names.interleave(
            tf.data.TFRecordDataset, cycle_length=len(files), num_parallel_calls=tf.data.AUTOTUNE
        )
        batches = records.shuffle(1000).batch(batch, drop_remainder=True)
        parsed = batches.map(parse, num_parallel_calls=tf.data.AUTOTUNE).prefetch(tf.data.AUTOTUNE)
        self._dataset = parsed.with_options(options)

    def __iter__(self) -> Iterator[Any]:
        for parts in self._dataset.as_numpy_iterator():
            yield tuple(map(torch.from_numpy, parts))


def prepare_w2(data: Data) -> None:
    _token_examples(data)


def w2(data: Data, workers: int) -> Iterable[Any]:
    features = {"tokens": tf.io.FixedLenFeature([LENGTH + 1], tf.int64)}

    def parse(records: Any) -> Any:
        return (tf.io.parse_example(records, features)["tokens"],)

    return _Parsed(_token_examples(data), 16, parse, workers)


def prepare_w4(data: Data) -> None:
    _record_examples(data)


def w4(data: Data, workers: int) -> Iterable[Any]:
    features = {"bin": tf.io.FixedLenFeature([], tf.string), "cls": tf.io.FixedLenFeature([], tf.int64)}

    def parse(records: Any) -> Any:
        parts = tf.io.parse_example(records, features)
        return tf.io.decode_raw(parts["bin"], tf.uint8, fixed_length=data.sizes.record_bytes), parts["cls"]

    return _Parsed(_record_examples(data), 256, parse, workers)
