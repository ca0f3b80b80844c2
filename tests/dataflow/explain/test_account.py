"""Accounts of what ranks handed out: their sums, and what `verify` finds in them."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets_kit import edited, rank
from hypothesis import given, settings, strategies as st
from programs_kit import run_command

from dataflow import DataLoader, Packed, ShardedDataset, verify
from dataflow.batch.delivered import Delivered
from dataflow.explain import verify as verify_module
from dataflow.explain.account import CUT_STEPS, MOST_CUTS, NO_SUM, Account, BatchSum, BatchSums
from dataflow.explain.planned import PlannedItems
from dataflow.planning.plan import StreamPlan
from dataflow.staging.window import WindowSamples
from dataflow.stream.deliveries import DeliveryCounters
from sharding.lengths.units import Segments

NUM = 60
HALF = 1 << 63


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("numbers")
    for shard in range(4):
        numbers = np.arange(shard * 15, shard * 15 + 15)
        table = pa.table({"n": numbers, "tokens": [[n] * (n % 7 + 1) for n in numbers.tolist()]})
        pq.write_table(table, folder / f"{shard}.parquet", row_group_size=4)
    return folder


def opened(folder: Path, **more: Any) -> ShardedDataset:
    return ShardedDataset(str(folder / "*.parquet"), columns=["n"], **more)


def loader_of(dataset: Any, **options: Any) -> DataLoader:
    return DataLoader(dataset, **{"batch_size": 3, "shuffle": True, "num_workers": 0, "seed": 4, **options})


def loaders(folder: Path, world: int, state: Any, **options: Any) -> list[DataLoader]:
    """One for each rank, where a state says."""
    made = [loader_of(opened(folder), topology=rank(r, world), tail="even", **options) for r in range(world)]
    for loader in made if state else ():
        loader.load_state_dict(state)
    return made


def run(own: Sequence[DataLoader], num_batches: int) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The accounts of loaders that each take so many batches more, and the state of the first."""
    for loader in own:
        for _ in islice(loader, num_batches):
            pass
    return [loader.account() for loader in own], own[0].state_dict()


# ---- sums ------------------------------------------------------------------------------------


@given(st.data())
def test_sums_are_those_of_the_numbers_and_pieces_whatever_the_blocks_and_batches(data: Any) -> None:
    counts = data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=6))
    firsts = np.cumsum([data.draw(st.integers(0, 1 << 40)), *(count + 3 for count in counts)]).tolist()
    blocks: Any = [
        SimpleNamespace(num_samples=count, first_sample=first)
        for count, first in zip(counts, firsts, strict=False)
    ]
    inside = None
    if data.draw(st.booleans()):
        taken = [
            data.draw(st.sets(st.sampled_from(range(count)) if count else st.nothing())) for count in counts
        ]
        inside = [np.array(sorted(own), np.int64) for own in taken]
    samples = WindowSamples(data.draw(st.sampled_from([0, 3 << 44])), blocks, inside)
    rows = st.integers(0, samples.num_rows - 1)
    own = np.array(data.draw(st.lists(rows, max_size=20)) if samples.num_rows else [], np.int64)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(own)), max_size=4)))
    sizes = np.diff([0, *cuts, len(own)])
    pieces = None
    if data.draw(st.booleans()):
        begin = np.array(
            data.draw(st.lists(st.integers(0, 1 << 40), min_size=len(own), max_size=len(own))), np.int64
        )
        pieces = Segments(np.zeros(len(own), np.int64), begin, begin[::-1] + 1)
    order = np.array(data.draw(st.permutations(range(len(own)))), np.int64)
    parts = [(own[part], part, samples) for part in (np.sort(order[:7]), np.sort(order[7:]))]
    sums = BatchSums()
    sums.note_rows(5, 11, sizes, parts, pieces)
    items = PlannedItems(5, own, samples.numbers(own), own, pieces)
    hashes = np.add.accumulate(np.vstack([np.zeros((1, 2), np.uint64), items.hashes]))
    ends = np.append(0, np.cumsum(sizes))
    expected = hashes[ends[1:]] - hashes[ends[:-1]]
    assert [sums.take(5, 11 + at, 12 + at)[1] for at in range(len(sizes))] == [
        (size, *own_sum) for size, own_sum in zip(sizes.tolist(), expected.tolist(), strict=True)
    ]


