"""Batches by length that a transform's `measure` plans window by window, before any sample is made."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from forked_kit import fast_ranks
from loader_kit import stream_of
from parameters_kit import in_pairs
from test_measured_lengths import (
    BATCHINGS,
    IN_FILES,
    NUM_DOCUMENTS,
    expected_on,
    length_of,
    loader_of,
    segments_of,
    tokens_of,
    units_of,
    whole_batches,
    write,
)

from dataflow import DataLoader, Mixture, Packed, ShardedDataset, Shuffle, TokenBudget
from prefetch.errors import MemoryLimitError
from sharding.errors import DataflowError, SampleError
from sharding.lengths.unit_plan import LEFT_OUT, UnitPlan, UnitSequence
from sharding.write.file import user_folder

SHORT = Packed(32, overlong="error", window=40)
GLOBAL_ROWS = 12


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three shards, and a cache folder of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return write(tmp_path / "data")


class Measured:
    """Tells lengths without making samples, and counts both."""

    fingerprint = "measured"

    def __init__(self, bad: Collection[int] = (), unmeasured: Collection[int] = ()) -> None:
        self.made, self.told = Counter[int](), Counter[int]()
        self.bad, self.unmeasured = bad, unmeasured

    def __call__(self, sample: Mapping[str, Any]) -> dict[str, Any]:
        self.made[sample["n"]] += 1
        if sample["n"] in self.bad:
            raise ArithmeticError("not today")
        return tokens_of(sample)

    def measure(self, sample: Mapping[str, Any]) -> dict[str, int]:
        self.told[sample["n"]] += 1
        if sample["n"] in self.unmeasured:
            raise ArithmeticError("no header")
        return {"tokens": len(sample["text"])}


def delivered(loader: Any) -> list[Any]:
    return [segments_of(batch["tokens"]) for batch in loader]


def documents_of(rows: Any) -> list[int]:
    return [piece[0] // 100 for row in rows for piece in row]


def test_what_is_planned_next_is_measured_and_what_is_delivered_is_made(folder: Path) -> None:
    tokens = Measured()
    with loader_of(folder, SHORT, tokens) as loader:
        with pytest.raises(TypeError, match="measured"):
            len(loader)
        rows = list[Any]()
        for batch in loader:
            rows.append(segments_of(batch["tokens"]))
            assert sum(tokens.made.values()) == sum(map(len, chain(*rows)))
            if len(rows) == 1:
                assert 40 <= sum(tokens.told.values()) < NUM_DOCUMENTS
        assert rows == whole_batches(units_of(loader), 3)
        assert set(tokens.told.values()) == {1}
        assert len(loader) == len(rows)
        assert delivered(loader) == whole_batches(units_of(loader, 1), 3)
        assert set(tokens.told.values()) == {1}
    again = Measured()
    with loader_of(folder, SHORT, again) as loader:
        assert len(loader) == len(rows)
        assert delivered(loader) == rows
    assert not again.told


@pytest.mark.parametrize(
    ("kind", "shuffle", "workers"),
    in_pairs(BATCHINGS, [Shuffle("window", 2), Shuffle("full"), None], ["main", "thread", "process"]),
    ids=str,
)
def test_batches_hold_what_the_plain_loop_packs(
    folder: Path, kind: str, shuffle: Shuffle | None, workers: str
) -> None:
    builders: Any = {} if workers == "main" else {"workers": workers, "num_workers": 2}
    with loader_of(folder, BATCHINGS[kind](), Measured(), shuffle=shuffle, **builders) as loader:
        for epoch in range(2):
            assert delivered(loader) == whole_batches(units_of(loader, epoch), loader.batch_size)


def test_without_a_fingerprint_each_epoch_is_measured_again(folder: Path) -> None:
    tokens = Measured()
    tokens.fingerprint = ""  # type: ignore[misc]
    with loader_of(folder, SHORT, tokens) as loader:
        for epoch in range(2):
            assert delivered(loader) == whole_batches(units_of(loader, epoch), 3)
            assert set(tokens.told.values()) == set(tokens.made.values()) - {epoch} == {epoch + 1}


class Drawn(Measured):
    """Cuts a random part of each text, by the first draw of its generator."""

    def __call__(self, sample: Mapping[str, Any], rng: np.random.Generator) -> dict[str, Any]:  # type: ignore[override]
        made = super().__call__(sample)
        return {**made, "tokens": made["tokens"][: self.measure(sample, rng)["tokens"]]}

    def measure(self, sample: Mapping[str, Any], rng: np.random.Generator) -> dict[str, int]:  # type: ignore[override]
        return {"tokens": int(rng.integers(len(sample["text"]) + 1))}


@pytest.mark.parametrize("workers", ["main", "process"])
def test_a_measure_that_draws_holds_for_one_epoch(folder: Path, workers: str) -> None:
    """A length that were not the one that was drawn would be an error."""
    builders: Any = {} if workers == "main" else {"workers": workers, "num_workers": 2}
    epochs, states = [], []
    with loader_of(folder, SHORT, Drawn(), **builders) as loader:
        for _ in range(2):
            epochs.append([])
            for batch in loader:
                epochs[-1].append(segments_of(batch["tokens"]))
                states.append(loader.state_dict())
        with pytest.raises(TypeError, match="measured"):
            len(loader)
    lengths = [{piece[0]: len(piece) for piece in chain(*chain(*batches))} for batches in epochs]
    assert lengths[0] != lengths[1]
    assert not user_files()
    cut = len(epochs[0]) + 3
    with loader_of(folder, SHORT, Drawn(), **builders) as loader:
        loader.load_state_dict(states[cut - 1])
        assert delivered(loader) == epochs[1][3:]


def user_files() -> list[str]:
    """The files of lengths that are kept."""
    folder = Path(user_folder("lengths"))
    return [path.name for path in folder.glob("*.npy")] if folder.exists() else []


def test_a_measure_that_only_some_sources_have_is_not_used_which_is_told(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sources = [ShardedDataset(str(folder), transform=transform) for transform in (Measured(), tokens_of)]
    with DataLoader(Mixture([*sources]), 3, batching=SHORT, num_workers=0) as loader:
        assert len([*islice(loader, 3)]) == 3
    assert "some sources of the mixture have no measure" in caplog.text


def test_shares_by_tokens_ask_for_all_lengths_first(folder: Path) -> None:
    tokens = Measured()
    sources = [ShardedDataset(str(folder), transform=tokens, block_bytes=400) for _ in range(2)]
    mixture = Mixture(dict.fromkeys(sources, 0.5), shares="tokens", stop="all")
    with DataLoader(mixture, 3, True, batching=SHORT, num_workers=0) as loader:
        assert not tokens.made
        assert len(loader) == len(delivered(loader))


def test_a_mixture_is_measured_ahead(folder: Path) -> None:
    sources = [ShardedDataset(str(folder), transform=Measured(), block_bytes=400) for _ in range(2)]
    with DataLoader(Mixture([*sources]), 3, True, batching=SHORT, num_workers=0) as loader:
        documents = Counter(chain(*map(documents_of, delivered(loader))))
        assert len(loader)
        again = delivered(loader)
    assert documents == {i: 2 for i in range(NUM_DOCUMENTS) if length_of(i)}
    assert Counter(chain(*map(documents_of, again))) == documents


def test_a_resumed_loader_makes_nothing_of_what_was_delivered(folder: Path) -> None:
    tokens = Measured()
    tokens.fingerprint = ""  # type: ignore[misc]
    whole, states = [], []
    with loader_of(folder, SHORT, tokens) as loader:
        for batch in loader:
            whole.append(segments_of(batch["tokens"]))
            states.append(loader.state_dict())
    for cut in (1, 7, len(whole) - 1, len(whole)):
        tokens = Measured()
        tokens.fingerprint = ""  # type: ignore[misc]
        with loader_of(folder, SHORT, tokens) as loader:
            loader.load_state_dict(states[cut - 1])
            assert [segments_of(batch["tokens"]) for batch in islice(loader, len(whole) - cut)] == whole[cut:]
        assert sum(tokens.made.values()) == sum(map(len, chain(*whole[cut:])))
        first_left = sum(map(len, chain(*whole[:cut])))
        assert sum(tokens.told.values()) <= NUM_DOCUMENTS - first_left + 40


# ---- ranks --------------------------------------------------------------------------------------------


def of_rank(
    folder: Path, kind: str, options: dict[str, Any], cuts: Collection[int], load: Any, bad: Any
) -> Any:
    """On one rank: the units of each batch, states after some, what was told and made, skipped samples."""
    world_size = dist.get_world_size()
    rows = {"batch_size": GLOBAL_ROWS // world_size} if BATCHINGS[kind]().rows_are_units else {}
    tokens, units, states = Measured(*bad), [], {}
    with loader_of(folder, BATCHINGS[kind](), tokens, **rows, **options) as loader:
        if load is not None:
            loader.load_state_dict(load)
        for number, batch in enumerate(loader, 1):
            units.append(segments_of(batch["tokens"]))
            if number in cuts:
                states[number] = loader.state_dict()
        return units, states, tokens.told, tokens.made, loader.stats().skipped_samples


def of_world(
    folder: Path,
    world_size: int,
    kind: str = "packed",
    *,
    cuts: Any = (),
    load: Any = None,
    bad: Any = (),
    **options: Any,
) -> Any:
    """The units of each global batch, the states, what was told and made in the whole job, and skipped."""
    cache = {"XDG_CACHE_HOME": str(folder / f"../cache{world_size}{load is None}")}
    ranks = fast_ranks(
        of_rank, world_size, args=(folder, kind, options, cuts, load, bad), timeout_s=90, env=cache
    )
    steps = max(len(own[0]) for own in ranks)
    batches = [list(chain(*(own[0][b] for own in ranks if b < len(own[0])))) for b in range(steps)]
    assert all(own[1].keys() == ranks[0][1].keys() for own in ranks)
    counts = [sum((own[at] for own in ranks), Counter[int]()) for at in (2, 3)]
    return batches, ranks[0][1], *counts, sum(own[4] for own in ranks)


@pytest.mark.parametrize(("kind", "tail"), in_pairs(BATCHINGS, ["drop", "pad", "even", "uneven"]))
def test_ranks_measure_a_share_each_and_agree_on_the_plan(folder: Path, kind: str, tail: str) -> None:
    batches, _, told, made, _ = of_world(folder, 2, kind, tail=tail)
    with loader_of(folder, BATCHINGS[kind]()) as loader:
        size = GLOBAL_ROWS if loader.batching.rows_are_units else 2
        assert batches == expected_on(units_of(loader), 2, size, tail)
    assert set(told.values()) == {1}
    assert len(told) == NUM_DOCUMENTS
    if tail != "drop":
        assert {*made} >= {i for i in range(NUM_DOCUMENTS) if length_of(i)}


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 3)])
def test_a_first_run_is_gone_on_with_by_any_number_of_ranks(folder: Path, before: int, after: int) -> None:
    cuts = (2, 5)
    whole, states, *_ = of_world(folder, before, cuts=cuts, tail="uneven")
    for cut in cuts:
        rest, _, told, made, _ = of_world(folder, after, load=states[cut], tail="uneven")
        assert rest == whole[cut:]
        assert {*made} == {document for batch in whole[cut:] for document in documents_of(batch)}
        assert set(told.values()) <= {1}


def test_a_bad_sample_in_a_planned_row_keeps_ranks_in_step(folder: Path) -> None:
    """One fails when it is made, two when they are measured: these are in no plan."""
    with loader_of(folder, BATCHINGS["packed"]()) as loader:
        whole = sorted(chain(*map(documents_of, whole_batches(units_of(loader), 3))))
    bad = ([17], [31, 105])
    batches, _, _, _, skipped = of_world(folder, 2, bad=bad, tail="uneven", on_error="skip")
    assert sorted(chain(*map(documents_of, batches))) == [i for i in whole if i not in (17, 31, 105)]
    pieces = sum(i == 17 for i in whole)
    assert 3 <= skipped <= 2 * 2 + pieces


def rows_one_by_one(folder: Path, bad: Collection[int]) -> Any:
    with loader_of(folder, SHORT, Measured(bad), batch_size=1, on_error="skip") as loader:
        return delivered(loader), loader.stats().empty_batches


def test_a_rank_that_has_nothing_left_of_a_row_keeps_in_step_by_its_last_one(folder: Path) -> None:
    run = {"timeout_s": 60, "env": {"XDG_CACHE_HOME": str(folder / "../first")}}
    (others, _), (rows, _) = fast_ranks(rows_one_by_one, 2, args=(folder, ()), **run)
    bad = documents_of(rows[3])
    run["env"] = {"XDG_CACHE_HOME": str(folder / "../second")}
    (same, none), (kept, empty) = fast_ranks(rows_one_by_one, 2, args=(folder, bad), **run)
    assert (same, none) == (others, 0)
    assert (kept, empty) == ([*rows[:3], rows[2], *rows[4:]], 1)


def fails_on_one_rank(folder: Path) -> str:
    bad = [i for i in range(NUM_DOCUMENTS) if dist.get_rank() == 1]
    with loader_of(folder, SHORT, Measured((), bad)) as loader, pytest.raises(DataflowError) as caught:
        list(loader)
    return str(caught.value)


def test_all_ranks_end_when_one_cannot_measure_a_sample(folder: Path) -> None:
    other, own = fast_ranks(fails_on_one_rank, 2, args=(folder,), timeout_s=60)
    assert "ArithmeticError: no header" in own
    assert other.startswith("rank 1 could not make its samples: SampleError")


def leaves_early(folder: Path) -> list[Any]:
    with loader_of(folder, SHORT, Measured(), tail="uneven") as loader:
        for num in (1, 4, 9):
            list(islice(loader, num))
        return delivered(loader)


def test_loops_may_be_left_early_on_all_ranks(folder: Path) -> None:
    ranks = fast_ranks(leaves_early, 2, args=(folder,), timeout_s=60)
    with loader_of(folder, SHORT) as loader:
        expected = whole_batches(units_of(loader, 3), 6)
    assert [[*a, *b] for a, b in zip(*ranks, strict=False)] == expected[: len(ranks[1])]


# ---- errors, and the end -------------------------------------------------------------------------------


def test_what_measure_cannot_tell_is_an_error_of_its_sample(folder: Path) -> None:
    with loader_of(folder, SHORT, Measured((), [90])) as loader, pytest.raises(SampleError) as caught:
        list(loader)
    assert caught.value.key == "30"
    with loader_of(folder, SHORT, Measured((), [90]), on_error="skip") as loader:
        documents = sorted(chain(*map(documents_of, delivered(loader))))
        assert documents == [i for i in range(NUM_DOCUMENTS) if length_of(i) and i != 90]
        assert loader.stats().skipped_samples == 1
        assert 90 not in [*chain(*map(documents_of, delivered(loader)))]  # it is asked again, epoch by epoch
        assert loader.stats().skipped_samples == 2


def test_a_length_that_is_not_what_was_measured_is_an_error_with_both(folder: Path) -> None:
    class Lying(Measured):
        def measure(self, sample: Mapping[str, Any]) -> dict[str, int]:
            return {"tokens": len(sample["text"]) + (sample["n"] == 90)}

    text = f"has {length_of(90)} elements, but its length was said to be {length_of(90) + 1}"
    with loader_of(folder, SHORT, Lying(), on_error="skip") as loader, pytest.raises(SampleError, match=text):
        list(loader)


@pytest.mark.parametrize("num_taken", [0, 1, 9])
def test_a_loader_is_closed_and_dropped_wherever_it_is(folder: Path, num_taken: int) -> None:
    gc.disable()
    try:
        loader = loader_of(folder, SHORT, Measured(), num_workers=2, workers="thread")
        loop = iter(loader)
        assert len([*islice(loop, num_taken)]) == num_taken
        stream = weakref.ref(stream_of(loader))
        loader.close()
        assert not [*loop] or not num_taken
        del loader, loop
        assert stream() is None
    finally:
        gc.enable()


def test_loops_at_a_time_measure_for_themselves(folder: Path) -> None:
    with loader_of(folder, SHORT, Measured(), memory_limit=1 << 20) as loader:
        both = [*zip(loader, loader, strict=False)]
        for epoch, batches in enumerate(zip(*both, strict=True)):
            units = whole_batches(units_of(loader, epoch), 3)
            assert [segments_of(batch["tokens"]) for batch in batches] == units[: len(batches)]


def test_a_limit_that_is_too_small_says_that_measuring_has_a_part_of_it(folder: Path) -> None:
    with (
        loader_of(folder, SHORT, Measured(), memory_limit=2000) as loader,
        pytest.raises(MemoryLimitError) as caught,
    ):
        list(loader)
    assert "measuring what comes next, share its memory_limit" in caught.value.__notes__[0]


def test_lengths_of_a_run_that_ended_early_serve_the_next(folder: Path) -> None:
    with loader_of(folder, SHORT, Measured()) as loader:
        list(islice(loader, 15))
        state = loader.state_dict()
    with loader_of(folder, SHORT, Measured()) as loader:
        loader.load_state_dict(state)
        rest = len(list(loader))
        assert len(loader)
    with loader_of(folder, SHORT, Measured()) as loader:
        assert len(loader) == 15 + rest


def test_a_packing_window_is_as_large_as_where_lengths_are_stored(folder: Path) -> None:
    """Nothing is made again where a run goes on inside it."""
    with loader_of(folder, replace(SHORT, window=None), Measured()) as loader:
        assert np.sum(IN_FILES) > 0
        assert stream_of(loader)._plan.planner.batching.window == 16_384


def test_no_window_waits_for_a_sample_that_was_left_out() -> None:
    sequence = UnitSequence(TokenBudget(48, window=40), 40, lambda packing_window: None)
    sequence.keep_lengths()
    sequence.add(0, np.array([LEFT_OUT if i == 7 else 5 for i in range(40)]))
    order: Any = None
    plan = UnitPlan(order, sequence.known_part(0), batch_size=1, rank=0, world_size=1, tail="uneven")
    assert plan._count_own(0).tolist() == [int(i != 7) for i in range(40)]


class Rounded(Measured):
    """Tells lengths as floats, as a division does."""

    def measure(self, sample: Mapping[str, Any]) -> dict[str, Any]:
        return {"tokens": len(sample["text"]) + 0.5}


def test_a_length_that_is_no_whole_number_is_an_error_and_is_not_rounded(folder: Path) -> None:
    with (
        loader_of(folder, SHORT, Rounded()) as loader,
        pytest.raises(SampleError, match="without the length of 'tokens', an integer"),
    ):
        next(iter(loader))
