"""Batches by length of samples that a transform makes, against the plain loop: make all, then plan."""

from __future__ import annotations

import gc
import json
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from itertools import chain, islice, zip_longest
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner
from datasets_kit import rank
from forked_kit import fast_ranks
from loader_kit import stream_of
from parameters_kit import in_pairs
from torch.nn.parallel import DistributedDataParallel

from dataflow import Bucketed, DataLoader, GradSchedule, Mixture, Packed, ShardedDataset, Shuffle, TokenBudget
from dataflow.batch.packed import PackedRows
from dataflow.tools.cli import main
from sharding.errors import DataflowError, SampleError
from sharding.lengths.batching import Batching
from sharding.lengths.measuring import producers
from sharding.lengths.unit_plan import UnitSequence
from sharding.lengths.units import units_key
from sharding.order.order import Order
from sharding.write.file import user_folder

NUM_DOCUMENTS = 211
BATCHINGS: dict[str, Callable[[], Batching]] = {
    "packed": lambda: Packed(16, window=40),
    "truncated": lambda: Packed(5, overlong="truncate", window=64),
    "budget": lambda: TokenBudget(48, window=40, multiple=2),
    "buckets": lambda: Bucketed(5, boundaries=3, window=40),
}


def length_of(i: int) -> int:
    return (i * 7919) % 23


