"""Steps that are passed over: against the plain loop, on one rank and several, resumed at every position."""

from __future__ import annotations

import json
import warnings
from collections import Counter
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import torch.distributed as dist
from datasets_kit import rank
from forked_kit import fast_ranks

from dataflow import Bucketed, DataLoader, Mixture, Packed, ShardedDataset, Shuffle
from dataflow.explain.provenance import notes_of
from dataflow.state_checksum import checked_fields, with_checksum
from sharding.errors import DataflowError

Batches = list[list[int]]
PASSED = [(3, 5), (12, 14), (17, 29)]
"""Of epochs of ten steps: within the first, over the end of one, and of two."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("numbers")
    for shard in range(4):
        numbers = np.arange(shard * 10, shard * 10 + 9 + (shard == 3))
        table = pa.table({"n": numbers, "tokens": [[n] * (n % 5 + 1) for n in numbers.tolist()]})
        pq.write_table(table, folder / f"{shard}.parquet", row_group_size=3)
    return folder


def opened(folder: Path) -> ShardedDataset:
    return ShardedDataset(str(folder / "*.parquet"), columns=["n"])


def mixed(folder: Path) -> Mixture:
    return Mixture({opened(folder): 2, opened(folder).take(11): 1}, stop="all")


def numbers(loader: DataLoader[Any, Any], steps: int | None = None) -> Batches:
    loop, got = iter(loader), list[list[int]]()
    while len(got) != steps and (batch := next(loop, None)) is not None:
        got.append(batch["n"].tolist())
    return got


def loader_of(dataset: Any, shuffle: Any = True, **more: Any) -> DataLoader[Any, Any]:
    return DataLoader(dataset, **{"batch_size": 4, "shuffle": shuffle, "seed": 3, "num_workers": 0, **more})


def is_passed(step: int) -> bool:
    return any(first <= step < end for first, end in PASSED)


SHUFFLES = [None, Shuffle("window", 3, canonical_nodes=2), Shuffle("full")]


@pytest.mark.parametrize("shuffle", SHUFFLES, ids=["none", "window", "full"])
def test_all_other_batches_stay_what_they_are(folder: Path, shuffle: Any) -> None:
    dataset = opened(folder)
    with loader_of(dataset, shuffle) as plain, loader_of(dataset, shuffle, skip_steps=PASSED) as loader:
        step = 0
        for epoch in range(3):
            whole = numbers(plain)
            expected = [batch for at, batch in enumerate(whole, step) if not is_passed(at)]
            step += len(whole)
            assert (len(loader), loader.batches_left) == (len(whole), len(expected))
            assert numbers(loader) == expected, f"epoch {epoch}"
        assert loader.stats().skipped_samples == 0
        assert json.loads(str(loader.state_dict()["history"]))[-1] == step == 30


@pytest.mark.parametrize("make", [opened, pytest.param(mixed, marks=pytest.mark.full)])
def test_steps_named_in_a_loop_are_resumed_at_every_position(folder: Path, make: Any) -> None:
    dataset = make(folder)
    with loader_of(dataset) as plain:
        whole = [*numbers(plain), *numbers(plain)]
        num = len(plain)
    for cut in range(5):
        with loader_of(dataset) as loader:
            loop, got = iter(loader), list[list[int]]()
            for _ in range(cut):
                got.append(next(loop)["n"].tolist())
            loader.skip_steps([(cut, cut + 1), (6, 9), (num - 1, num + 2)])
            left = [
                s for s in range(len(whole)) if s != cut and not 6 <= s < 9 and not num - 1 <= s < num + 2
            ]
            states = [loader.state_dict()]
            for batch in chain(loop, loader):
                got.append(batch["n"].tolist())
                states.append(loader.state_dict())
        assert got == [*whole[:cut], *(whole[step] for step in left if step > cut)]
        for done, state in enumerate(states[:-1]):
            with loader_of(dataset, None) as resumed, warnings.catch_warnings():
                warnings.simplefilter("ignore")
                resumed.load_state_dict(state)
                again = [*numbers(resumed), *numbers(resumed)]
            assert again[: len(got) - cut - done] == got[cut + done :], f"{cut} and {done}"


@pytest.mark.parametrize("worlds", [(2, 3, 1), (3, 1, 2), (1, 2, 3)])
@pytest.mark.parametrize("size", [1, 3, 4])
def test_other_ranks_and_batches_pass_over_the_same_samples(folder: Path, worlds: Any, size: int) -> None:
    """The first run of ranks has batches of six; the others batches of their own size."""
    dataset, samples, state = opened(folder), Counter[int](), None
    with loader_of(dataset, batch_size=6) as plain:
        whole = numbers(plain)
    expected = Counter(chain(*(batch for step, batch in enumerate(whole) if step not in (2, 3, 5))))
    for number, world in enumerate(worlds):
        states = []
        for r in range(world):
            batch_size = 6 // world if number == 0 else size
            own = {"skip_steps": [(2, 4), (5, 6)]} if number == 0 else {}
            place = rank(r, world)
            with loader_of(
                dataset, batch_size=batch_size, topology=place, tail="even", mark_repeats=True, **own
            ) as loader:
                if state is not None:
                    loader.load_state_dict(state)
                loop = iter(loader)
                steps = 2 if number < 2 else None
                taken = 0
                while taken != steps and (batch := next(loop, None)) is not None:
                    samples.update(
                        n
                        for n, again in zip(batch["n"].tolist(), batch["__repeat__"].tolist(), strict=True)
                        if not again
                    )
                    taken += 1
                states.append(json.loads(json.dumps(loader.state_dict())))
        if number < 2:
            assert all(one == states[0] for one in states)
        state = states[0]
    assert samples == expected


def test_a_restart_with_the_same_argument_does_not_look_the_steps_up_anew(folder: Path) -> None:
    dataset = opened(folder)
    with loader_of(dataset, skip_steps=[(4, 8)]) as loader:
        numbers(loader, 3)
        state = loader.state_dict()
    with loader_of(dataset, batch_size=2, skip_steps=[(4, 8)]) as loader:
        loader.load_state_dict(state)
        numbers(loader, 2)
        later = loader.state_dict()
    assert later["passed"] == state["passed"] == "[[0,16,32,4,8]]"
    with loader_of(dataset) as loader:
        numbers(loader, 6)
        state = loader.state_dict()
    with loader_of(dataset, skip_steps=[(4, 8)]) as loader:
        with pytest.warns(UserWarning, match="steps 4 to 5 of skip_steps lie before step 6"):
            loader.load_state_dict(state)
        assert loader.state_dict()["passed"] == "[[0,24,32,4,8]]"


@pytest.mark.parametrize(
    "batching", [Packed(6, "tokens", window=8), Bucketed(3, "tokens", window=9)], ids=["packed", "buckets"]
)
def test_whole_rows_and_batches_by_length_are_passed_over(folder: Path, batching: Any) -> None:
    dataset = ShardedDataset(str(folder / "*.parquet"), columns=["tokens"])
    size = {"batch_size": 2} if isinstance(batching, Packed) else {"batch_size": 1}

    def rows(**more: Any) -> list[Any]:
        with loader_of(dataset, batching=batching, **size, **more) as loader:
            return [batch["tokens"].tokens.tolist() for batch in loader]

    whole = rows()
    assert rows(skip_steps=[(1, 3), (5, 6)]) == [
        rows for step, rows in enumerate(whole) if step not in (1, 2, 5)
    ]


class Documents:
    """Makes a document of unknown length of a sample."""

    def __call__(self, sample: Any) -> Any:
        return {"tokens": np.full(int(sample["n"]) % 5 + 1, int(sample["n"]))}


def test_where_lengths_are_measured_steps_are_those_of_the_epoch(folder: Path) -> None:
    dataset = ShardedDataset(str(folder / "*.parquet"), columns=["n"], transform=Documents())

    def rows(**more: Any) -> list[Any]:
        with loader_of(dataset, batching=Packed(6, "tokens", window=8), batch_size=2, **more) as loader:
            return [batch["tokens"].tokens.tolist() for batch in loader]

    whole = rows()
    with pytest.warns(UserWarning, match="nobody knows yet how long epoch 0 is"):
        got = rows(skip_steps=[(1, 3), (5, 6)])
    assert got == [rows for step, rows in enumerate(whole) if step not in (1, 2, 5)]


def of_rank(folder: Path, steps: Any) -> Any:
    place = dist.get_rank()
    with loader_of(opened(folder), batch_size=2, timeout=20) as loader:
        got = numbers(loader, 1)
        try:
            loader.skip_steps(steps[place])
        except (ValueError, DataflowError) as error:
            return str(error)
        return got, loader.state_dict()["passed"]


def test_ranks_name_steps_together(folder: Path) -> None:
    same = fast_ranks(of_rank, 2, args=(folder, [[(2, 4)], [(2, 4)]]), timeout_s=60)
    assert same[0][1] == same[1][1] == "[[0,8,16,2,4]]"
    unlike = fast_ranks(of_rank, 2, args=(folder, [[(2, 4)], [(2, 5)]]), timeout_s=60)
    assert all("the ranks set unlike steps: rank 0: [(2, 4)]" in text for text in unlike)
    wrong = fast_ranks(of_rank, 2, args=(folder, [[(2, 4)], [(4, 2)]]), timeout_s=60)
    assert all("unlike steps" in text for text in wrong)


@pytest.mark.parametrize(
    ("steps", "says"),
    [
        ([(5, 5)], "a later one"),
        ([(-1, 5)], "first step >= 0"),
        ([5], "pairs of integers"),
        ([(1.0, 2)], "pairs of integers"),
        ("12", "a list of pairs"),
        ([(0, 3)], "step 0 was taken already: the next one is 2"),
        ([(10, 20)], "leaves nothing of epoch 1"),
        ([(2, 10_000)], "leaves nothing of epoch|too many epochs"),
    ],
)
def test_steps_that_cannot_be_passed_over_are_refused(folder: Path, steps: Any, says: str) -> None:
    with loader_of(opened(folder)) as loader:
        got = numbers(loader, 2)
        with pytest.raises(ValueError, match=says):
            loader.skip_steps(steps)
        assert loader.state_dict()["passed"] is None
    assert len(got) == 2
    if "taken" not in says and "leaves" not in says:
        with pytest.raises(ValueError, match=says):
            loader_of(opened(folder), skip_steps=steps)


def test_loaders_and_states_that_do_not_count_steps_are_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match="only a ShardedDataset or a Mixture has skip_steps="):
        DataLoader([1, 2], skip_steps=[(0, 1)])
    with pytest.raises(TypeError, match="only loaders over a ShardedDataset"):
        DataLoader([1, 2]).skip_steps([(0, 1)])
    with loader_of(opened(folder)) as loader:
        numbers(loader, 2)
        state = checked_fields(loader.state_dict())
    old = with_checksum({name: value for name, value in state.items() if name not in ("history", "passed")})
    with loader_of(opened(folder), skip_steps=[(5, 6)]) as loader:
        with pytest.raises(ValueError, match="does not tell how many steps were taken"):
            loader.load_state_dict(old)
        assert loader.state_dict()["position"] == 0
    with loader_of(opened(folder)) as loader:
        loader.load_state_dict(old)
        with pytest.raises(ValueError, match="does not tell how many steps were taken"):
            loader.skip_steps([(5, 6)])


def test_data_that_differ_between_epochs_have_other_samples_at_these_positions(folder: Path) -> None:
    with loader_of(opened(folder), skip_steps=[(12, 14)]) as loader:
        numbers(loader)
        state = loader.state_dict()
    with loader_of(opened(folder).skip(1)) as other:
        with pytest.warns(UserWarning, match="steps 12 to 13 are not passed over"):
            other.load_state_dict(state)
        assert other.state_dict()["passed"] is None
        assert len(numbers(other)) == len(other)


@pytest.mark.parametrize("batching", [None, Packed(6, "tokens", window=8)], ids=["samples", "packed"])
def test_provenance_tells_what_was_passed_over_and_what_is_left(folder: Path, batching: Any) -> None:
    """The ranges are of batches of six; two ranks with batches of four go on."""
    dataset = ShardedDataset(str(folder / "*.parquet"), columns=["tokens"] if batching else ["n"])
    with loader_of(dataset, batch_size=6, batching=batching, skip_steps=[(1, 2)]) as loader:
        state = loader.state_dict()
    made: dict[int, dict[int, Any]] = {}
    steps = []
    for r in range(2):
        place = rank(r, 2)
        with loader_of(dataset, batch_size=2, topology=place, batching=batching, tail="even") as loader:
            loader.load_state_dict(state)
            for batch in loader:
                step = json.loads(str(loader.state_dict()["history"]))[-1] - 1
                made.setdefault(step, {})[r] = batch
                steps.append(step)
            told = loader.provenance(range(max(steps) + 1))
            for step in range(max(steps) + 1):
                rows = told.filter(pc.field("step") == step)
                if step not in made:
                    assert rows.num_rows == 0
                    with pytest.raises(IndexError, match="was passed over"):
                        loader.batch_at(step, 0)
                elif r in made[step]:
                    own = rows.filter(pc.field("rank") == r)
                    if batching is None:
                        assert own["sample"].to_pylist() == numbered(made[step][r]["n"].tolist())
                    again = loader.batch_at(step, r)
                    name = "tokens" if batching else "n"
                    one, other = (getattr(b[name], "tokens", b[name]) for b in (again, made[step][r]))
                    assert one.tolist() == other.tolist()
    gone = set(range(max(steps) + 1)) - {*made}
    assert gone
    assert {f"step {step} was passed over, as skip_steps says" for step in gone} <= {*notes_of(told)}


def numbered(numbers: list[int]) -> list[int]:
    """The index of samples by their numbers: shards have nine, and are ten apart."""
    return [n - n // 10 for n in numbers]