@settings(max_examples=200)
@given(data=st.data())
def test_sums_that_are_noted_in_any_order_and_twice_are_taken_once(data: st.DataObject) -> None:
    """Beside a plain table: batches from `start` on of an epoch, and all of the next one."""
    start, num = data.draw(st.integers(0, 5)), data.draw(st.integers(1, 12))
    sums, table = BatchSums(3, start), {3: range(start, start + num), 4: range(num)}
    for epoch, numbers in table.items():
        at, noted = 0, 0
        while at < num:
            ahead = data.draw(st.integers(at + 1, num))
            while noted < ahead:  # what is noted again may begin before what was taken
                first = data.draw(st.integers(max(0, numbers[0] - 2), numbers[noted]))
                noted += data.draw(st.integers(1, num - noted))
                own = np.arange(first, numbers[noted - 1] + 1)
                sums.note(epoch, first, np.array([own * 0 + 1, own, own << 62]).astype(np.uint64))
            end = data.draw(st.integers(at + 1, noted))
            own = numbers[at:end]
            both = [(len(part), sum(part), (sum(part) << 62) % (1 << 64)) for part in (own[:-1], own[-1:])]
            assert sums.take(epoch, at, end) == tuple(both)
            assert sums.take(epoch, at, end) == (NO_SUM, NO_SUM)
            at = end


def test_sums_whose_numbers_leave_gaps_are_taken_one_by_one() -> None:
    sums = BatchSums(0, 7)
    for epoch, first in [(1, 2), (0, 30), (0, 9), (1, 0)]:
        sums.note(epoch, first, np.array([[1], [first], [0]], np.uint64))
    assert [sums.take_next()[1, 0] for _ in range(4)] == [9, 30, 0, 2]


def counted(sums: Sequence[BatchSum], *, ahead: int = 0) -> DeliveryCounters:
    """Counters that were told of so many batches, of which the state is behind all but `ahead`."""
    taken = [0]
    counters = DeliveryCounters(lambda: (max(0, taken[0] - ahead), ahead))
    noted = BatchSums()
    for number, own in enumerate(sums):
        taken[0] = number + 1
        noted.note(0, number, np.array([own], np.uint64).T)
        counters.add(Delivered(0, number, None, own[0]), noted, number + 1)
    return counters


