"""`DataLoader(Mixture, batching=...)` against units laid out one element at a time from source orders."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from datasets_kit import edited, rank
from loader_kit import stream_of
from parameters_kit import meeting_in_pairs, one_in
from test_loader_lengths import Unit, delivered, laid_out, through_json, tokens_of

from dataflow import Bucketed, DataLoader, Image, Mixture, Packed, ShardedDataset, Shuffle, TokenBudget
from dataflow.planning.length_aware import make_planner
from sharding.errors import SampleError
from sharding.lengths.batching import Batching
from sharding.lengths.unit_plan import UnitSequence
from sharding.lengths.units import units_key
from sharding.mixture.windows import source_seed
from sharding.order.selection import SelectedOrder

LENGTHS: dict[str, list[int]] = {
    "a": [1 + 5 * i % 7 for i in range(41)],
    "b": [7 * i % 12 for i in range(19)],
    "c": [3 + 11 * i % 17 for i in range(8)],
}
"""Elements of the documents of each source: some have none, some are longer than a row."""
Document = list[int]


def documents(name: str) -> list[Document]:
    """Tokens that tell source, document and place."""
    first = 10_000 * (1 + "abc".index(name))
    return [[first + 20 * number + place for place in range(n)] for number, n in enumerate(LENGTHS[name])]


def write(folder: Path, name: str) -> str:
    (folder / name).mkdir()
    tokens = documents(name)
    for shard, own in enumerate((tokens[:5], tokens[5:])):
        masks = pa.array([[t % 2 for t in one] for one in own], pa.list_(pa.uint8()))
        columns = {"tokens": pa.array(own, pa.list_(pa.int32())), "mask": masks, "size": [*map(len, own)]}
        pq.write_table(pa.table(columns), folder / name / f"shard-{shard}.parquet", row_group_size=3)
    return str(folder / name / "*.parquet")


@pytest.fixture(scope="module")
def urls(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("abc")
    return [write(folder, name) for name in "abc"]


def opened(urls: Sequence[str], columns: Sequence[str] = ("tokens",)) -> list[ShardedDataset]:
    return [ShardedDataset(url, columns=list(columns)) for url in urls]


@pytest.fixture(scope="module")
def abc(urls: list[str]) -> list[ShardedDataset]:
    return opened(urls)


RULES: dict[str, Callable[..., Mixture]] = {
    "first": lambda a, b, c: Mixture({a: 0.6, b: 0.3, c: 0.1}),
    "all": lambda a, b, c: Mixture({a: 0.3, b: 0.4, c: 0.3}, stop="all"),
    "repeats": lambda a, b, c: Mixture([a, b, c], repeats=[1, 2, 2.5]),
    "schedule": lambda a, b, c: Mixture([a, b, c], schedule={0: [1, 0, 1], 20: [1, 2, 1]}, run_length=3),
    "nested": lambda a, b, c: Mixture({Mixture({a: 2, c: 1}): 1, b: 1}, stop="all"),
    "tokens": lambda a, b, c: Mixture({a: 0.2, b: 0.5, c: 0.3}, shares="tokens"),
    "all tokens": lambda a, b, c: Mixture(
        {Mixture({a: 1, b: 2}, shares="tokens"): 2, c: 1}, stop="all", shares="tokens"
    ),
    "views": lambda a, b, c: Mixture({a.skip(4): 2, b.subset(slice(None, None, 2)): 1, c.take(5): 1}),
}
BATCHINGS: dict[str, Batching] = {
    "packed": Packed(24, window=16, pad=7),
    "split": Packed(8, window=16),
    "truncated": Packed(8, overlong="truncate", window=16),
    "budget": TokenBudget(48, window=16, multiple=2),
    "buckets": Bucketed(5, boundaries=(4, 9), window=16, pad=1),
}
SHUFFLES = [
    Shuffle("window", 3, canonical_nodes=1),
    Shuffle("window", 4, canonical_nodes=3),
    Shuffle("blocks", 2),
    Shuffle("none"),
]
CASES = one_in(3, meeting_in_pairs(BATCHINGS, RULES, SHUFFLES))


def loader_of(mixture: Mixture, batching: Batching, r: int = 0, of: int = 1, **options: Any) -> DataLoader:
    rows = {"batch_size": 2} if isinstance(batching, Packed) else {}
    options = {"shuffle": SHUFFLES[0], "seed": 3, "num_workers": 0, **rows, **options}
    return DataLoader(mixture, batching=batching, topology=rank(r, of), **options)


# ---- the oracle ------------------------------------------------------------------------------------------


def documents_in_order(loader: DataLoader, epoch: int) -> list[Document]:
    """The document of each position of an epoch: whose turn, which of that source's order."""
    return [document for _, document in turns_in_order(loader, epoch)]


