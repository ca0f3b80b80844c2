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

from dataflow import ShardedDataset, Tokenize
from dataflow.testing import RankError, run_ranks

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore"),  # torchtitan's and torch's own
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with the example's data, which ranks can import."""
    folder = tmp_path_factory.mktemp("titan")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "examples"))
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        run(titan_kit.write_data, 1, folder)
        yield folder


def run(function: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
    return run_ranks(function, world_size, args=args, backend=None, start_method="forkserver", timeout_s=100)


SHORT = ("--training.steps=6", "--checkpoint.interval=3", "--validator.freq=3")


def train(folder: Path, world_size: int, name: str, *options: str, kill_at: int | None = None) -> Path:
    options = (*SHORT, f"--dump_folder={name}", *options)
    run(titan_kit.train, world_size, folder / name, folder, options, kill_at)
    return folder / name


def lines_of(record: Path) -> list[list[dict[str, Any]]]:
    """What each rank wrote."""
    paths = sorted(record.glob("*.jsonl"))
    return [[json.loads(line) for line in path.read_text().splitlines()] for path in paths]


def losses(record: Path, kind: str = "loss") -> dict[int, float]:
    return {line["step"]: line[kind] for line in lines_of(record)[0] if kind in line}


def global_batches(record: Path) -> dict[int, list[list[int]]]:
    """The rows of each step on all ranks, sorted: how they are dealt out depends on the number of ranks."""
    steps: dict[int, list[list[int]]] = {}
    for lines in lines_of(record):
        for line in lines:
            if "rows" in line:
                steps.setdefault(line["step"], []).extend(line["rows"])
    return {step: sorted(rows) for step, rows in steps.items()}


def test_a_killed_run_goes_on_with_other_ranks_as_if_unbroken(folder: Path) -> None:
    data = ("--dataloader.seed=5", "--dataloader.sources.0.weight=0.7")
    whole = train(folder, 2, "whole", *data, "--checkpoint.async_mode=async")
    with pytest.raises(RankError, match="SIGKILL"):
        train(folder, 2, "killed", *data, kill_at=5)
    position = titan_kit.saved_position(folder / "killed/checkpoint/step-3")
    assert position == titan_kit.saved_position(folder / "whole/checkpoint/step-3")
    assert (position["seed"], position["position"]) == (5, 24)

    for world_size, validator in ((1, "--validator.no-enable"), (4, "--validator.enable")):
        name = f"on-{world_size}"
        shutil.copytree(folder / "killed/checkpoint", folder / name / "checkpoint")
        resumed = train(folder, world_size, name, *data, validator)
        assert list(losses(resumed)) == [4, 5, 6]
        batches, unbroken = global_batches(resumed), global_batches(whole)
        assert batches == {step: unbroken[step] for step in batches}
        # One of the two never validates: that changes nothing of the place where the training is.
        assert losses(resumed) == pytest.approx({s: losses(whole)[s] for s in batches}, abs=1e-5)
    validated = losses(whole, "validation")
    assert list(validated) == [1, 3, 6]
    assert losses(folder / "on-4", "validation")[6] == pytest.approx(validated[6], abs=1e-5)
    assert losses(folder / "on-1", "validation") == {}


def test_finite_epochs_end_on_all_ranks_after_each_token_came_once(folder: Path) -> None:
    options = ("--training.steps=1000", "--training.seq_len=256", "--checkpoint.no-enable")
    config = ("--module=titan_kit", "--config=held_out", "--validator.no-enable")
    ended = lines_of(train(folder, 2, "finite", *config, *options))
    out = folder / "out/titan"
    transform = Tokenize(out / "tokenizer.json", bos="<|begin|>", eos="<|end|>")
    documents = ShardedDataset(out / "held-out.jsonl", transform=transform)
    num_labels = sum(len(sample["input_ids"]) - 1 for sample in documents)
    counted = [sum(lines[step]["num_labels"] for lines in ended) for step in range(len(ended[0]))]
    half = len(counted) // 2
    assert [len(lines) for lines in ended] == [2 * half] * 2
    assert sum(counted[:half]) == sum(counted[half:]) == num_labels
    assert {len(line["rows"]) for lines in ended for line in lines} == {4}
    assert max(counted[:half]) > 2 * counted[half - 1]  # the last step is filled up with rows without labels


def test_ranks_that_share_a_model_get_the_same_rows(folder: Path) -> None:
    whole, shared = (run(titan_kit.rows_of_ranks, n, folder, n // 2) for n in (2, 4))
    assert shared[0] == shared[1]
    assert shared[2] == shared[3]
    assert sorted(shared[0] + shared[2]) == sorted(whole[0])
