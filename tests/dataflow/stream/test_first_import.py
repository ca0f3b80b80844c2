"""What a loop waits for before its first batch: imports that do only what is needed."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

import pytest
from datasets_kit import Make, make_ints_tar
from parameters_kit import in_full
from programs_kit import run_script

from dataflow import ShardedDataset


def told_by(program: str, folder: Path, *arguments: str) -> Any:
    """What a program of a process with nothing but torch imported prints last, as JSON."""
    text = textwrap.dedent(program)
    code, out, err = run_script(text, *arguments, how="forked", folder=folder, imported=["torch"])
    assert code == 0, err
    return json.loads(out.splitlines()[-1])


@pytest.mark.full
@pytest.mark.parametrize("collects", [True, *in_full(False)])
def test_importing_looks_through_no_object_and_leaves_the_collector_as_it_was(
    collects: bool, tmp_path: Path
) -> None:
    program = """
        import gc, json, sys, torch
        if sys.argv[1] == "False":
            gc.disable()
        gc.unfreeze()  # what it is forked from has frozen torch
        gc.collect()
        looked = []
        gc.callbacks.append(lambda phase, info: looked.append(info["generation"]))
        from dataflow import DataLoader, ShardedDataset
        told = {"collects": gc.isenabled(), "looks": len(looked), "frozen": gc.get_freeze_count()}
        print(json.dumps(told))
    """
    assert told_by(program, tmp_path, str(collects)) == {"collects": collects, "looks": 0, "frozen": 0}


@pytest.mark.full
def test_what_a_program_has_frozen_stays_frozen(tmp_path: Path) -> None:
    program = """
        import gc, json, torch
        gc.freeze()
        before = gc.get_freeze_count()
        from dataflow import DataLoader, ShardedDataset
        print(json.dumps({"is_most": gc.get_freeze_count() > before // 2}))
    """
    assert told_by(program, tmp_path) == {"is_most": True}


NOT_NEEDED = (
    "dataflow.decode.video",
    "dataflow.sources.hub",
    "dataflow.joins",
    "dataflow.staging.reading",
    "dataflow.workers.iterator",
    "fsspec",
    "numpy.random",
    "pandas",
    "prefetch.ipc.payload",
    "prefetch.store.remote",
    "prefetch.workers.fork_server",
    "pyarrow.compute",
    "pyarrow.parquet",
    "sharding.formats.arrow.columns",
    "sharding.hub.snapshot",
)
"""What a batch of local tars that are spelled out needs nothing of, where their catalog is kept."""


def test_a_batch_of_a_local_tar_of_a_kept_catalog_imports_what_it_needs(tmp_path: Path) -> None:
    make_ints_tar(tmp_path)
    catalog = str(tmp_path / "ints.catalog")
    shards = sorted(map(str, tmp_path.glob("*.tar")))
    ShardedDataset(shards, catalog=catalog)
    program = """
        import json, sys, torch
        before = {*sys.modules}
        from dataflow import DataLoader, ShardedDataset
        catalog, *shards = sys.argv[1:]
        with DataLoader(ShardedDataset(shards, catalog=catalog), 4, shuffle=True) as loader:
            batch = next(iter(loader))
        print(json.dumps({"modules": sorted({*sys.modules} - before), "samples": len(batch["cls"])}))
    """
    told = told_by(program, tmp_path, catalog, *shards)
    assert told["samples"] == 4
    assert sorted({*NOT_NEEDED}.intersection(told["modules"])) == []


@pytest.mark.parametrize(
    "name", ["tar", *in_full("mds", "parquet", "jsonl", "litdata", "tfrecord", "array_record")]
)
def test_a_first_index_and_a_first_batch_look_for_no_pandas(tmp_path: Path, made: Make, name: str) -> None:
    (tmp_path / "pandas.py").write_text("raise SystemExit('pandas was imported')\n")
    program = """
        import json, sys
        sys.path.insert(0, sys.argv[1])
        from dataflow import DataLoader, ShardedDataset
        dataset = ShardedDataset(sys.argv[2], catalog=sys.argv[1] + "/new.catalog", **json.loads(sys.argv[3]))
        with DataLoader(dataset, 2, shuffle=True) as loader:
            next(iter(loader))
        print(json.dumps(len(dataset)))
    """
    kwargs = dict(made(name).kwargs)
    del kwargs["catalog"]
    source = kwargs.pop("source")
    assert told_by(program, tmp_path, str(tmp_path), source, json.dumps(kwargs)) == len(made(name).samples)
