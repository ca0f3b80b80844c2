"""Write the rows of a CSV file as Parquet shards, once, and read these.

python examples/csv_to_shards.py
"""

import csv
import tempfile
from pathlib import Path

from dataflow import DataLoader, ShardedDataset, ShardWriter


def main() -> None:
    """Print a batch."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "reviews.csv"  # yours is there already
        source.write_text("text,stars\n" + "".join(f"review {i},{i % 5}\n" for i in range(250)))
        # [write]
        with open(source, newline="") as rows, ShardWriter(f"{folder}/%05d.parquet", max_count=100) as shards:
            for row in csv.DictReader(rows):
                shards.write({"text": row["text"], "stars": int(row["stars"])})
        # [end]
        with DataLoader(ShardedDataset(f"{folder}/*.parquet"), batch_size=4, shuffle=True, seed=0) as loader:
            print(f"{len(loader.dataset)} rows, {next(iter(loader))}")


if __name__ == "__main__":
    main()
