"""Files of a split: the ones that `datasets` finds, and the rows that it streams from the same Hub."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path
from typing import Any

import pytest

from dataflow.sources.listing.claims import SourceArguments, resolve
from dataflow.sources.listing.places import Places
from prefetch.store.retrier import Retrier

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    datasets = pytest.importorskip("datasets")

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]

SHARDS = [f"{i:05d}-of-00002" for i in range(2)]
LAYOUTS: dict[str, tuple[list[str], str]] = {
    "shards": ([f"data/{s}-{n}.parquet" for s in ("train", "test", "extra") for n in SHARDS], ""),
    "shards with hashes": ([f"data/train-{n}-abcdef0123.parquet" for n in SHARDS], ""),
    "one file": (["rows.jsonl", "README.md"], ""),
    "files named after splits": (["train.jsonl", "dev.jsonl", "eval.jsonl"], ""),
    "names with splits in them": (["my-train-0.parquet", "my-train-1.parquet", "my_val.parquet"], ""),
    "keywords only as words": (["trainer.parquet", "contest.parquet"], ""),
    "folders named after splits": (
        ["a/train/x.parquet", "a/valid/y.parquet", "a/testing/z.parquet", "a/train/deep/w.parquet"],
        "",
    ),
    "folders before files": (["train/test-0.parquet", "train/test-1.parquet"], ""),
    "folders with numbers": (["train-1/a.tar", "train-2/b.tar", "x-test/c.tar"], ""),
    "hidden and special": (["train.tar", ".train.tar", ".git/train.tar", "__old__/train.tar"], ""),
    "scripts between": (["data.parquet", "tool.py", "other.py", "LICENSE", "notes.md"], ""),
    "arrow": (["train/data-00000-of-00001.arrow", "train/state.json", "train/dataset_info.json"], ""),
    "one pattern": (
        ["a/0.parquet", "a/1.parquet", "b.parquet"],
        "- {config_name: c, data_files: a/*.parquet}",
    ),
    "a list": (["a.jsonl", "b.jsonl", "c.jsonl"], "- {config_name: c, data_files: [c.jsonl, a.jsonl]}"),
    "splits": (
        ["x/1.parquet", "x/2.parquet", "y/1.parquet", "z/1.parquet"],
        "- config_name: c\n  data_files:\n  - {split: first, path: x/*}\n"
        "  - {split: rest, path: [y/*, z/1.parquet]}",
    ),
    "a folder": (
        ["en/train.parquet", "en/test.parquet", "de/train.parquet"],
        "- {config_name: en, data_dir: en}\n- {config_name: de, data_dir: de, default: true}",
    ),
    "shards in a folder": (
        [f"v1/data/train-{n}.parquet" for n in SHARDS] + ["v2/data/train-00000-of-00001.parquet"],
        "- {config_name: v1, data_dir: v1}\n- {config_name: v2, data_dir: v2}",
    ),
    "one called default": (
        ["a.parquet", "b.parquet"],
        "- {config_name: default, data_files: a.parquet}\n- {config_name: other, data_files: b.parquet}",
    ),
    "a dot and double stars": (
        ["deep/er/a.parquet", "deep/b.parquet"],
        "- {config_name: c, data_files: ./deep/**/*.parquet}",
    ),
    "a hidden folder that is named": (
        [".h/a.parquet", ".h/.b.parquet"],
        "- {config_name: c, data_files: .h/*}",
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_split_has_the_files_that_datasets_finds(name: str, tmp_path: Path) -> None:
    files, configs = LAYOUTS[name]
    for file in files:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    if configs:
        (tmp_path / "README.md").write_text(f"---\nconfigs:\n{configs}\n---\ntext\n")
    known = datasets.get_dataset_config_names(str(tmp_path))
    assert known
    for config in known if configs else [None]:
        builder = datasets.load_dataset_builder(str(tmp_path), config, cache_dir=str(tmp_path / ".cache"))
        for split, theirs in builder.config.data_files.items():
            with Retrier() as retrier:
                ours = resolve(
                    tmp_path, SourceArguments(config=config, split=str(split)), Places({}, retrier)
                ).urls
            assert ours == [os.path.normpath(file) for file in theirs]


def test_the_default_config_is_that_of_datasets(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").touch()
    (tmp_path / "b.parquet").touch()
    (tmp_path / "README.md").write_text(
        "---\nconfigs:\n- {config_name: x, data_files: a.parquet}\n"
        "- {config_name: y, data_files: b.parquet, default: true}\n---\n"
    )
    theirs = datasets.get_dataset_default_config_name(str(tmp_path))
    with Retrier() as retrier:
        ours = resolve(tmp_path, SourceArguments(split="train"), Places({}, retrier)).urls
    assert (theirs, ours) == ("y", [str(tmp_path / "b.parquet")])


ROWS = """
import io, json, os, sys, tempfile, warnings
warnings.simplefilter("ignore")
sys.path[:0] = [{tests!r}]
import pyarrow as pa, pyarrow.parquet as pq
from hub_server import HubServer, Repo

def parquet(first):
    out = io.BytesIO()
    table = pa.table({{"n": list(range(first, first + 10)), "s": [f"é{{i}}" for i in range(10)]}})
    pq.write_table(table, out)
    return out.getvalue()

hub = HubServer()
repo = hub.repos["org/name"] = Repo()
repo.commit({{
    **{{f"data/train-{{i:05d}}-of-00003.parquet": parquet(10 * i) for i in range(3)}},
    "data/validation-00000-of-00001.parquet": parquet(100),
    "README.md": b"---\\nlicense: mit\\n---\\n",
}})
with hub.serving():
    os.environ.update(HF_ENDPOINT=hub.url, HF_HOME=tempfile.mkdtemp(), XDG_CACHE_HOME=tempfile.mkdtemp())
    os.environ.update(HF_HUB_DISABLE_TELEMETRY="1")
    import datasets
    from dataflow import DataLoader, ShardedDataset
    theirs = list(datasets.load_dataset("org/name", split="train", streaming=True))
    dataset = ShardedDataset("hf://datasets/org/name", split="train")
    with DataLoader(dataset, batch_size=4, shuffle=False) as loader:
        ours = [{{"n": int(n), "s": s}} for batch in loader for n, s in zip(batch["n"], batch["s"])]
    print(json.dumps([theirs, ours]))
    sys.stdout.flush()
os._exit(0)
"""


def test_rows_are_those_that_datasets_streams() -> None:
    code = textwrap.dedent(ROWS).format(tests=str(Path(__file__).parents[1] / "kits"))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    answer: Any = json.loads(done.stdout.splitlines()[-1])
    theirs, ours = answer
    assert len(theirs) == 30
    assert ours == theirs