def turns_in_order(loader: DataLoader, epoch: int) -> list[tuple[int, Document]]:
    """The same with the source of each."""
    mixture = loader.dataset
    assert isinstance(mixture, Mixture)

    def document(source: int, index: int) -> Document:
        dataset, seed = mixture.sources[source], source_seed(loader.seed, source)
        turn, position = divmod(index, len(dataset))
        return epoch_of(dataset, loader.shuffle, seed, turn)[position]

    if mixture.spec.counts == "tokens":
        return turns_by_tokens(loader, document, epoch)
    interleaving = mixture.spec.epoch(epoch)
    turns = zip(*interleaving.locate(np.arange(interleaving.num_samples)), strict=True)
    return [(int(source), document(int(source), int(index))) for source, index in turns]


def turns_by_tokens(
    loader: DataLoader, document: Callable[[int, int], Document], epoch: int
) -> list[tuple[int, Document]]:
    """Turn by turn: of the sources that are not ahead, the one whose next document is due first."""
    mixture, batching = loader.dataset, loader.batching
    assert isinstance(mixture, Mixture)
    assert batching is not None
    most = batching.length if getattr(batching, "overlong", "") == "truncate" else 1 << 30
    weights, nth = mixture.shares, [0] * len(mixture.sources)
    for _ in range(epoch + 1):
        turns, tokens, first = list[tuple[int, Document]](), [0] * len(nth), list(nth)
        while True:
            sizes = [min(most, len(document(s, nth[s]))) for s in range(len(nth))]
            begun = [s for s, t in enumerate(tokens) if t <= weights[s] * sum(tokens)]
            source = min(begun, key=lambda s: ((tokens[s] + sizes[s]) / weights[s], s))
            turns.append((source, document(source, nth[source])))
            tokens[source] += sizes[source]
            nth[source] += 1
            seen = [n - f >= len(own) for n, f, own in zip(nth, first, mixture.sources, strict=True)]
            if any(seen) if mixture.spec.stop == "first" else all(seen):
                break
    return turns


@lru_cache(64)
def epoch_of(dataset: ShardedDataset, shuffle: Shuffle, seed: int, epoch: int) -> list[Document]:
    """The documents of one epoch of a source, in its order."""
    order = SelectedOrder(dataset.selection, shuffle, seed=seed, epoch=epoch)
    block, row = dataset.selection.locate(order.samples(np.arange(len(dataset))))
    numbers = dataset.catalog.blocks.first_sample[block] + row
    return [documents(Path(dataset.catalog.urls[0]).parent.name)[number] for number in numbers]


def units_of(loader: DataLoader, epoch: int) -> list[Unit]:
    in_order, batching = documents_in_order(loader, epoch), loader.batching
    assert batching is not None
    lengths = np.array([*map(len, in_order)])
    key_of = units_key(loader.seed, epoch, loader.shuffle.kind != "none")
    sequence = UnitSequence(batching, len(lengths), key_of, lengths=lengths)
    pieces, counts = sequence.take(np.arange(sequence.num_units))
    columns = (pieces.position.tolist(), pieces.begin.tolist(), pieces.length.tolist())
    flat = [(in_order[position], begin, length) for position, begin, length in zip(*columns, strict=True)]
    return [flat[a:b] for a, b in pairwise([0, *np.cumsum(counts).tolist()])]


