"""Read a folder that Megatron-Energon prepared, with its own loader and with this one.

python examples/from_energon.py FOLDER [before]
"""

import sys
from collections.abc import Iterator


def before(folder: str) -> Iterator[list[str]]:
    """Read with Energon, whose loader never ends by itself."""
    # [before]
    from megatron.energon import DefaultTaskEncoder, WorkerConfig, get_savable_loader, get_train_dataset

    dataset = get_train_dataset(
        folder,
        worker_config=WorkerConfig.default_worker_config(num_workers=1),
        task_encoder=DefaultTaskEncoder(),
        batch_size=1,
        shuffle_buffer_size=100,
        max_samples_per_sequence=100,
        repeat=False,
    )
    for batch in get_savable_loader(dataset):
        yield batch.caption
    # [end]


def after(folder: str) -> Iterator[list[str]]:
    """Read the same folder as it lies: its split "train", with the fields of its dataset.yaml."""
    # [after]
    from dataflow import DataLoader, ShardedDataset

    dataset = ShardedDataset(folder, split="train")
    with DataLoader(dataset, batch_size=1, shuffle=True, seed=0) as loader:
        for batch in loader:
            yield batch["caption"]
    # [end]


def main() -> None:
    """Count an epoch; both ways print the same."""
    read = before if sys.argv[2:] == ["before"] else after
    captions = [caption for batch in read(sys.argv[1]) for caption in batch]
    print(f"{len(captions)} captions, the last of which is {max(captions)!r}")


if __name__ == "__main__":
    main()