def test_cuts_are_thinned_out_and_lose_nothing() -> None:
    num = CUT_STEPS * MOST_CUTS * 2 + 5
    account = counted([(2, HALF, number) for number in range(num)]).account
    account.cut()
    assert len(account.cuts) <= MOST_CUTS
    steps, rows, low, high = zip(*account.cuts, strict=True)
    assert [*steps] == sorted({*steps})
    assert (steps[0], steps[-1]) == (0, num)
    assert [*rows] == [2 * step for step in steps]
    assert [one % (1 << 64) for one in low] == [HALF * step % (1 << 64) for step in steps]
    assert [*high] == [step * (step - 1) // 2 for step in steps]


def test_a_batch_that_a_framework_keeps_for_later_is_not_in_the_account() -> None:
    account = counted([(1, 1, 0), (1, 20, 0), (1, 300, 0)], ahead=1).account
    account.cut()
    assert account.cuts == [(0, 0, 0, 0), (2, 2, 21, 0)]


# ---- what is found ------------------------------------------------------------------------------------


def report_of(folder: Path, account: dict[str, Any], state: Any, change: Any) -> Any:
    changed = copy.deepcopy(account)
    change(changed["intervals"][0])
    return verify(state, opened(folder), [changed])


def one_epoch(folder: Path) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """Account and state of an epoch, and what each of its samples adds to an account, as text."""
    with loader_of(opened(folder)) as loader:
        assert len([*loader]) == 20
        (account,), state = run([loader], 0)
        table = loader.provenance(range(20))
    items = PlannedItems(0, *(np.asarray(table[name]) for name in ("step", "draw_number", "position")), None)
    return account, state, items.hashes.tolist()


def plus(interval: list[Any], rows: int, hashes: Sequence[int], sign: int) -> None:
    low, high = int(interval[3][16:], 16) + sign * hashes[0], int(interval[3][:16], 16) + sign * hashes[1]
    interval[2:] = [interval[2] + rows, f"{high % (1 << 64):016x}{low % (1 << 64):016x}"]


def test_a_sample_that_is_lost_or_comes_twice_is_named(folder: Path) -> None:
    account, state, hashes = one_epoch(folder)
    with loader_of(opened(folder)) as loader:
        loader.load_state_dict(state)
        told = loader.provenance(7).to_pylist()[1]
    name = f"sample {told['sample']}, row {told['shard_row']} of {told['shard']}, of step 7"
    at, other = 7 * 3 + 1, 40
    lost = report_of(folder, account, state, lambda interval: plus(interval, -1, hashes[at], -1))
    assert [one.reason for one in lost.departures] == [f"{name} did not come"]
    assert (lost.departures[0].planned, lost.departures[0].handed_out, lost.is_whole) == (60, 59, False)
    twice = report_of(folder, account, state, lambda interval: plus(interval, 1, hashes[at], 1))
    assert twice.departures[0].reason == f"{name} came once too often"

    def swap(interval: list[Any]) -> None:
        plus(interval, 0, hashes[at], -1)
        plus(interval, 0, hashes[other], 1)

    swapped = report_of(folder, account, state, swap).departures[0].reason
    assert swapped.startswith(f"{name} did not come, and sample ")
    assert swapped.endswith("of step 13 came once too often")
    strange = report_of(folder, account, state, lambda interval: plus(interval, 0, [5, 7], 1)).departures[0]
    assert strange.reason == "as many samples came as are planned, and they are others"
    fewer = report_of(folder, account, state, lambda interval: plus(interval, -9, [5, 7], 1)).departures[0]
    assert fewer.reason == "9 samples fewer came than are planned"
    other_one = report_of(folder, account, state, lambda interval: plus(interval, 1, [5, 7], 1)).departures[0]
    assert other_one.reason == "1 samples more came than are planned, which is none of theirs"


def test_what_was_done_behind_the_checkpoint_that_is_gone_on_with_is_void(folder: Path) -> None:
    first = loaders(folder, 2, None)
    accounts, state = run(first, 5)
    later, _ = run(first, 3)  # and then the job dies
    second = loaders(folder, 3, state)
    more, state = run(second, 2)
    assert verify(state, opened(folder), [*accounts, *later, *more]).is_whole
    assert verify(state, opened(folder), [*later, *more]).is_whole  # their cuts have the checkpoint's step
    with pytest.raises(ValueError, match=r"rank 1 of 2 has no account that ends with step 4: give the one"):
        verify(state, opened(folder), [accounts[0], *more])
    third = loaders(folder, 3, state)
    last, end = run(third, 1)
    with pytest.raises(
        ValueError, match="began again at step 7, and there is no account of rank 2 from there"
    ):
        verify(end, opened(folder), [*accounts, *more, *last[:2], {**more[2], **_longer(more[2], last[2])}])
    for loader in [*first, *second, *third]:
        loader.close()


def _longer(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    return {"num_steps": after["num_steps"], "intervals": [*before["intervals"], *after["intervals"]]}


@pytest.mark.parametrize(("cuts", "begin"), [((4, 4), 4), ((4, 6), None)])
def test_what_is_verified_begins_where_all_ranks_have_a_cut(
    folder: Path, cuts: tuple[int, int], begin: int | None
) -> None:
    own, accounts = loaders(folder, 2, None), []
    for loader, cut in zip(own, cuts, strict=True):
        batches = iter(loader)
        _ = [*islice(batches, cut)], loader.account(), [*islice(batches, 8 - cut)]
        accounts.append(loader.account())
    state = edited(own[0].state_dict(), history=json.dumps([[2, 0, 12, 6, 2, "even", 1], 8]))
    for loader in own:
        loader.close()
    if begin is None:
        with pytest.raises(ValueError, match="have no step in common"):
            verify(state, opened(folder), accounts)
    else:
        report = verify(state, opened(folder), accounts)
        assert (report.is_whole, report.begin, report.rows) == (True, begin, 6 * (8 - begin))
        assert report.notes == (f"of steps before {begin:,}, state and accounts do not tell all",)


def test_samples_left_out_are_listed_and_no_departure(folder: Path) -> None:
    def odd(sample: dict[str, Any]) -> dict[str, Any]:
        if sample["n"] in (7, 31):
            raise ValueError("no good")
        return sample

    dataset = opened(folder, transform=odd, on_error="skip")
    with loader_of(dataset, batch_size=1) as loader:
        steps = [int(batch["n"][0]) for batch in loader]
        (account,), state = run([loader], 0)
        report = verify(state, dataset, [account])
        told = {row["sample"]: row["step"] for row in loader.provenance(range(60)).to_pylist()}
    assert len(steps) == 58
    assert report.is_whole
    assert report.num_left_out == 2
    assert {step for step, _, _ in report.left_out} == {told[7], told[31]}
    assert all("no good" in text for _, _, text in report.left_out)
    assert "2 samples were left out by on_error=" in str(report)


def test_batches_of_loops_beside_the_newest_are_no_steps(folder: Path) -> None:
    with loader_of(opened(folder)) as loader:
        older, newer = iter(loader), iter(loader)
        next(older), next(newer), next(older), next(newer)
        report = verify(loader.state_dict(), opened(folder), [loader.account()])
    assert report.is_whole
    assert report.rows == 3 * report.end
    assert "1 batches of rank 0 were of loops that ran beside the newest" in report.notes[0]


def test_epochs_say_how_many_of_their_samples_came(folder: Path) -> None:
    with loader_of(opened(folder), batch_size=7) as loader:
        _ = [*loader], [*islice(loader, 2)]
        report = verify(loader.state_dict(), opened(folder), [loader.account()])
    assert [tuple(one) for one in report.epochs] == [(0, 60, 60, 0), (1, 60, 14, 0)]
    with loader_of(opened(folder), topology=rank(0, 1), batch_size=7, tail="pad") as loader:
        _ = [*loader]
        report = verify(loader.state_dict(), opened(folder), [loader.account()])
    assert [tuple(one) for one in report.epochs] == [(0, 60, 60, 3)]
    assert str(report).endswith("epoch 0: 60 of 60 samples came; 3 came once more")


def test_an_epoch_that_is_too_large_to_be_counted_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    account, state, _ = one_epoch(folder)
    monkeypatch.setattr(verify_module, "_MOST_SEEN", 59)
    report = verify(state, opened(folder), [account])
    assert (report.rows, report.epochs) == (60, ())
    assert report.notes == ("epochs are too large to count their samples one by one: 0",)


def test_rows_of_samples_that_are_measured_while_they_are_made_are_accounted_for(folder: Path) -> None:
    def dataset() -> ShardedDataset:
        return ShardedDataset(str(folder / "*.parquet"), columns=["tokens"], transform=doubled)

    how = Packed(8, column="tokens", lengths_key="doubled")
    for _ in range(2):  # lengths are measured in the first run, and known in the second
        with loader_of(dataset(), batching=how) as loader:
            num = sum(1 for _ in loader)
            (account,), state = run([loader], 0)
        report = verify(state, dataset(), [account], batching=how)
        assert report.is_whole, str(report)
        assert (report.end, report.epochs[0][:3]) == (num, (0, 60, 60))


def test_numbers_of_samples_that_are_measured_are_looked_up_once_a_packing_window(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch has samples of many windows, each of which would be shuffled again for every batch."""
    looked_up: list[int] = []
    numbers = StreamPlan.numbers

    def counted(plan: StreamPlan, order: Any, positions: np.ndarray) -> np.ndarray:
        looked_up.append(len(positions))
        return numbers(plan, order, positions)

    monkeypatch.setattr(StreamPlan, "numbers", counted)
    dataset = ShardedDataset(str(folder / "*.parquet"), columns=["tokens"], transform=doubled)
    how = Packed(8, column="tokens", lengths_key="doubled", window=30)
    with loader_of(dataset, batching=how) as loader:
        assert sum(1 for _ in loader) > 5
    assert 2 <= len(looked_up) <= 3
    assert 60 <= sum(looked_up) < 100


def doubled(sample: dict[str, Any]) -> dict[str, Any]:
    return {"tokens": np.repeat(np.asarray(sample["tokens"]), 2)}


class Doubled:
    """Tokens twice, and how many that are."""

    fingerprint = "doubled"

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        return doubled(sample)

    def measure(self, sample: dict[str, Any]) -> dict[str, int]:
        return {"tokens": 2 * len(sample["tokens"])}


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("skip", [(), [(2, 4), (9, 11)]])
@pytest.mark.filterwarnings("ignore:lengths are measured as samples are made:UserWarning")
def test_rows_that_are_planned_packing_window_by_packing_window_are_accounted_for(
    folder: Path, own_cache: None, num_workers: int, skip: Any
) -> None:
    def dataset() -> ShardedDataset:
        return ShardedDataset(str(folder / "*.parquet"), columns=["tokens"], transform=Doubled())

    how: dict[str, Any] = {"batching": Packed(16, column="tokens", window=16), "num_workers": num_workers}
    for _ in range(2):  # lengths are measured in the first run, and known in the second
        with loader_of(dataset(), batch_size=1, skip_steps=skip, **how) as loader:
            _ = [*loader], [*islice(loader, 5)]
            (account,), state = run([loader], 0)
        with loader_of(dataset(), batch_size=1, **how) as other:
            other.load_state_dict(state)
            (after,), end = run([other], 50)
        report = verify(end, dataset(), [account, after], batching=how["batching"])
        assert report.is_whole, str(report)
        assert [one.epoch for one in report.epochs][:2] == [0, 1]


def test_a_copy_of_a_loader_has_an_account_of_its_own(folder: Path) -> None:
    with loader_of(opened(folder)) as loader:
        _ = [*islice(loader, 4)]
        with copy.copy(loader) as other, pickle.loads(pickle.dumps(loader)) as third:
            first = loader.account()
            for one in (other, third):
                own = one.account()
                assert (own["first_step"], own["intervals"]) == (4, [])
                assert own["run"] != first["run"]


# ---- refusals ------------------------------------------------------------------------------------


def test_damaged_and_foreign_accounts_are_refused(folder: Path) -> None:
    account, state, _ = one_epoch(folder)
    cases: list[tuple[Any, str]] = [
        ([], "give the accounts of all ranks"),
        ([{**account, "repeated": [1.5]}], "account 0 is a damaged account: 'float' object"),
        ([{"a": 1}], "account 0 is no account: it is what loader.account"),
        ([{**account, "version": 9}], "account 0 is an account of version 9, and 1 is read"),
        ([{**account, "rank": 1}], "account 0 is a damaged account: its rank cannot be so"),
        ([{**account, "num_steps": 21}], "account 0 is a damaged account: its intervals cannot be so"),
        ([{**account, "intervals": [[0, 20, 60, "zz"]]}], "account 0 is a damaged account"),
        (
            [{**account, "seed": 5}],
            "of rank 0 from step 0 on is of another run: its data is .* and its seed 5",
        ),
        ([{**account, "world_size": 2}], "rank 0 of 1 has no account that ends with step 19"),
    ]
    for accounts, words in cases:
        with pytest.raises(ValueError, match=words):
            verify(state, opened(folder), accounts)
    with (
        loader_of(opened(folder)) as loader,
        pytest.raises(ValueError, match="nothing to verify: the state and all accounts have no step"),
    ):
        verify(loader.state_dict(), opened(folder), [account])
    with (
        loader_of([{"n": 1}] * 6, shuffle=False) as loader,
        pytest.raises(TypeError, match="only loaders over a ShardedDataset or a Mixture"),
    ):
        loader.account()


@given(st.recursive(st.none() | st.integers() | st.text(max_size=3), lambda own: st.lists(own, max_size=4)))
def test_any_json_is_an_account_or_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=r"is no account|is a damaged account|of version"):
        Account.from_json({"version": 1, "intervals": value, "run": value, "num_steps": value}, "it")


# ---- the command ------------------------------------------------------------------------------------


def test_the_command_says_it_and_exits_with_1_where_the_run_parted(folder: Path, tmp_path: Path) -> None:
    account, state, hashes = one_epoch(folder)
    (tmp_path / "state.json").write_text(json.dumps(state))
    (accounts := tmp_path / "accounts").mkdir()
    (accounts / "0.json").write_text(json.dumps(account))
    where = [str(folder / "*.parquet"), "--column", "n", "--state", str(tmp_path / "state.json")]
    code, printed = run_command("verify", *where, "--account", accounts, "--json", "-")
    told = json.loads(printed)
    assert (code, told["is_whole"], told["rows"]) == (0, True, 60)
    plus(account["intervals"][0], -1, hashes[0], -1)
    (accounts / "0.json").write_text(json.dumps(account))
    code, printed = run_command("verify", *where, "--account", accounts)
    assert code == 1
    assert "the run parted from its plan in 1 places" in printed
    assert "of step 0 did not come" in " ".join(printed.split())
    (accounts / "0.json").write_text("{")
    code, printed = run_command("verify", *where, "--account", accounts / "0.json")
    assert code == 1
    assert "0.json is no JSON, as loader.account() is to be saved" in printed
