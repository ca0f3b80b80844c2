"""torchtitan's trainer over shards: it is killed, goes on with other ranks, validates, and ends."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torchtitan", reason="torchtitan has an environment of its own: see .ci/run")

import titan_kit
from programs_kit import ROOT

from dataflow.testing import RankError, ranks, run_ranks

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore"),  # torchtitan's and torch's own
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with the example's data; ranks are forked from a process that has torchtitan imported."""
    folder = tmp_path_factory.mktemp("titan")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranks, "_PRELOADED", [*ranks._PRELOADED, *titan_kit.PRELOADED])
        patch.syspath_prepend(str(ROOT / "examples"))
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        run(titan_kit.write_data, 1, folder)
        yield folder


def run(function: Callable[..., Any], world_size: int, *args: Any) -> None:
    run_ranks(function, world_size, args=args, backend=None, start_method="forkserver", timeout_s=100)


SHORT = ("--training.steps=6", "--checkpoint.interval=3", "--validator.freq=3")


def train(folder: Path, world_size: int, name: str, *options: str, kill_at: int | None = None) -> Path:
    run(titan_kit.train, world_size, folder / name, folder, (*SHORT, *options), kill_at)
    return folder / name


def lines_of(record: Path) -> list[list[dict[str, Any]]]:
    """What each rank wrote."""
    paths = sorted(record.glob("*.jsonl"))
    return [[json.loads(line) for line in path.read_text().splitlines()] for path in paths]


def losses(record: Path) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in lines_of(record)[0] if "loss" in line}


def global_batches(record: Path) -> dict[int, list[list[int]]]:
    """The rows of each step on all ranks, sorted: how they are dealt out depends on the number of ranks."""
    steps: dict[int, list[list[int]]] = {}
    for lines in lines_of(record):
        for line in lines:
            if "rows" in line:
                steps.setdefault(line["step"], []).extend(line["rows"])
    return {step: sorted(rows) for step, rows in steps.items()}


def test_a_killed_run_goes_on_with_other_ranks_as_if_unbroken(folder: Path) -> None:
    whole = train(folder, 2, "whole")
    shutil.move(folder / "out/titan/checkpoint", folder / "whole-checkpoint")
    with pytest.raises(RankError, match="SIGKILL"):
        train(folder, 2, "killed", kill_at=5)
    shutil.copytree(folder / "out/titan/checkpoint", folder / "checkpoint")
    for world_size in (1, 4):
        shutil.rmtree(folder / "out/titan/checkpoint")
        shutil.copytree(folder / "checkpoint", folder / "out/titan/checkpoint")
        resumed = train(folder, world_size, f"on-{world_size}")
        assert list(losses(resumed)) == [4, 5, 6]
        batches, unbroken = global_batches(resumed), global_batches(whole)
        assert batches == {step: unbroken[step] for step in batches}
        assert losses(resumed) == pytest.approx({s: losses(whole)[s] for s in batches}, abs=1e-5)
