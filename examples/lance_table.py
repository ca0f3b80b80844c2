"""Train on a Lance table as it lies: a map-style dataset whose batches are one `take` each.

python examples/lance_table.py
"""

import tempfile
from pathlib import Path

import lance
import numpy as np
import pyarrow as pa
import torch
from torch.utils.data import Dataset

from dataflow import DataLoader


class LanceTable(Dataset):
    """The rows of a Lance table at a version; pickled, it is its path and version."""

    def __init__(self, uri: str, version: int | None = None):
        table = lance.dataset(uri, version)
        self.uri, self.version, self.num_rows = uri, table.version, table.count_rows()
        self._table = None  # each worker opens its own

    def __len__(self):
        return self.num_rows

    # [take]
    def __getitems__(self, indices):  # a batch: the loader asks for all of its rows at once
        if self._table is None:
            self._table = lance.dataset(self.uri, self.version)
        return self._table.take(indices).to_pylist()

    # [end]


def main() -> None:
    """Stop in the middle of an epoch, and go on with another number of workers."""
    with tempfile.TemporaryDirectory() as folder:
        uri = str(Path(folder) / "points.lance")  # yours is there already
        x = np.arange(400, dtype=np.float32)
        lance.write_dataset(pa.table({"x": x, "label": (x % 4).astype(np.int64)}), uri)
        table = LanceTable(uri)
        loader = DataLoader(table, batch_size=40, shuffle=True, num_workers=2)
        seen, states = [], []
        for batch in loader:
            seen += batch["x"].tolist()
            states.append(loader.state_dict())
        resumed = DataLoader(LanceTable(uri, table.version), batch_size=40, shuffle=True)
        resumed.load_state_dict(states[3])
        rest = torch.cat([batch["x"] for batch in resumed]).tolist()
        print(f"version {table.version}: {len(set(seen))} rows, resumed after 160: {rest == seen[160:]}")


if __name__ == "__main__":
    main()
