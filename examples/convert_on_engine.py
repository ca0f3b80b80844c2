"""Convert JSON Lines to tars on an engine, by its name.

python examples/convert_on_engine.py
python examples/convert_on_engine.py dask address=tcp://head:8786
"""

import json
import sys
import tempfile
from pathlib import Path

from dataflow import ShardedDataset, convert
from dataflow.engines import engine


def main(name: str = "processes", *options: str) -> None:
    """Print what was written."""
    with tempfile.TemporaryDirectory(dir=".") as folder:
        for shard in range(4):  # yours are there already
            rows = [json.dumps({"id": 100 * shard + i, "text": f"row {i}"}) for i in range(100)]
            Path(folder, f"{shard}.jsonl").write_text("\n".join(rows))
        source, tars = f"{folder}/*.jsonl", f"{folder}/tars"
        # [convert]
        with engine(name, workers=2, options=dict(one.split("=", 1) for one in options)) as executor:
            made = convert(source, tars, to="tar", shard_samples=80, executor=executor)
        print(f"{made.samples} samples in {made.shards} shards")
        print(ShardedDataset(made.catalog)[399])
        # [end]


if __name__ == "__main__":  # worker processes import this file
    main(*sys.argv[1:])
