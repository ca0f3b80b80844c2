"""Read a folder of LitData, with its own loader and with this one.

python examples/from_litdata.py FOLDER [before]
"""

import sys
from collections.abc import Iterator
from typing import Any


def before(folder: str) -> Iterator[dict[str, Any]]:
    """Read with LitData."""
    # [before]
    from litdata import StreamingDataLoader, StreamingDataset

    dataset = StreamingDataset(folder, shuffle=True, seed=0)
    yield from StreamingDataLoader(dataset, batch_size=4, num_workers=2)
    # [end]


def after(folder: str) -> Iterator[dict[str, Any]]:
    """Read the same folder as it lies."""
    # [after]
    from dataflow import DataLoader, ShardedDataset

    with DataLoader(ShardedDataset(folder), batch_size=4, shuffle=True, seed=0) as loader:
        yield from loader
    # [end]


def main() -> None:
    """Count an epoch; both ways print the same."""
    read = before if sys.argv[2:] == ["before"] else after
    texts = [text for batch in read(sys.argv[1]) for text in batch["t"]]
    print(f"{len(texts)} texts of {sum(map(len, texts))} characters")


if __name__ == "__main__":
    main()