def write(folder: Path, num: int = NUM_DOCUMENTS) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for shard in range(3):
        rows = [{"n": i, "text": "x" * length_of(i)} for i in range(shard, num, 3)]
        (folder / f"shard{shard}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three shards, and a cache folder of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return write(tmp_path / "data")


class CountedTokens:
    """A transform that notes what it made, with a random number that tells epochs apart."""

    def __init__(self) -> None:
        self.made: Counter[tuple[int, int]] = Counter()

    def __call__(self, sample: Mapping[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        self.made[sample["n"], int(rng.integers(1 << 60))] += 1
        return tokens_of(sample)


IN_FILES = [length_of(i) for shard in range(3) for i in range(shard, NUM_DOCUMENTS, 3)]


def tokens_of(sample: Mapping[str, Any]) -> dict[str, Any]:
    assert len(sample["text"]) == length_of(sample["n"])
    return {"tokens": document(sample["n"]), "n": sample["n"]}


def document(i: int) -> list[int]:
    """The tokens of text i: i * 100, i * 100 + 1, ..., one for each letter."""
    return [i * 100 + k for k in range(length_of(i))]


def loader_of(folder: Path, batching: Batching, transform: Any = tokens_of, **options: Any) -> DataLoader:
    rows = {"batch_size": 3} if isinstance(batching, Packed) else {}
    options = {"shuffle": Shuffle("window", 2), "seed": 5, "num_workers": 0, **rows, **options}
    dataset = {name: options.pop(name) for name in ("on_error", "batch_transform") if name in options}
    opened = ShardedDataset(str(folder), transform=transform, block_bytes=400, **dataset)
    return DataLoader(opened, batching=batching, **options)


# ---- the oracle ---------------------------------------------------------------------------------------


def units_of(loader: DataLoader, epoch: int = 0) -> list[list[list[int]]]:
    """Of every unit the pieces' tokens: every document is made, and each packing window planned alone."""
    dataset = loader.dataset
    order = Order(dataset.catalog.blocks.num_samples, loader.shuffle, seed=loader.seed, epoch=epoch)
    in_files = [i for shard in range(3) for i in range(shard, len(dataset), 3)]
    documents = [document(in_files[sample]) for sample in order.samples(np.arange(len(dataset)))]
    return planned(loader, documents, epoch)


def planned(loader: DataLoader, documents: list[list[int]], epoch: int) -> list[list[list[int]]]:
    """The units of documents in an epoch's order: each packing window alone."""
    batching = loader.batching
    assert batching is not None
    key_of = units_key(loader.seed, epoch, shuffled=loader.shuffle.kind != "none")
    sequence = UnitSequence(batching, len(documents), key_of)
    out = []
    for packing_window in range(sequence.num_packing_windows):
        first, end = sequence.bounds[packing_window : packing_window + 2].tolist()
        units = sequence.cut(packing_window, np.array([len(d) for d in documents[first:end]]))
        columns = zip(units.segments.position, units.segments.begin, units.segments.length, strict=True)
        pieces = [documents[first + p][b : b + n] for p, b, n in columns]
        out += [pieces[a:b] for a, b in zip(units.first[:-1], units.first[1:], strict=True)]
    return out


def segments_of(value: Any) -> list[list[list[int]]]:
    """Of every unit of a batch the pieces' tokens."""
    if isinstance(value, PackedRows):
        columns = zip(value.segments.row, value.segments.start, value.segments.length, strict=True)
        rows: list[list[list[int]]] = [[] for _ in value.tokens]
        for row, start, length in columns:
            rows[int(row)].append(value.tokens[row, start : start + length].tolist())
        return rows
    return [[row[:length].tolist() for row, length in zip(value.tokens, value.lengths, strict=True)]]


def delivered(loader: DataLoader) -> list[list[list[list[int]]]]:
    """Units of each batch of an epoch."""
    return [segments_of(batch["tokens"]) for batch in loader]


def whole_batches(units: list[Any], size: int) -> list[list[Any]]:
    return [units[i : i + size] for i in range(0, len(units), size)]


# ---- one rank -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "shuffle"),
    in_pairs(
        BATCHINGS, [Shuffle("window", 2), Shuffle("window", 4, canonical_nodes=3), Shuffle("full"), None]
    ),
    ids=str,
)
def test_batches_hold_what_the_plain_loop_packs(folder: Path, kind: str, shuffle: Shuffle | None) -> None:
    with loader_of(folder, BATCHINGS[kind](), shuffle=shuffle) as loader:
        for epoch in range(2):
            assert delivered(loader) == whole_batches(units_of(loader, epoch), loader.batch_size)


def test_a_sample_is_made_once_an_epoch(folder: Path) -> None:
    tokens = CountedTokens()
    with loader_of(folder, BATCHINGS["packed"](), tokens) as loader:
        assert len(list(loader)) > 8
    assert {i for i, _ in tokens.made} == {*range(NUM_DOCUMENTS)}
    assert set(tokens.made.values()) == {1}


def test_other_columns_come_once_a_piece(folder: Path) -> None:
    with loader_of(folder, BATCHINGS["packed"]()) as loader:
        for batch in loader:
            firsts = [piece[0] // 100 for unit in segments_of(batch["tokens"]) for piece in unit]
            assert batch["n"].tolist() == firsts


def test_columns_cut_alike_lie_place_by_place(folder: Path) -> None:
    def tokens(sample: Mapping[str, Any]) -> dict[str, Any]:
        ids = tokens_of(sample)["tokens"]
        return {"tokens": ids, "mask": torch.tensor([t % 2 for t in ids]), "whole": np.array(ids)}

    batching = Packed(7, columns=["tokens", "mask"], whole=["whole"], window=40)
    with loader_of(folder, batching, tokens) as loader:
        for batch in loader:
            rows = batch["tokens"]
            inside = rows.segment_ids > 0
            assert torch.equal(batch["mask"][inside], rows.tokens[inside] % 2)
            assert not batch["mask"][~inside].any()
            numbers = [piece[0] // 100 for unit in segments_of(rows) for piece in unit]
            assert batch["whole"].lengths.tolist() == [length_of(i) for i in numbers]


# ---- states -------------------------------------------------------------------------------------------


def test_a_resumed_loader_makes_no_sample_before_its_packing_window(folder: Path) -> None:
    with loader_of(folder, BATCHINGS["packed"]()) as loader:
        num = len(list(loader))
        loader.set_epoch(0)
        for _ in islice(loader, num - 4):
            pass
        state = loader.state_dict()
    tokens = CountedTokens()
    with loader_of(folder, BATCHINGS["packed"](), tokens) as loader:
        loader.load_state_dict(state)
        assert next(iter(loader))["tokens"].tokens.shape == (3, 16)
    first = json.loads(state["batching"])["first_sample"]
    assert first > 100
    order = Order(loader.dataset.catalog.blocks.num_samples, loader.shuffle, seed=5, epoch=0)
    in_files = [i for shard in range(3) for i in range(shard, NUM_DOCUMENTS, 3)]
    before = {in_files[sample] for sample in order.samples(np.arange(first))}
    assert not before & {i for i, _ in tokens.made}


def test_a_state_of_other_batching_is_refused(folder: Path) -> None:
    with loader_of(folder, Packed(16, window=40)) as loader:
        next(iter(loader))
        state = loader.state_dict()
    with (
        loader_of(folder, Packed(17, window=40)) as loader,
        pytest.raises(ValueError, match="length=16, and this loader has length=17"),
    ):
        loader.load_state_dict(state)


def test_loops_at_a_time_share_little_memory(folder: Path) -> None:
    with loader_of(
        folder, BATCHINGS["packed"](), memory_limit=400_000, num_workers=1, workers="thread"
    ) as loader:
        one, other = iter(loader), iter(loader)
        got: list[list[Any]] = [[], []]
        for a, b in zip_longest(one, other):
            got[0] += [] if a is None else [segments_of(a["tokens"])]
            got[1] += [] if b is None else [segments_of(b["tokens"])]
        assert got == [whole_batches(units_of(loader, epoch), 3) for epoch in range(2)]


def test_samples_with_known_lengths_that_are_cut_and_kept_beyond_the_limit_are_told_once(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def large(sample: Mapping[str, Any]) -> dict[str, Any]:
        return {"tokens": np.zeros(length_of(sample["n"]) * 3000, np.int64)}

    lengths = [length_of(i) * 3000 for shard in range(3) for i in range(shard, NUM_DOCUMENTS, 3)]
    batching = Packed(8000, lengths=np.array(lengths), window=40)
    with loader_of(folder, batching, large, memory_limit=8 << 20) as loader:
        assert list(loader)
    (line,) = [line for line in caplog.messages if "wait for their rows" in line]
    assert "smaller window=" in line


def test_samples_that_are_kept_hold_credits_until_they_are_delivered(folder: Path) -> None:
    def large(sample: Mapping[str, Any]) -> dict[str, Any]:
        return {"tokens": np.full(length_of(sample["n"]) * 1000, sample["n"])}

    with loader_of(folder, Packed(8000, window=40), large) as loader:
        in_use = [loader.stats().memory.in_use_bytes for _ in loader]
        total = sum(length_of(i) * 8000 for i in range(NUM_DOCUMENTS))
        assert 0 < in_use[-1] < max(in_use) / 2
        assert max(in_use) < total


# ---- ranks that tell each other the lengths ----------------------------------------------------------

GLOBAL_ROWS = 12


def of_rank(folder: Path, kind: str, options: dict[str, Any], cuts: Collection[int], load: Any) -> Any:
    """On one rank: the units of each batch, states after some batches, and what was made."""
    world_size = dist.get_world_size()
    rows = {"batch_size": GLOBAL_ROWS // world_size} if BATCHINGS[kind]().rows_are_units else {}
    tokens, units, states = CountedTokens(), [], {}
    with loader_of(folder, BATCHINGS[kind](), tokens, **rows, **options) as loader:
        if load is not None:
            loader.load_state_dict(load)
        for number, batch in enumerate(loader, 1):
            units.append(segments_of(batch["tokens"]))
            if number in cuts:
                states[number] = loader.state_dict()
    return units, states, tokens.made


def of_world(
    folder: Path,
    world_size: int,
    kind: str,
    cuts: Collection[int] = (),
    load: Any = None,
    **options: Any,
) -> tuple[list[list[Any]], dict[int, Any], Counter[tuple[int, int]]]:
    """The units of each global batch, the states (the same on all ranks), and how often samples were made."""
    ranks = fast_ranks(of_rank, world_size, args=(folder, kind, options, cuts, load), timeout_s=90)
    steps = max(len(units) for units, _, _ in ranks)
    batches = [list(chain(*(units[b] for units, _, _ in ranks if b < len(units)))) for b in range(steps)]
    assert all(states == ranks[0][1] for _, states, _ in ranks)
    return batches, ranks[0][1], sum((made for _, _, made in ranks), Counter())


@pytest.mark.parametrize("world_size", [1, 3])
def test_every_number_of_ranks_delivers_the_same_global_batches_and_makes_a_sample_once(
    folder: Path, world_size: int
) -> None:
    batches, _, made = of_world(folder, world_size, "packed", tail="uneven")
    with loader_of(folder, BATCHINGS["packed"]()) as loader:
        assert batches == whole_batches(units_of(loader), GLOBAL_ROWS)
    assert {i for i, _ in made} == {*range(NUM_DOCUMENTS)}
    assert set(made.values()) == {1}


def expected_on(units: list[Any], world_size: int, size: int, tail: str) -> list[list[Any]]:
    """Global batches under a tail rule; the last one is filled up with its own first units."""
    batches = whole_batches(units, size)
    left = len(batches[-1])
    if left == size:
        return batches
    fill = {"drop": 0, "uneven": 0, "pad": size - left, "even": -left % world_size}[tail]
    own = batches.pop()
    return batches if tail == "drop" else [*batches, [*own, *(own[k % left] for k in range(fill))]]


def fails_on_one_rank(folder: Path, number: int) -> str:
    def tokens(sample: Mapping[str, Any]) -> dict[str, Any]:
        if dist.get_rank() == 1 and sample["n"] == number:
            raise ArithmeticError("no tokens today")
        return tokens_of(sample)

    with loader_of(folder, BATCHINGS["packed"](), tokens) as loader, pytest.raises(DataflowError) as caught:
        list(loader)
    return str(caught.value)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("place", [0, 100, 150, 205])
def test_all_ranks_end_when_one_cannot_make_a_sample(folder: Path, place: int) -> None:
    """Whether that shows while the first packing window is made, or a later one beside batches."""
    with loader_of(folder, BATCHINGS["packed"]()) as loader:
        order = Order(loader.dataset.catalog.blocks.num_samples, loader.shuffle, seed=5, epoch=0)
    bounds = UnitSequence(Packed(16, window=40), NUM_DOCUMENTS, lambda packing_window: None).bounds
    first = int(bounds[bounds <= place][-1])
    of_one = first + np.flatnonzero(producers(first, min(first + 40, NUM_DOCUMENTS), order.num_lanes, 2) == 1)
    in_files = [i for shard in range(3) for i in range(shard, NUM_DOCUMENTS, 3)]
    number = in_files[int(order.samples(of_one[:1])[0])]
    other, own = fast_ranks(fails_on_one_rank, 2, args=(folder, number), timeout_s=60)
    assert "ArithmeticError: no tokens today" in own
    assert other.startswith("rank 1 could not make its samples: SampleError")


def leaves_early(folder: Path) -> list[Any]:
    """Loops that are left after some batches, then a whole one."""
    with loader_of(folder, BATCHINGS["packed"](), tail="uneven") as loader:
        for num in (1, 4, 9):
            list(islice(loader, num))
        epoch = loader.epoch + 1
        return [epoch, delivered(loader)]


def test_loops_may_be_left_early_on_all_ranks(folder: Path) -> None:
    ranks = fast_ranks(leaves_early, 2, args=(folder,), timeout_s=60)
    with loader_of(folder, BATCHINGS["packed"]()) as loader:
        units = units_of(loader, ranks[0][0])
    batches = [[*a, *b] for a, b in zip(ranks[0][1], ranks[1][1], strict=True)]
    assert batches == whole_batches(units, 6)


def is_alone(folder: Path) -> str:
    with loader_of(folder, BATCHINGS["packed"](), timeout=2) as loader:
        if dist.get_rank() == 1:
            return ""
        with pytest.raises(DataflowError, match="all of them must make the loader") as caught:
            next(iter(loader))
        return str(caught.value)


def test_a_rank_that_asks_alone_is_told_in_time(folder: Path) -> None:
    assert fast_ranks(is_alone, 2, args=(folder,), timeout_s=60)[0]


def test_ranks_without_a_process_group_are_told_to_have_one(folder: Path) -> None:
    with (
        loader_of(folder, BATCHINGS["packed"](), topology=rank(0, 2)) as loader,
        pytest.raises(DataflowError, match="distributed is not initialised"),
    ):
        next(iter(loader))


def trained(folder: Path, tail: str, state: Any = None) -> Any:
    """On one rank: the tokens of windows of two microbatches, and the schedule's state after the fourth."""
    torch.manual_seed(0)
    model: Any = DistributedDataParallel(torch.nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), 1e-6)
    seen: list[Any] = []
    windows, kept_state = [], None
    with loader_of(folder, BATCHINGS["packed"](), tail=tail) as loader:
        sched = GradSchedule(loader, model, optimizer, accumulate=2, timeout_s=30)
        if state is not None:
            sched.load_state_dict(state)
        with sched:
            for batch in sched:
                tokens = batch["tokens"].tokens[:, :1].float()
                sched.backward(model(tokens).sum() * 1e-6)
                seen.append(segments_of(batch["tokens"]))
                if sched.step():
                    windows.append(seen)
                    seen = []
                    if len(windows) == 4:
                        kept_state = sched.state_dict()
    return windows, kept_state


@pytest.mark.one_in(3)
@pytest.mark.parametrize("tail", ["drop", "pad", "even", "uneven"])
def test_a_grad_schedule_steps_and_goes_on_over_all_tails(folder: Path, tail: str) -> None:
    whole = fast_ranks(trained, 2, args=(folder, tail), timeout_s=90)
    with loader_of(folder, BATCHINGS["packed"]()) as loader:
        expected = expected_on(units_of(loader), 2, 6, tail)
    batches = [[batch for window in windows for batch in window] for windows, _ in whole]
    got = [[*a, *(b or [])] for a, b in zip_longest(*batches)]
    assert got[: len(expected) - 1] == expected[:-1]
    assert got[-1][: len(expected[-1])] == expected[-1]
    assert whole[0][1] == whole[1][1]
    rest = fast_ranks(trained, 2, args=(folder, tail, whole[0][1]), timeout_s=90)
    assert [own[0] for own in rest] == [own[0][4:] for own in whole]


class Letters:
    """A tokenizer whose tokens are letters."""

    def encode(self, text: str) -> Any:
        return SimpleNamespace(ids=[*text.encode()])


# ---- lengths that are known, of samples that are made ------------------------------------------------


def known(folder: Path) -> np.ndarray:
    return np.array([length_of(i) for shard in range(3) for i in range(shard, NUM_DOCUMENTS, 3)])


@pytest.mark.parametrize(("kind", "tail"), in_pairs(BATCHINGS, ["pad", "even", "uneven"]))
def test_with_known_lengths_each_rank_makes_what_it_delivers(folder: Path, kind: str, tail: str) -> None:
    batching = type(BATCHINGS[kind]())(**{**vars(BATCHINGS[kind]()), "lengths": known(folder)})
    rows = {"batch_size": 4} if kind in ("packed", "truncated") else {}
    of_ranks, made = [], Counter[tuple[int, int]]()
    for r in range(3):
        tokens = CountedTokens()
        with loader_of(folder, batching, tokens, topology=rank(r, 3), tail=tail, **rows) as loader:
            of_ranks.append(delivered(loader))
            assert loader.stats().lengths.units == len(units_of(loader))
        made += tokens.made
    steps = max(map(len, of_ranks))
    batches = [list(chain(*(own[b] for own in of_ranks if b < len(own)))) for b in range(steps)]
    assert batches == expected_on(units_of(loader), 3, 12 if rows else 3, tail)
    if kind != "packed" and tail == "uneven":  # where no document is cut, or filled up
        assert set(made.values()) == {1}


def test_a_length_that_lies_is_an_error_that_names_the_sample(folder: Path) -> None:
    lengths = known(folder)
    lengths[30] += 1  # the 31st of the first shard
    with (
        loader_of(folder, Packed(16, window=40, lengths=lengths)) as loader,
        pytest.raises(SampleError, match=f"has {length_of(90)} elements, but .* said to be") as caught,
    ):
        list(loader)
    assert caught.value.shard.endswith("shard0.jsonl")
    assert caught.value.key == "30"


class MarkedTokens(CountedTokens):
    """Counts what it made, without random numbers."""

    fingerprint = "marked"

    def __call__(self, sample: Mapping[str, Any]) -> dict[str, Any]:  # type: ignore[override]
        self.made[sample["n"], 0] += 1
        return tokens_of(sample) | {"own": [sample["n"]]}


LONG_ROWS = Packed(32, overlong="error", window=100)
WITH_OWN = replace(LONG_ROWS, whole=["own"])


def test_samples_of_known_lengths_are_made_with_their_batch(folder: Path) -> None:
    tokens = MarkedTokens()
    with loader_of(folder, replace(WITH_OWN, lengths=known(folder)), tokens) as loader:
        rows = list[Any]()
        for batch in loader:
            rows.append(segments_of(batch["tokens"]))
            delivered_so_far = sum(map(len, chain(*rows)))
            assert sum(tokens.made.values()) == delivered_so_far
        assert rows == whole_batches(units_of(loader), 3)


def test_the_epoch_after_the_one_that_measured_makes_samples_with_their_batch(folder: Path) -> None:
    tokens = MarkedTokens()
    with loader_of(folder, WITH_OWN, tokens) as loader:
        list(loader)
        tokens.made.clear()
        loop = iter(loader)
        rows = segments_of(next(loop)["tokens"])
        assert sum(tokens.made.values()) == sum(map(len, rows))
        rest = [segments_of(batch["tokens"]) for batch in loop]
        assert [rows, *rest] == whole_batches(units_of(loader, 1), 3)


def test_a_resumed_loader_of_known_lengths_makes_only_what_comes(folder: Path) -> None:
    batching = replace(WITH_OWN, lengths=known(folder))
    with loader_of(folder, batching, MarkedTokens()) as loader:
        whole, states = [], []
        for batch in loader:
            whole.append(segments_of(batch["tokens"]))
            states.append(loader.state_dict())
    for cut in (1, len(whole) // 2, len(whole) - 1):
        tokens = MarkedTokens()
        with loader_of(folder, batching, tokens) as loader:
            loader.load_state_dict(states[cut - 1])
            assert delivered(loader) == whole[cut:]
        assert sum(tokens.made.values()) == sum(map(len, chain(*whole[cut:])))


def test_text_alone_is_made_by_the_packing_window_where_its_lengths_are_known(folder: Path) -> None:
    tokens = MarkedTokens()
    with loader_of(folder, replace(LONG_ROWS, lengths=known(folder)), tokens) as loader:
        rows = segments_of(next(iter(loader))["tokens"])
        assert sum(tokens.made.values()) >= 100 > sum(map(len, rows))


@pytest.mark.parametrize("tail", ["pad", "uneven"])
def test_a_bad_sample_in_a_planned_row_is_a_hole_that_is_counted_once(folder: Path, tail: str) -> None:
    def tokens(sample: Mapping[str, Any]) -> dict[str, Any]:
        ids = tokens_of(sample)["tokens"][:: 0 if sample["n"] == 17 else 1]
        mask = [1] * len(ids[sample["n"] == 31 :])
        return {"tokens": ids, "mask": mask, "own": np.array([sample["n"]])}

    batching = Packed(
        32, columns=["tokens", "mask"], whole=["own"], pad={"tokens": 7}, window=100, overlong="error"
    )
    batching = replace(batching, lengths=known(folder))
    options = {"on_error": "skip", "tail": tail, "topology": rank(0, 1), "batch_size": 5}
    with loader_of(folder, batching) as loader:
        planned_rows = {tuple(map(tuple, row)) for row in units_of(loader)}
    with loader_of(folder, batching, tokens, **options) as loader:
        num_holes = 0
        for batch in loader:
            rows = batch["tokens"]
            units = segments_of(rows)
            assert batch["own"].values.tolist() == [piece[0] // 100 for row in units for piece in row]
            outside = rows.segment_ids == 0
            assert (rows.tokens[outside] == 7).all()
            assert not batch["mask"][outside].any()
            assert batch["mask"][~outside].all()
            assert (rows.targets(mask=batch["mask"])[outside] == -100).all()
            num_holes += sum(tuple(map(tuple, row)) not in planned_rows for row in units)
        assert loader.stats().skipped_samples == 2
        assert num_holes in (1, 2)


def test_with_raise_a_bad_sample_in_a_planned_row_ends_the_loop(folder: Path) -> None:
    def tokens(sample: Mapping[str, Any]) -> dict[str, Any]:
        ids = tokens_of(sample)["tokens"]
        return {"tokens": ids, "mask": ids[sample["n"] == 31 :], "own": [sample["n"]]}

    batching = replace(WITH_OWN, columns=["tokens", "mask"], lengths=known(folder))
    with loader_of(folder, batching, tokens) as loader, pytest.raises(SampleError, match="alike"):
        list(loader)


# ---- what cannot be batched --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("transform", "text"),
    [
        (lambda sample: sample, "column 'tokens', but the sample has n, text"),
        (lambda sample: sample["text"], "samples must be dicts"),
        (lambda sample: {"tokens": sample["text"]}, "holds text"),
        (lambda sample: {"tokens": [[1], [2]]}, "return lists of numbers"),
        (lambda sample: {"tokens": 1}, "return lists of numbers"),
    ],
)
def test_samples_without_a_list_of_numbers_are_refused(folder: Path, transform: Any, text: str) -> None:
    with loader_of(folder, Packed(16), transform) as loader, pytest.raises(SampleError, match=text) as caught:
        next(iter(loader))
    assert caught.value.stage == "transform"


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "batching", [Packed(16), TokenBudget(64), Bucketed(4)], ids=lambda it: type(it).__name__
)
@pytest.mark.parametrize(
    "bad", [None, 7, {}, {"n": 1}, {"tokens": "text"}, {"tokens": None}, {"tokens": [[1], [1, 2]]}], ids=repr
)
def test_what_is_no_sample_is_left_out_and_counted(folder: Path, batching: Any, bad: Any) -> None:
    def transform(sample: Mapping[str, Any]) -> Any:
        return bad if sample["n"] % 3 == 0 else tokens_of(sample)

    with loader_of(folder, batching, transform, on_error="skip") as loader:
        whole = [list(chain(*segments_of(batch["tokens"]))) for batch in loader]
        assert loader.stats().skipped_samples == len(range(0, NUM_DOCUMENTS, 3))
    assert {piece[0] // 100 for piece in chain(*whole) if piece} <= {n for n in range(NUM_DOCUMENTS) if n % 3}


def test_a_sample_that_cannot_be_made_is_left_out_and_counted_once(folder: Path) -> None:
    def tokens(sample: Mapping[str, Any]) -> dict[str, Any]:
        ids = tokens_of(sample)["tokens"]
        return {"tokens": ids[:: 0 if sample["n"] == 17 else 1], "mask": ids[sample["n"] == 31 :]}

    batching = Packed(16, columns=["tokens", "mask"], window=40)
    with loader_of(folder, batching, tokens, on_error="skip") as loader:
        whole, states = [], []
        for batch in loader:
            whole += chain(*segments_of(batch["tokens"]))
            states.append(loader.state_dict())
        assert loader.stats().skipped_samples == 2
        assert loader.stats().batches == len(states)
    left_out = {17, 31}
    assert sum(map(len, whole)) == sum(length_of(i) for i in range(NUM_DOCUMENTS) if i not in left_out)
    assert not {piece[0] // 100 for piece in whole} & left_out
    for state in states[::7]:
        with loader_of(folder, batching, tokens, on_error="skip") as loader:
            loader.load_state_dict(state)
            with pytest.raises(TypeError):
                len(loader)
            assert list(loader)
            assert loader.stats().skipped_samples == 2


def test_a_sample_of_known_length_that_cannot_be_made_is_missing_in_its_rows(folder: Path) -> None:
    def tokens(sample: Mapping[str, Any]) -> dict[str, Any]:
        assert sample["n"] not in (17, 31)
        return tokens_of(sample)

    batching = Packed(5, window=40, lengths=known(folder))  # each is in several rows
    with loader_of(folder, batching) as loader:
        units = units_of(loader)
    rows = [[piece for piece in unit if piece[0] // 100 not in (17, 31)] for unit in units]
    with loader_of(folder, batching, tokens, on_error="skip") as loader:
        whole, states = [], []
        for batch in loader:
            whole.append(segments_of(batch["tokens"]))
            states.append(loader.state_dict())
        assert loader.stats().skipped_samples == 2
    expected = [batch for batch in whole_batches(rows, 3) if any(batch)]
    assert whole == expected
    with loader_of(folder, batching, tokens, on_error="skip") as loader:
        loader.load_state_dict(states[10])
        assert delivered(loader) == whole[11:]


def test_the_number_of_batches_is_a_type_error(folder: Path) -> None:
    with loader_of(folder, BATCHINGS["packed"]()) as loader:
        with pytest.raises(TypeError, match="measured on the way"):
            len(loader)
        assert loader.batches_left is None


MARKED = {"tail": "pad", "mark_repeats": True}


def test_repeats_are_marked_after_the_batch_transform(folder: Path) -> None:
    def rows_alone(batch: Any) -> Any:
        assert "__repeat__" not in batch
        return {"rows": batch["tokens"]}

    options = {**MARKED, "topology": rank(0, 1)}
    with loader_of(folder, BATCHINGS["packed"](), batch_transform=rows_alone, **options) as loader:
        flags = [batch["__repeat__"] for batch in loader]
    num = len(units_of(loader))
    assert num % 3
    assert torch.cat(flags).tolist() == [False] * num + [True] * (-num % 3)


def test_a_batch_transform_that_returns_no_dict_leaves_no_room_for_the_mark(folder: Path) -> None:
    packed = BATCHINGS["packed"]()
    with (
        loader_of(folder, packed, batch_transform=lambda batch: batch["tokens"].tokens, **MARKED) as loader,
        pytest.raises(TypeError, match=r"batch_transform returned a Tensor"),
    ):
        next(iter(loader))


def test_a_loader_that_is_dropped_is_gone_without_the_garbage_collector(folder: Path) -> None:
    """Trainers turn it off, and make a loader for each validation."""
    gc.disable()
    try:
        loader = loader_of(folder, BATCHINGS["packed"]())
        assert list(loader)
        stream = weakref.ref(stream_of(loader))
        del loader
        assert stream() is None
    finally:
        gc.enable()


# ---- lengths that are kept ---------------------------------------------------------------------------


def kept(kind: str, key: str = "letters") -> Batching:
    return type(BATCHINGS[kind]())(**{**vars(BATCHINGS[kind]()), "lengths_key": key})


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kind", BATCHINGS)
def test_once_all_lengths_were_found_later_loaders_know_them(folder: Path, kind: str) -> None:
    with loader_of(folder, kept(kind)) as loader:
        whole, states = [], []
        for batch in loader:
            whole.append(segments_of(batch["tokens"]))
            states.append(loader.state_dict())
        assert len(loader) == loader.batches_left == len(list(loader))
    with loader_of(folder, kept(kind)) as loader:
        assert len(loader) == len(whole)
        assert delivered(loader) == whole
        for cut in (2, len(whole) // 2, len(whole) - 1):
            loader.load_state_dict(states[cut - 1])
            assert loader.batches_left == len(whole) - cut
            assert delivered(loader) == whole[cut:]
        list(islice(loader, 3))
        state = loader.state_dict()
    with loader_of(folder, kept(kind), lambda sample: tokens_of(sample), on_error="skip") as loader:
        loader.load_state_dict(state)
        assert delivered(loader) == whole_batches(units_of(loader, state["epoch"]), loader.batch_size)[3:]


def test_kept_lengths_serve_ranks_without_a_process_group(folder: Path) -> None:
    with loader_of(folder, kept("packed")) as loader:
        list(loader)
    of_ranks = []
    for r in range(2):
        with loader_of(folder, kept("packed"), topology=rank(r, 2), tail="drop") as loader:
            of_ranks.append(delivered(loader))
    batches = [[*a, *b] for a, b in zip(*of_ranks, strict=True)]
    assert batches == expected_on(units_of(loader), 2, 6, "drop")


def with_kept(folder: Path) -> Any:
    with loader_of(folder, kept("packed"), tail="uneven") as loader:
        first = delivered(loader)
        return first, len(loader), delivered(loader), loader.stats().lengths.units


def test_ranks_that_found_all_lengths_go_on_together(folder: Path) -> None:
    ranks = fast_ranks(
        with_kept, 2, args=(folder,), timeout_s=60, env={"XDG_CACHE_HOME": str(folder / "../cache")}
    )
    again = fast_ranks(
        with_kept, 2, args=(folder,), timeout_s=60, env={"XDG_CACHE_HOME": str(folder / "../cache")}
    )
    assert ranks == again
    with loader_of(folder, BATCHINGS["packed"]()) as loader:
        for epoch, batches in enumerate(zip(*((own[0], own[2]) for own in ranks), strict=True)):
            joined = [[*a, *(b or [])] for a, b in zip_longest(*batches)]
            assert joined == whole_batches(units_of(loader, epoch), 6)
    assert [own[1] for own in ranks] == [len(own[2]) for own in ranks]


def test_runs_that_were_ended_early_complete_the_lengths_together(folder: Path) -> None:
    with loader_of(folder, kept("packed")) as loader:
        list(islice(loader, 30))
        state = loader.state_dict()
    with loader_of(folder, kept("packed")) as loader:
        with pytest.raises(TypeError):
            len(loader)
        loader.load_state_dict(state)
        rest = len(list(loader))
        assert len(loader)
    with loader_of(folder, kept("packed")) as loader:
        assert len(loader) == 30 + rest


def test_lengths_are_kept_by_key_and_not_without_one_or_where_they_are_random(folder: Path) -> None:
    with loader_of(folder, kept("packed")) as loader:
        list(loader)
    for batching, transform in (
        (BATCHINGS["packed"](), tokens_of),
        (kept("packed", "other letters"), tokens_of),
        (kept("packed"), CountedTokens()),
    ):
        with loader_of(folder, batching, transform) as loader, pytest.raises(TypeError):
            len(loader)


def test_lengths_of_a_run_that_is_killed_are_kept_for_the_one_that_goes_on(folder: Path) -> None:
    killed = loader_of(folder, kept("packed"))
    loop = iter(killed)
    for _ in range(15):
        next(loop)
    with loader_of(folder, kept("packed")) as loader:  # while the first one has not ended, and never does
        loader.load_state_dict(killed.state_dict())
        num_left = len(list(loader))
        assert num_left > 5
    with loader_of(folder, kept("packed")) as loader:
        assert len(loader) == 15 + num_left
    killed.close()


def test_lengths_beside_a_catalog_serve_who_has_found_none(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def opened() -> DataLoader:
        dataset = ShardedDataset(tmp_path / "x.catalog", transform=tokens_of)
        return DataLoader(dataset, 3, batching=kept("packed"), num_workers=0)

    catalog = ["index", str(tmp_path / "x.catalog"), "--lengths"]
    shown = CliRunner().invoke(main, ["index", str(folder), "--output", catalog[1]])
    assert shown.exit_code == 0
    assert "no lengths were found" in CliRunner().invoke(main, catalog).output
    with opened() as loader:
        num = len(list(loader))
    assert "1 of lengths, in" in CliRunner().invoke(main, catalog).output
    assert len([*(tmp_path / "x.lengths").glob("*.npy")]) == 1
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "elsewhere"))
    with opened() as loader:
        assert len(loader) == num


@pytest.mark.parametrize(
    ("batching", "most"),
    [(Packed(9, overlong="error", window=40), 9), (TokenBudget(11, multiple=4, window=40), 8)],
    ids=["packed", "budget"],
)
def test_samples_that_fit_nowhere_are_named_or_left_out(folder: Path, batching: Any, most: int) -> None:
    long = [n for n in range(NUM_DOCUMENTS) if length_of(n) > most]
    assert long
    with (
        loader_of(folder, batching) as loader,
        pytest.raises(SampleError, match=f"than the {most} that") as at,
    ):
        list(loader)
    assert at.value.stage == "transform"
    shard = int(at.value.shard.removesuffix(".jsonl")[-1])
    assert shard + 3 * int(at.value.key or -1) in long
    with loader_of(folder, batching, on_error="skip") as loader:
        rows = [unit for batch in delivered(loader) for unit in batch]
        assert loader.stats().skipped_samples == len(long)
    came = sorted(piece[0] // 100 for unit in rows for piece in unit if piece)
    assert came == [n for n in range(NUM_DOCUMENTS) if n not in long and length_of(n)]


@pytest.mark.parametrize(
    "batching",
    [
        Packed(9, window=40),
        Packed(9, overlong="truncate", window=40, lengths=IN_FILES),
        TokenBudget(9, overlong="truncate", window=40),
    ],
)
def test_a_sample_is_not_cut_where_every_piece_would_have_all_its_pixels(folder: Path, batching: Any) -> None:
    def with_pixels(sample: Mapping[str, Any]) -> dict[str, Any]:
        return tokens_of(sample) | {"pixels": torch.zeros(2, 3)}

    long = [n for n in range(NUM_DOCUMENTS) if length_of(n) > 9]
    cure = 'cuts at 9, and each piece would have all of \'pixels\'.*overlong="error".*on_error="skip"'
    with loader_of(folder, batching, with_pixels) as loader, pytest.raises(SampleError, match=cure) as caught:
        list(loader)
    shard = int(caught.value.shard.removesuffix(".jsonl")[-1])
    assert shard + 3 * int(caught.value.key or -1) in long
    with loader_of(folder, batching, with_pixels, on_error="skip") as loader:
        came = [n for batch in loader for n in batch["n"].tolist()]
        assert loader.stats().skipped_samples == len(long)
    assert len(came) == len({*came})
    assert not {*came} & {*long}


def test_a_transform_with_a_fingerprint_needs_no_key(folder: Path) -> None:
    class Marked:
        fingerprint = "letters"

        def __call__(self, sample: Mapping[str, Any]) -> dict[str, Any]:
            return tokens_of(sample)

    with loader_of(folder, BATCHINGS["packed"](), Marked()) as loader:
        num = len([state := loader.state_dict() for _ in loader])
    with loader_of(folder, BATCHINGS["packed"](), Marked()) as loader:
        assert len(loader) == num
    Marked.fingerprint = "others"
    with (
        loader_of(folder, BATCHINGS["packed"](), Marked()) as loader,
        pytest.raises(ValueError, match="other"),
    ):
        loader.load_state_dict(state)


def test_kept_lengths_of_another_transform_are_an_error_that_says_so(folder: Path) -> None:
    with loader_of(folder, kept("packed")) as loader:
        list(loader)
    transform = lambda sample: {"tokens": [*tokens_of(sample)["tokens"], 1]}  # noqa: E731
    with (
        loader_of(folder, kept("packed"), transform) as loader,
        pytest.raises(SampleError, match="change lengths_key="),
    ):
        list(loader)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("damage", [b"", b"no array", "cut", "negative"])
def test_a_damaged_file_costs_only_finding_again(folder: Path, damage: Any) -> None:
    with loader_of(folder, kept("packed")) as loader:
        num = len(list(loader))
    (path,) = Path(user_folder("lengths")).glob("*.npy")
    data = {"cut": path.read_bytes()[:-3], "negative": path.read_bytes()[:-4] + b"\xf0\xff\xff\xff"}
    path.write_bytes(data.get(damage, damage))
    with loader_of(folder, kept("packed")) as loader:
        with pytest.raises(TypeError):
            len(loader)
        assert len(list(loader)) == num
    with loader_of(folder, kept("packed")) as loader:
        assert len(loader) == num


# ---- mixtures ----------------------------------------------------------------------------------------


def other_tokens(sample: Mapping[str, Any]) -> dict[str, Any]:
    """Tokens of another source, below zero."""
    return {"tokens": [-1 - t for t in tokens_of(sample)["tokens"]], "n": sample["n"]}


def mixture_of(folder: Path, shares: str = "samples") -> Mixture:
    one = ShardedDataset(str(folder), transform=tokens_of, block_bytes=400)
    other = ShardedDataset(str(folder), transform=other_tokens, block_bytes=400).take(150)
    return Mixture({one: 0.7, other: 0.3}, shares=shares)


def mixed(folder: Path, batching: Batching, shares: str = "samples", **options: Any) -> DataLoader:
    options = {"shuffle": Shuffle("window", 2), "seed": 5, "num_workers": 0, "batch_size": 3, **options}
    return DataLoader(mixture_of(folder, shares), batching=batching, **options)


def mixed_rows(loader: DataLoader, epoch: int) -> list[list[list[int]]]:
    """What the plain loop packs of an epoch."""
    order = loader.dataset.windows(epoch, loader.shuffle, seed=loader.seed)
    in_files = [i for shard in range(3) for i in range(shard, NUM_DOCUMENTS, 3)]
    numbers = order.samples(np.arange(order.num_samples)).tolist()
    documents = [
        document(in_files[n])
        if n < NUM_DOCUMENTS
        else [-1 - t for t in document(in_files[n - NUM_DOCUMENTS])]
        for n in numbers
    ]
    return planned(loader, documents, epoch)


def test_a_mixture_of_what_transforms_make_is_packed_as_by_the_plain_loop(folder: Path) -> None:
    with mixed(folder, Packed(16, window=40), tail="uneven") as loader:
        for epoch in range(2):
            assert delivered(loader) == whole_batches(mixed_rows(loader, epoch), 3)


def test_shares_by_tokens_use_lengths_that_a_run_has_kept(folder: Path) -> None:
    batching = Packed(16, window=40, lengths_key="letters")
    with mixed(folder, batching) as loader:
        for _ in range(3):  # an epoch may leave samples of the larger source to the next
            list(loader)
        assert len(loader)
    with mixed(folder, batching, "tokens") as loader:
        rows = list(chain(*delivered(loader)))
        assert len(loader) == -(-len(rows) // 3)
    of_one = sum(len(piece) for row in rows for piece in row if piece[0] >= 0)
    every = sum(len(piece) for row in rows for piece in row)
    assert abs(of_one - 0.7 * every) <= 23


def test_an_error_names_the_source_of_a_mixture(folder: Path) -> None:
    lengths = [known(folder), known(folder)]
    lengths[1][3] += 1
    with (
        mixed(folder, Packed(16, window=40, lengths=lengths)) as loader,
        pytest.raises(SampleError, match="said to be") as caught,
    ):
        list(loader)
    assert caught.value.key == "3"
