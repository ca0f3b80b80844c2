"""When samples were delivered, and when they come next: against what loops delivered."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from datasets_kit import rank
from hypothesis import given, strategies as st
from programs_kit import run_command

from dataflow import Bucketed, DataLoader, Mixture, Packed, ShardedDataset, Shuffle, TokenBudget, find
from dataflow.batch.packed import PackedRows
from dataflow.explain.find import units_of
from dataflow.explain.provenance import notes_of
from dataflow.state_checksum import checked_fields, with_checksum
from sharding.lengths.unit_plan import UnitPlanner
from sharding.order.order import Order

NUM = 37


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("numbers")
    for shard in range(4):
        numbers = np.arange(shard * 9, shard * 9 + 9 + (shard == 3))
        table = pa.table({
            "n": numbers,
            "id": [f"id{n}" for n in numbers],
            "twice": numbers // 2,
            "kind": numbers % 3,
            "tokens": [[n] * (n % 5 + 1) for n in numbers.tolist()],
        })  # fmt: skip
        pq.write_table(table, folder / f"{shard}.parquet", row_group_size=3)
    return folder


def opened(folder: Path, columns: Any = ("n",), **more: Any) -> ShardedDataset:
    return ShardedDataset(str(folder / "*.parquet"), columns=list(columns), **more)


Make = Callable[[Path], Any]
DATASETS: dict[str, Make] = {
    "whole": opened,
    "view": lambda folder: opened(folder).subset([n for n in range(NUM) if n % 4]),
    "balanced": lambda folder: opened(folder, ["n", "kind"]).balanced("kind", {0: 4, 1: 1, 2: 0}),
    "mixture": lambda folder: Mixture({opened(folder): 2, opened(folder).take(7): 3}, stop="all"),
}


def train(make: Make, folder: Path, shuffle: Any, passes: Any) -> tuple[list[set[int]], Any]:
    """What was in each step of two ranks, and of three that go on; and the last state."""
    steps, state = defaultdict[int, set[int]](set), None
    for world, size, num_batches in ((2, 3, 12), (3, 1, 9)):
        states = []
        for r in range(world):
            how: dict[str, Any] = {"batch_size": size, "topology": rank(r, world), "tail": "even"}
            with loader_of(make(folder), shuffle, **how, skip_steps=() if state else passes) as loader:
                if state is not None:
                    loader.load_state_dict(state)
                for batch in islice(forever(loader), num_batches):
                    step = json.loads(str(loader.state_dict()["history"]))[-1] - 1
                    steps[step] |= set(batch["n"].tolist())
                states.append(loader.state_dict())
        state = states[0]
    return [steps[step] for step in range(max(steps) + 1)], state


def forever(loader: Any) -> Any:
    while True:
        yield from loader


def loader_of(dataset: Any, shuffle: Any = True, **more: Any) -> DataLoader[Any, Any]:
    return DataLoader(dataset, **{"batch_size": 4, "shuffle": shuffle, "seed": 3, "num_workers": 0, **more})


@pytest.mark.parametrize("name", ["whole", "view", "balanced"])
@pytest.mark.parametrize("shuffle", [None, Shuffle("window", 3, canonical_nodes=2), Shuffle("full")], ids=str)
@pytest.mark.parametrize("passes", [(), ((3, 5), (9, 12))], ids=["all", "passed over"])
def test_a_sample_s_steps_are_those_in_which_ranks_had_it(
    folder: Path, name: str, shuffle: Any, passes: Any
) -> None:
    steps, state = train(DATASETS[name], folder, shuffle, passes)
    dataset = DATASETS[name](folder)
    numbers = [int(n) for n in dataset[:]["n"]] if name != "balanced" else list(range(NUM))
    table = find(state, dataset, np.arange(len(numbers)))
    for number, found in zip(numbers, table["steps"].to_pylist(), strict=True):
        assert found == [step for step, had in enumerate(steps) if number in had], number


@pytest.mark.parametrize("tail", ["drop", "pad", "even", "uneven"])
@pytest.mark.parametrize("name", [*DATASETS])
def test_what_comes_next_is_what_the_loader_delivers(folder: Path, name: str, tail: Any) -> None:
    dataset = DATASETS[name](folder)
    with loader_of(dataset, Shuffle("window", 3, canonical_nodes=2), tail=tail) as loader:
        loop = forever(loader)
        seen = defaultdict[int, list[int]](list)
        for step in range(14):
            for number in set(next(loop)["n"].tolist()):
                seen[number].append(step)
        num = sum(map(len, dataset.sources))
        table, state = loader.find(np.arange(num)), loader.state_dict()
        assert table.equals(find(state, DATASETS[name](folder), np.arange(num)))
        coming = defaultdict[int, list[int]](list)
        for step in range(14, 50):
            for number in next(loop)["n"].tolist():
                coming[number].append(step)
    rows = table.to_pylist()
    for number in {row["sample"] for row in rows} if name in ("whole", "balanced") else ():
        (row,) = [row for row in rows if row["sample"] == number]
        assert row["steps"] == seen[number]
        assert row["next_step"] == next(iter(coming[number]), row["next_step"])
    if name == "mixture":  # the second source has the first samples, too
        for number in range(NUM):
            found = sorted(step for row in rows if row["sample"] == number for step in row["steps"])
            assert sorted({*found}) == seen[number]
            own = [row["next_step"] for row in rows if row["sample"] == number]
            nexts = [step for step in own if step is not None]
            assert not coming[number] or min(nexts) == coming[number][0]


def test_weights_that_were_set_are_followed(folder: Path) -> None:
    dataset = DATASETS["mixture"](folder)
    with loader_of(dataset) as loader:
        loop, seen = forever(loader), defaultdict[int, set[int]](set)
        for step in range(30):
            for number in next(loop)["n"].tolist():
                seen[number].add(step)
            if step in (5, 21):
                dataset.set_weights([1, step - 4])
        rows = loader.find(np.arange(NUM + 7)).to_pylist()
    for number in range(NUM):
        assert {step for row in rows if row["sample"] == number for step in row["steps"]} == seen[number]


@pytest.mark.parametrize(
    "batching",
    [Packed(4, "tokens", window=16), TokenBudget(12, "tokens", window=16), Bucketed(3, "tokens", window=16)],
    ids=["packed", "budget", "buckets"],
)
def test_steps_of_batches_by_length(folder: Path, batching: Any) -> None:
    dataset = opened(folder, ["tokens"])
    with DataLoader(dataset, batching=batching, shuffle=True, seed=2, num_workers=0) as loader:
        loop, seen = forever(loader), defaultdict[int, set[int]](set)
        for step in range(40):
            tokens = next(loop)["tokens"]
            if isinstance(tokens, PackedRows):
                values = [tokens.tokens[tokens.segment_ids > 0]]
            else:
                pairs = zip(tokens.tokens, tokens.lengths.tolist(), strict=True)
                values = [row[:length] for row, length in pairs]
            for number in {int(n) for row in values for n in row}:
                seen[number].add(step)
        found = find(loader.state_dict(), dataset, np.arange(NUM), batching=batching)
    for number, steps in enumerate(found["steps"].to_pylist()):
        assert set(steps) == seen[number]


@given(st.lists(st.integers(0, 20), min_size=1, max_size=80), st.integers(0, 5), st.data())
def test_units_of_samples_are_the_inverse_of_what_units_take(
    lengths: list[int], seed: int, data: Any
) -> None:
    batchings = [
        Packed(8, window=16),
        TokenBudget(24, window=16, overlong="truncate"),
        Bucketed(3, boundaries=2),
    ]
    order = Order([4] * (len(lengths) // 4) + [len(lengths) % 4], Shuffle("window", 3), seed=seed, epoch=0)
    made = data.draw(st.sampled_from(batchings))
    sequence = UnitPlanner(made, 16, lengths=np.array(lengths, np.int64)).sequence(order)
    expected = []
    for unit in range(sequence.num_units):
        segments, _ = sequence.take(np.array([unit]))
        expected += [(int(position), unit) for position in np.unique(segments.position)]
    asked = np.arange(len(lengths))[::-1]
    which, units = units_of(sequence, asked)
    assert sorted(zip(asked[which].tolist(), units.tolist(), strict=True)) == sorted(expected)


def test_keys_a_file_and_an_expression_say_which_samples_are_meant(folder: Path, tmp_path: Path) -> None:
    dataset = opened(folder)
    with loader_of(dataset, None) as loader:
        for _ in loader:
            pass
        state = loader.state_dict()
        (tmp_path / "keys.txt").write_text("id9\nid3\n")
        for samples in (["id3", "id9"], tmp_path / "keys.txt", str(tmp_path / "keys.txt"), [b"id9", b"id3"]):
            rows = loader.find(samples, "id").to_pylist()
            assert [(row["key"], row["sample"], row["steps"]) for row in rows] == [
                ("id3", 3, [0]),
                ("id9", 9, [2]),
            ]
        by_value = loader.find(pc.field("n") < 2).to_pylist()
        assert [(row["key"], row["sample"], row["next_step"]) for row in by_value] == [
            ("", 0, 10),
            ("", 1, 10),
        ]
        several = find(state, dataset, [4, 99], on="twice").to_pylist()
    assert [(row["key"], row["sample"], row["steps"]) for row in several] == [
        ("4", 8, [2]),
        ("4", 9, [2]),
        ("99", None, []),
    ]
    view = opened(folder).subset([1, 5, 9])
    with loader_of(view, None, batch_size=2) as loader:
        next(iter(loader))
        rows = loader.find(["id9", "id8", "id1"], "id").to_pylist()
        assert [(row["key"], row["sample"], row["steps"]) for row in rows] == [
            ("id1", 0, [0]),
            ("id9", 2, []),
            ("id8", None, []),
        ]
        assert loader.find(pc.field("n") > 1)["sample"].to_pylist() == [1, 2]


def test_samples_that_mean_nothing_are_refused(folder: Path) -> None:
    dataset = opened(folder)
    with loader_of(dataset) as loader:
        next(iter(loader))
        for samples, says in (
            ([], "must be keys"),
            (3, "must be keys"),
            (["a", 1], "all text, all bytes or all integers"),
            ([1.5], "all text, all bytes or all integers"),
            (np.array([NUM]), "numbers of samples must be in"),
            ([3], "holds"),
        ):
            with pytest.raises(ValueError, match=says):
                loader.find(samples, "id")
        with pytest.raises(ValueError, match="no column 'nothing'"):
            loader.find(["a"], "nothing")
        state = checked_fields(loader.state_dict())
    old = with_checksum({name: value for name, value in state.items() if name != "history"})
    with pytest.raises(ValueError, match="began before states told"):
        find(old, dataset, ["id3"], on="id")
    with pytest.raises(TypeError, match="only loaders over"):
        DataLoader([1, 2]).find([1])


def test_what_may_have_been_left_out_is_noted(folder: Path) -> None:
    dataset = opened(folder, on_error="skip")
    with loader_of(dataset) as loader:
        next(iter(loader))
        assert "on_error=" in notes_of(loader.find(np.arange(3)))[0]


def test_the_command_says_it_in_words(folder: Path, tmp_path: Path) -> None:
    with loader_of(opened(folder), None) as loader:
        for _ in islice(forever(loader), 12):
            pass
        (tmp_path / "state.json").write_text(json.dumps({"loader": loader.state_dict()}))
    (tmp_path / "keys.txt").write_text("id3\nid9\n")
    command = ("find", folder / "*.parquet", "--state", tmp_path / "state.json", "--on", "id")
    code, text = run_command(*command, *("--key", "id3", "--key", "id36", "--key", "no"))
    assert code == 0, text
    assert "id3 3 twice: steps 0 and 10 step 20 (epoch 2, position 3)" in text
    assert "id36 36 once: step 9 step 19 (epoch 1, position 36)" in text
    assert "no none" in text
    code, text = run_command(*command, "--keys", tmp_path / "keys.txt", "--json", "-")
    rows = json.loads(text)["rows"]
    assert [(row["key"], row["steps"]) for row in rows] == [("id3", [0, 10]), ("id9", [2])]
    code, text = run_command(*command)
    assert code
    assert "say which samples, by --key KEY or --keys FILE" in text


def test_a_dataset_without_some_samples_is_a_view(folder: Path) -> None:
    dataset = opened(folder)
    with pytest.warns(UserWarning, match="1 keys are those of no sample here: no"):
        left = dataset.without(["id3", "id9", "no"], on="id")
    assert left[:]["n"].tolist() == [n for n in range(NUM) if n not in (3, 9)]
    assert left.without(pc.field("n") > 4)[:]["n"].tolist() == [0, 1, 2, 4]
    assert left.without(np.array([0, 3]))[:]["n"].tolist()[:3] == [1, 2, 5]
    assert left.fingerprint() == dataset.subset([n for n in range(NUM) if n not in (3, 9)]).fingerprint()
