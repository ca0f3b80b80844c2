"""Train on a Delta table; its state goes on at the version that it was taken at, though the table grew.

python examples/delta_table.py
"""

import tempfile

import deltalake
import numpy as np
import pyarrow as pa

from dataflow import DataLoader, ShardedDataset


def append(folder: str, first: int, day: str) -> None:
    """Somebody writes 60 rows."""
    rows = {"x": np.arange(first, first + 60, dtype=np.float32), "day": [day] * 60}
    deltalake.write_deltalake(folder, pa.table(rows), mode="append", partition_by=["day"])


def main() -> None:
    """Stop in the middle of an epoch, and go on when the table has another version."""
    with tempfile.TemporaryDirectory() as folder:
        append(folder, 0, "monday")
        append(folder, 60, "tuesday")

        # [table]
        dataset = ShardedDataset(folder)  # its last version
        with DataLoader(dataset, batch_size=20, shuffle=True, seed=0) as loader:
            seen = [x for _, batch in zip(range(2), loader, strict=False) for x in batch["x"].tolist()]
            state = {"loader": loader.state_dict(), "version": dataset.commit}
        print(f"version {dataset.commit}: {len(dataset)} rows, stopped after {len(seen)}")

        append(folder, 120, "wednesday")
        print(f"version {ShardedDataset(folder).commit}: {len(ShardedDataset(folder))} rows")

        dataset = ShardedDataset(folder, revision=state["version"])
        with DataLoader(dataset, batch_size=20, shuffle=True, seed=0) as loader:
            loader.load_state_dict(state["loader"])
            seen += [x for batch in loader for x in batch["x"].tolist()]
        print(f"resumed at version {dataset.commit}: each of {len(set(seen))} rows once")
        # [end]


if __name__ == "__main__":
    main()