def expected(loader: DataLoader, epoch: int = 0) -> list[list[Any]]:
    """The batches of one rank alone."""
    assert loader.batching is not None
    units = [laid_out(loader.batching, unit) for unit in units_of(loader, epoch)]
    size = loader.batch_size or 1
    return [list(chain(*units[i : i + size])) for i in range(0, len(units), size)]


# ---- exactness -------------------------------------------------------------------------------------------


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("kind", "rule", "shuffle"), CASES, ids=str)
def test_batches_hold_what_the_plan_says_element_by_element(
    abc: list[ShardedDataset], kind: str, rule: str, shuffle: Shuffle
) -> None:
    batching, mixture = BATCHINGS[kind], RULES[rule](*abc)
    with loader_of(mixture, batching, shuffle=shuffle) as loader:
        for epoch in range(2):
            steps = len(loader)
            got = delivered(loader)
            assert got == expected(loader, epoch)
            assert len(got) == steps
            if kind != "truncated":
                tokens = Counter(chain(*documents_in_order(loader, epoch)))
                assert tokens_of(batching, got) == tokens


@pytest.mark.parametrize("name", ["split", "buckets"])
def test_a_first_batch_plans_each_sample_of_the_epoch_once_whatever_the_weights(
    abc: list[ShardedDataset], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The window of a source that comes rarely spans the whole epoch, and so all that is planned."""
    batching = BATCHINGS[name]
    cut, planned = type(batching).cut, list[int]()

    def counted(self: Any, lengths: Any, *args: Any) -> Any:
        planned.append(len(lengths))
        return cut(self, lengths, *args)

    def num_planned(*repeats: int) -> int:
        planned.clear()
        with loader_of(Mixture(abc[:2], repeats=repeats), batching, shuffle=True) as loader:
            plan = stream_of(loader).epoch_plan(0, 0)
            for window in {*plan.order.locate(np.arange(42))[0].tolist()}:  # one of each source
                plan.rank_indices(window)
        return sum(planned)

    of_839, of_840 = num_planned(20, 1), num_planned(14, 14)
    assert of_839 <= 1.2 * of_840 <= 1.5 * 840


def test_every_source_comes_as_often_as_its_share_says(abc: list[ShardedDataset]) -> None:
    with loader_of(Mixture(abc, repeats=[1, 3, 2]), Packed(24, window=16)) as loader:
        found = tokens_of(Packed(24), delivered(loader))
    for name, times in zip("abc", (1, 3, 2), strict=True):
        assert all(found[token] == times for token in chain(*documents(name)))


@pytest.mark.parametrize("rule", ["tokens", "all tokens"])
def test_every_prefix_is_within_the_longest_document_of_each_share_of_tokens(
    abc: list[ShardedDataset], rule: str
) -> None:
    mixture = RULES[rule](*abc)
    with loader_of(mixture, BATCHINGS["packed"]) as loader:
        turns = turns_in_order(loader, 0)
        got = tokens_of(Packed(24), delivered(loader))
    tokens = np.array([[len(one) * (source == s) for s in range(3)] for source, one in turns]).cumsum(axis=0)
    shares = np.array([*map(float, mixture.shares)])
    longest = max(max(LENGTHS[name]) for name in "abc")
    assert np.abs(tokens - tokens.sum(axis=1, keepdims=True) * shares).max() <= longest
    by_source = Counter(dict.fromkeys(range(3), 0))
    for token, times in got.items():
        by_source[token // 10_000 - 1] += times
    assert [by_source[number] for number in range(3)] == tokens[-1].tolist()


def test_shares_of_the_samples_follow_from_those_of_the_tokens(abc: list[ShardedDataset]) -> None:
    with loader_of(RULES["tokens"](*abc), Packed(24)) as loader:
        shares = stream_of(loader)._plan.sample_shares
    weights = [
        share * len(lengths) / sum(lengths)
        for share, lengths in zip((2, 5, 3), LENGTHS.values(), strict=True)
    ]
    assert sum(shares) == 1
    assert [float(share) for share in shares] == pytest.approx([weight / sum(weights) for weight in weights])


def test_states_by_tokens_tell_where_their_epoch_began(abc: list[ShardedDataset]) -> None:
    mixture = RULES["tokens"](*abc)
    with loader_of(mixture, Packed(24)) as loader:
        delivered(loader)
        state = through_json(loader.state_dict())
        given_before = Counter(source for source, _ in turns_in_order(loader, 0))
        assert state["sources"] == [given_before[number] for number in range(3)]
        for sources in ([1, 2], None, [-1, 0, 0], "abc"):
            with pytest.raises(ValueError, match="sources must be"):
                loader.load_state_dict(edited(state, sources=sources))
    with loader_of(Mixture({abc[0]: 1, abc[1]: 1}), Packed(24)) as other:
        assert other.state_dict()["sources"] == [0, 0]  # between two epochs, for a mixture that differs
        next(iter(other))
        assert other.state_dict()["sources"] is None


def test_shares_of_tokens_need_batches_by_length_and_weights(abc: list[ShardedDataset]) -> None:
    with pytest.raises(ValueError, match=r'shares="tokens" counts elements .* pass batching='):
        DataLoader(RULES["tokens"](*abc), 4)
    with pytest.raises(TypeError, match="with the lengths of its samples only"):
        len(RULES["tokens"](*abc))
    weighted = {abc[0]: 1, abc[1]: 1}
    for wrong in (
        lambda: Mixture(abc, shares="tokens"),
        lambda: Mixture(abc, temperature=2, shares="tokens"),
        lambda: Mixture(weighted, shares="words"),  # type: ignore[arg-type]
        lambda: Mixture(weighted, shares="tokens", run_length=2),
        lambda: Mixture({Mixture(weighted): 1, abc[2]: 1}, shares="tokens"),
    ):
        with pytest.raises(ValueError, match=r"shares|temperature"):
            wrong()


def test_what_an_epoch_leaves_of_a_source_comes_first_in_the_next(abc: list[ShardedDataset]) -> None:
    """Three epochs of it together hold the first source's documents as often as its share says."""
    mixture = Mixture({abc[0]: 1, abc[1]: 1})
    with loader_of(mixture, Packed(24, window=16)) as loader:
        tokens = tokens_of(Packed(24), [*delivered(loader), *delivered(loader)])
    times = {token: tokens[token] for token in chain(*documents("a"))}
    assert set(times.values()) == {0, 1}
    assert all(tokens[token] == 2 for token in chain(*documents("b")))


# ---- ranks and states ------------------------------------------------------------------------------------


def test_a_state_of_other_shares_or_lengths_is_refused(abc: list[ShardedDataset]) -> None:
    a, b, _ = abc
    with loader_of(Mixture({a: 1, b: 1}), Packed(24)) as loader:
        next(iter(loader))
        state = loader.state_dict()
    with loader_of(Mixture({a: 2, b: 1}), Packed(24)) as other, pytest.raises(ValueError, match="weights="):
        other.load_state_dict(state)
    ones = [np.ones(len(LENGTHS[name]), np.int64) for name in "ab"]
    batching = Packed(24, lengths=ones)
    with loader_of(Mixture({a: 1, b: 1}), batching) as other, pytest.raises(ValueError, match="lengths of"):
        other.load_state_dict(state)


# ---- lengths, and what cannot be ---------------------------------------------------------------------------


def test_lengths_are_given_for_each_source(abc: list[ShardedDataset]) -> None:
    mixture, marks = RULES["all"](*abc), []
    arrays = [np.array(LENGTHS[name]) for name in "abc"]
    ways: list[Any] = [
        None,
        "size",
        lambda catalog: arrays[[one.catalog for one in abc].index(catalog)],
        arrays,
        ["size", arrays[1], None],
        dict(zip(reversed(abc), ["size", None, arrays[0]], strict=True)),
    ]
    for lengths in ways:
        with loader_of(mixture, Packed(24, window=16, lengths=lengths)) as loader:
            marks.append(loader.state_dict()["batching"])
            assert delivered(loader) == expected(loader)
    assert all(mark == marks[0] for mark in marks)


@pytest.mark.parametrize("lengths", [np.arange(68), [None, None], {}], ids=["array", "two", "none"])
def test_lengths_that_leave_out_a_source_are_refused(abc: list[ShardedDataset], lengths: Any) -> None:
    with pytest.raises(ValueError, match="lengths= of a mixture of 3 datasets must be"):
        loader_of(Mixture(abc), Packed(24, lengths=lengths))


def test_a_sample_that_is_not_as_long_as_planned_is_named_by_its_source(abc: list[ShardedDataset]) -> None:
    lengths = [np.array(LENGTHS[name]) for name in "abc"]
    lengths[1][4] += 1
    with (
        loader_of(Mixture(abc), Packed(24, lengths=lengths)) as loader,
        pytest.raises(SampleError, match=r"b/shard-0.parquet.*4 elements, but lengths= says 5"),
    ):
        list(loader)


def png(number: int) -> bytes:
    """A picture whose pixels tell a document."""
    file = io.BytesIO()
    PIL.Image.new("RGB", (4, 4), (number // 256, number % 256, 7)).save(file, "PNG")
    return file.getvalue()


@pytest.mark.parametrize("rule", ["all", "all tokens"])
def test_masks_and_whole_images_ride_along(urls: list[str], tmp_path: Path, rule: str) -> None:
    """The mask is cut as the tokens are; an image comes once with every piece of its document."""
    for name, url in zip("abc", urls, strict=True):
        for file in sorted(Path(url).parent.glob("*.parquet")):
            table = pq.read_table(file)
            keys = [tokens[0] if tokens else 0 for tokens in table["tokens"].to_pylist()]
            table = table.append_column("image", pa.array([png(key // 20) for key in keys]))
            (tmp_path / name).mkdir(exist_ok=True)
            pq.write_table(table, tmp_path / name / file.name, row_group_size=3)
    names, decode = ["tokens", "mask", "image"], {"image": Image(size=4)}
    sources = [ShardedDataset(str(tmp_path / n / "*.parquet"), columns=names, decode=decode) for n in "abc"]
    batching = Packed(8, columns=["tokens", "mask"], window=16, pad={"mask": 9})
    num_segments = 0
    with loader_of(RULES[rule](*sources), batching) as loader:
        for batch in loader:
            rows = batch["tokens"]
            inside = rows.segment_ids > 0
            assert torch.equal(batch["mask"][inside], rows.tokens[inside] % 2)
            assert (batch["mask"][~inside] == 9).all()
            first = rows.tokens[rows.segments.row, rows.segments.start] // 20
            pixels = batch["image"][:, :, 0, 0].int()
            assert (pixels[:, 0] * 256 + pixels[:, 1]).tolist() == first.tolist()
            num_segments += len(first)
        assert num_segments == sum(len(unit) for unit in units_of(loader, 0))


def test_an_endless_mixture_is_refused_with_the_way_out(abc: list[ShardedDataset]) -> None:
    with pytest.raises(ValueError, match='one with stop="never" has no end; with stop="first" or "all"'):
        loader_of(Mixture({abc[0]: 1, abc[1]: 1}, stop="never"), Packed(24))


def test_sizes_are_chosen_for_what_the_shares_deliver(abc: list[ShardedDataset]) -> None:
    few, many = (Mixture({abc[0]: weight, abc[2]: 1}) for weight in (1, 1000))
    per_row = [make_planner(Packed(64), one, 1 << 20).samples_per_unit for one in (few, many)]
    assert per_row[0] < per_row[1]  # the second has hardly a long document
    whole = make_planner(Packed(8), few, 1 << 30).batching.window
    small = make_planner(Packed(8), few, 2000).batching.window
    long = make_planner(Packed(1 << 20), few, 1 << 30).batching.window
    assert whole is not None
    assert small is not None
    assert long is not None
    assert 1 <= small < whole == 16_384 < long
