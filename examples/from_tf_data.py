"""Read files of TFRecord, with tf.data and with this loader.

python examples/from_tf_data.py FILES [before]
"""

import sys
from collections.abc import Iterator


def before(files: str) -> Iterator[int]:
    """Read with tf.data."""
    # [before]
    import tensorflow as tf

    features = {"label": tf.io.FixedLenFeature([], tf.int64)}
    dataset = (
        tf.data.Dataset.list_files(files)
        .interleave(tf.data.TFRecordDataset)
        .shuffle(1000, seed=0)
        .map(lambda record: tf.io.parse_single_example(record, features))
        .batch(8)
        .prefetch(tf.data.AUTOTUNE)
    )
    for batch in dataset:
        yield from batch["label"].numpy().tolist()
    # [end]


def after(files: str) -> Iterator[int]:
    """Read the same files as they lie, without TensorFlow."""
    # [after]
    from dataflow import DataLoader, ShardedDataset

    dataset = ShardedDataset(files, columns=["label"])
    with DataLoader(dataset, batch_size=8, shuffle=True, seed=0) as loader:
        for batch in loader:
            yield from batch["label"].tolist()
    # [end]


def main() -> None:
    """Count an epoch; both ways print the same."""
    read = before if sys.argv[2:] == ["before"] else after
    labels = list(read(sys.argv[1]))
    print(f"{len(labels)} records, with labels up to {max(labels)}")


if __name__ == "__main__":
    main()
