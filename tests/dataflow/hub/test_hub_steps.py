"""Steps of a training on a folder of the Hub: named, found, made again, verified and passed over."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hub_server import ROWS, HubServer
from programs_kit import run_command

import dataflow
from dataflow import DataLoader, ShardedDataset

pytest.importorskip("huggingface_hub")
pytestmark = pytest.mark.timeout(60)

NAME = "hf://datasets/org/name"


def test_a_state_and_the_name_on_the_hub_tell_all_of_a_training(hub: HubServer, tmp_path: Path) -> None:
    with DataLoader(ShardedDataset(NAME), batch_size=7, shuffle=True, seed=2) as loader:
        batches = [batch["n"].tolist() for _ in range(2) for batch in loader]
        state, account = loader.state_dict(), loader.account()
    dataset: ShardedDataset[Any] = ShardedDataset(NAME)
    step = len(batches) - 3
    table = dataflow.provenance(state, dataset, step)
    assert [dataset[number]["n"] for number in table["sample"].to_pylist()] == batches[step]
    assert all(url.startswith(f"{NAME}@") for url in table["shard"].to_pylist())
    sample = table["sample"].to_pylist()[0]
    steps = [at for at, batch in enumerate(batches) if batches[step][0] in batch]
    assert dataflow.find(state, dataset, np.array([sample]))["steps"].to_pylist() == [steps]
    assert dataflow.verify(state, dataset, [account]).is_whole
    with DataLoader(dataset, batch_size=7) as loader:
        loader.load_state_dict(state)
        assert loader.batch_at(step)["n"].tolist() == batches[step]
    with DataLoader(dataset, batch_size=7, shuffle=True, seed=2, skip_steps=[(1, 3)]) as loader:
        assert [batch["n"].tolist() for batch in loader] == [batches[0], *batches[3 : len(batches) // 2]]
    (tmp_path / "state.json").write_text(json.dumps(state))
    (tmp_path / "account.json").write_text(json.dumps(account))
    for command in (
        ["explain", NAME, "--state", tmp_path / "state.json", "--step", step, "--html", tmp_path / "a.html"],
        ["verify", NAME, "--state", tmp_path / "state.json", "--account", tmp_path / "account.json"],
    ):
        code, printed = run_command(*command)
        assert code == 0, printed
    assert f"all {2 * 4 * ROWS} samples of the plan came as planned" in " ".join(printed.split())
    assert "<html" in (tmp_path / "a.html").read_text()
