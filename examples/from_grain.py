"""Read files of ArrayRecord, with Grain and with this loader.

python examples/from_grain.py FILES [before]
"""

import glob
import sys
from collections.abc import Iterator


def before(files: str) -> Iterator[int]:
    """Read with Grain."""
    # [before]
    import grain

    source = grain.sources.ArrayRecordDataSource(sorted(glob.glob(files)))
    dataset = grain.MapDataset.source(source).shuffle(seed=0).map(label_of).batch(8)
    for labels in dataset.to_iter_dataset():
        yield from labels.tolist()
    # [end]


def label_of(record: bytes) -> int:
    """The label in a record: a `tf.train.Example`, whose message TensorFlow has."""
    from tensorflow.train import Example

    return Example.FromString(record).features.feature["label"].int64_list.value[0]


def after(files: str) -> Iterator[int]:
    """Read the same files as they lie: the features of an `Example` are columns."""
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
