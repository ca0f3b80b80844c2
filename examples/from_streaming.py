"""Read a folder of MosaicML Streaming (MDS), with its own loader and with this one.

python examples/from_streaming.py FOLDER [before]
"""

import sys
from collections.abc import Iterator
from typing import Any


def before(folder: str) -> Iterator[dict[str, Any]]:
    """Read with Streaming."""
    # [before]
    from streaming import StreamingDataLoader, StreamingDataset

    dataset = StreamingDataset(local=folder, shuffle=True, shuffle_seed=0, batch_size=8)
    loader = StreamingDataLoader(dataset, batch_size=8, num_workers=2)
    yield from loader
    # [end]


def after(folder: str) -> Iterator[dict[str, Any]]:
    """Read the same folder as it lies."""
    # [after]
    from dataflow import DataLoader, ShardedDataset

    dataset = ShardedDataset(folder)
    with DataLoader(dataset, batch_size=8, shuffle=True, seed=0) as loader:
        yield from loader
    # [end]


def main() -> None:
    """Count an epoch; both ways print the same."""
    read = before if sys.argv[2:] == ["before"] else after
    batches = [batch["a"].tolist() for batch in read(sys.argv[1])]
    print(f"{len(batches)} batches of {sum(map(len, batches))} samples, of which the sum is", end=" ")
    print(sum(map(sum, batches)))


if __name__ == "__main__":
    main()
