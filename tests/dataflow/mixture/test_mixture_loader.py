"""`DataLoader` over a `Mixture`: what it delivers against positions, sources and orders, one by one."""

from __future__ import annotations

import functools
import io
from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch
from datasets_kit import edited, make_ints_tar, make_jsonl, make_parquet, rank, write_tar
from loader_kit import stream_of

from dataflow import DataLoader, Image, Mixture, ShardedDataset, Shuffle
from sharding.errors import SampleError
from sharding.mixture.windows import MixturePlan, source_seed
from sharding.order.selection import SelectedOrder

SIZES = (47, 20, 9)
SHUFFLES = [Shuffle("window", 3, 1), Shuffle("window", 4, 4), Shuffle("blocks", 2), Shuffle("none", 2, 2)]
Sample = tuple[str, int]


def open_all(folder: Path) -> list[ShardedDataset]:
    """Three datasets of three formats that deliver a number and the shard it came from."""
    made = []
    makers = ((make_parquet, "label"), (make_jsonl, "label"), (make_ints_tar, "cls"))
    for name, (make, column), size in zip("abc", makers, SIZES, strict=True):
        (folder / name).mkdir(exist_ok=True)
        kept = folder / name / "kept.catalog"
        made.append(
            make(folder / name, size).open(columns={"n": column, "url": "__url__"}, catalog=str(kept))
        )
    return made


@pytest.fixture(scope="module")
def abc(tmp_path_factory: pytest.TempPathFactory) -> list[ShardedDataset]:
    return open_all(tmp_path_factory.mktemp("abc"))


RULES: dict[str, Callable[..., Mixture]] = {
    "first": lambda a, b, c: Mixture({a: 0.7, b: 0.2, c: 0.1}),
    "all": lambda a, b, c: Mixture({a: 0.2, b: 0.5, c: 0.3}, stop="all"),
    "repeats": lambda a, b, c: Mixture([a, b, c], repeats=[1, 2, 2.5]),
    "schedule": lambda a, b, c: Mixture([a, b, c], schedule={0: [1, 0, 1], 30: [1, 2, 1]}, run_length=3),
    "views": lambda a, b, c: Mixture(
        {a.skip(5): 1, b.subset(slice(None, None, 3)): 1, c.take(4): 1}, stop="all"
    ),
}


@pytest.fixture(params=RULES)
def mixture(request: pytest.FixtureRequest, abc: list[ShardedDataset]) -> Mixture:
    return RULES[request.param](*abc)


def samples_of(batch: dict[str, Any]) -> list[Sample]:
    """(folder, number) of each sample of a batch."""
    return [(Path(url).parent.name, int(n)) for url, n in zip(batch["url"], batch["n"], strict=True)]


def delivered(loader: DataLoader) -> list[list[Sample]]:
    return [samples_of(batch) for batch in loader]


def by_plan(loader: DataLoader, epoch: int, start: int = 0) -> list[list[Sample]]:
    """The oracle: this rank's positions, their source and index, that source's order, sample by sample."""
    mixture, found = loader.dataset, []
    plan = stream_of(loader).epoch_plan(epoch, start)
    assert isinstance(mixture, Mixture)
    assert isinstance(plan, MixturePlan)
    for number in range(plan.num_batches):
        source, index = plan.order.interleaving.locate(plan.positions(number, number + 1)[0])
        found.append([sample_at(loader, int(s), int(i)) for s, i in zip(source, index, strict=True)])
    return found


def sample_at(loader: DataLoader, source: int, index: int) -> Sample:
    dataset = loader.dataset.sources[source]
    epoch, position = divmod(index, len(dataset))
    number = epoch_of(dataset, loader.shuffle, source_seed(loader.seed, source), epoch)[position]
    return Path(dataset.catalog.urls[0]).parent.name, int(number)


@functools.lru_cache(32)
def epoch_of(dataset: ShardedDataset, shuffle: Shuffle, seed: int, epoch: int) -> np.ndarray[Any, Any]:
    """Numbers of the samples that a source has at each position of an epoch of its own."""
    order = SelectedOrder(dataset.selection, shuffle, seed=seed, epoch=epoch)
    block, row = dataset.selection.locate(order.samples(np.arange(len(dataset))))
    return dataset.catalog.blocks.first_sample[block] + row


# ---- exactness -------------------------------------------------------------------------------------------


@pytest.mark.one_in(3)
@pytest.mark.parametrize("shuffle", SHUFFLES, ids=str)
def test_delivers_what_positions_and_source_orders_say(mixture: Mixture, shuffle: Shuffle) -> None:
    with DataLoader(mixture, 4, shuffle, seed=3) as loader:
        assert len(loader) == -(-len(mixture) // 4)
        for epoch in range(2):
            assert delivered(loader) == by_plan(loader, epoch)


def test_shuffle_true_delivers_every_sample_once(abc: list[ShardedDataset]) -> None:
    with DataLoader(Mixture(abc), 8, shuffle=True) as loader:
        counts = Counter(chain(*delivered(loader)))
    assert set(counts.values()) == {1}
    assert Counter(name for name, _ in counts) == dict(zip("abc", SIZES, strict=True))


def test_repeats_come_as_often_as_they_say(abc: list[ShardedDataset]) -> None:
    with DataLoader(Mixture(abc, repeats=[1, 3, Fraction(1, 3)]), 8, Shuffle("window", 2)) as loader:
        counts = Counter(chain(*delivered(loader)))
    assert {counts["a", n] for n in range(47)} == {1}
    assert {counts["b", n] for n in range(20)} == {3}
    assert sum(counts["c", n] for n in range(9)) == 3


def test_every_batch_boundary_has_each_source_within_one_of_its_share(abc: list[ShardedDataset]) -> None:
    weights = (0.6, 0.3, 0.1)
    with DataLoader(Mixture(dict(zip(abc, weights, strict=True)), stop="all"), 4, shuffle=True) as loader:
        samples = delivered(loader)
    for stop in range(len(samples)):
        counts = Counter(name for name, _ in chain(*samples[:stop]))
        assert all(abs(counts[n] - 4 * stop * w) < 1 for n, w in zip("abc", weights, strict=True))


def test_what_an_epoch_leaves_of_a_source_comes_first_in_the_next(abc: list[ShardedDataset]) -> None:
    a, b, _ = abc
    with DataLoader(Mixture({a: 1, b: 1}), 5, Shuffle("window", 2)) as loader:
        both = list(chain(*delivered(loader), *delivered(loader)))
    of_a = [n for name, n in both if name == "a"]
    assert 20 < len(of_a) < 47
    assert len(set(of_a)) == len(of_a)


def test_a_run_as_long_as_the_batch_makes_batches_of_one_source(abc: list[ShardedDataset]) -> None:
    mixture = Mixture({abc[0]: 2, abc[1]: 1}, run_length=6)
    ranks = []
    for r in range(2):
        with DataLoader(mixture, 3, True, topology=rank(r, 2), tail="drop") as loader:
            ranks.append(delivered(loader))
    for parts in zip(*ranks, strict=True):
        assert len({name for name, _ in chain(*parts)}) == 1


def test_a_schedule_makes_epochs_of_unlike_length(abc: list[ShardedDataset]) -> None:
    a, b, _ = abc
    mixture = Mixture([a, b], schedule={0: [1, 0], 47: [1, 1]})
    with DataLoader(mixture, 4, Shuffle("window", 2)) as loader:
        first, second = (list(chain(*delivered(loader))) for _ in range(2))
        assert loader.state_dict()["num_samples"] == len(second)
    assert {name for name, _ in first} == {"a"}
    assert len(first) == 47 > len(second)
    assert Counter(name for name, _ in second)["b"] == 20


# ---- state ------------------------------------------------------------------------------------------------


def test_a_state_of_other_shares_is_refused(abc: list[ShardedDataset]) -> None:
    a, b, _ = abc
    with DataLoader(Mixture({a: 1, b: 1}), 4, shuffle=True) as loader:
        next(iter(loader))
        state = loader.state_dict()
    with DataLoader(Mixture({a: 2, b: 1}), 4) as other, pytest.raises(ValueError, match="weights='1/2 1/2'"):
        other.load_state_dict(state)


def test_an_endless_mixture_has_no_length_and_goes_on_where_a_loop_was_left(
    abc: list[ShardedDataset],
) -> None:
    with DataLoader(Mixture({abc[0]: 1, abc[2]: 2}, stop="never"), 6, Shuffle("window", 2)) as loader:
        with pytest.raises(TypeError, match="no length"):
            len(loader)
        parts = [[samples_of(batch) for batch in islice(loader, n)] for n in (20, 1, 30)]
        state = loader.state_dict()
        assert (state["epoch"], state["position"]) == (0, 51 * 6)
        plan = stream_of(loader).epoch_plan(0, 0)
        source, index = plan.order.interleaving.locate(plan.positions(0, 51)[0])  # type: ignore[attr-defined]
        expected = [sample_at(loader, int(s), int(i)) for s, i in zip(source, index, strict=True)]
        assert list(chain(*chain(*parts))) == expected


def test_an_endless_mixture_starts_anywhere_at_once(abc: list[ShardedDataset]) -> None:
    mixture = Mixture({abc[0]: 1, abc[1]: 1}, stop="never")
    with DataLoader(mixture, 6, Shuffle("window", 2)) as loader:
        state = edited(loader.state_dict(), position=10**12)
    with DataLoader(mixture, 6) as resumed:
        resumed.load_state_dict(state)
        batch = samples_of(next(iter(resumed)))
        positions = stream_of(resumed).epoch_plan(0, 10**12).positions(0, 1)[0]
        source, index = mixture.spec.epoch(0).locate(positions)
        assert batch == [sample_at(resumed, int(s), int(i)) for s, i in zip(source, index, strict=True)]


# ---- transforms and randomness ----------------------------------------------------------------------------


def test_each_source_has_its_own_transform(abc: list[ShardedDataset], tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    made = make_parquet(tmp_path / "d", 12)
    tens = made.open(columns={"n": "label"}, transform=lambda s: {"n": s["n"] * 10})
    negative = made.open(columns={"n": "label"}, transform=lambda s: {"n": -s["n"] - 1})
    plain = made.open(columns={"n": "label"})
    with DataLoader(Mixture([tens, negative, plain]), 5, Shuffle("window", 2)) as loader:
        numbers = sorted(int(n) for batch in loader for n in batch["n"])
    assert numbers == sorted([*range(0, 120, 10), *range(-12, 0), *range(12)])


def test_no_two_appearances_of_a_sample_draw_the_same_numbers(tmp_path: Path) -> None:
    made = make_ints_tar(tmp_path, 15)

    def draw(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        return {**sample, "draw": torch.tensor(rng.integers(1 << 62))}

    def draws(world_size: int, *sources: ShardedDataset) -> list[tuple[int, int]]:
        found = []
        for r in range(world_size):
            mixture = Mixture(sources, repeats=[3, 1][: len(sources)])
            with DataLoader(
                mixture, 6 // world_size, True, topology=rank(r, world_size), tail="uneven"
            ) as loader:
                for _ in range(2):
                    for batch in loader:
                        found += zip(batch["cls"].tolist(), batch["draw"].tolist(), strict=True)
        return sorted(found)

    two = draws(1, made.open(transform=draw), made.open(transform=draw))
    assert len({drawn for _, drawn in two}) == len(two) == 2 * (45 + 15)
    assert draws(3, made.open(transform=draw), made.open(transform=draw)) == two
    alone = draws(1, made.open(transform=draw))
    assert set(alone) < set(two), "another source changes nothing"


def test_random_crops_differ_by_source_and_by_each_time_a_source_comes_round(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (40, 60, 3), np.uint8)
    data = io.BytesIO()
    PIL.Image.fromarray(pixels).save(data, "JPEG", quality=95)
    write_tar(tmp_path / "shard-0.tar", [("0.jpg", data.getvalue())])
    crop = {"jpg": Image(size=8, crop="random_resized")}
    sources = [ShardedDataset(str(tmp_path / "shard-0.tar"), decode=crop) for _ in range(2)]
    with DataLoader(Mixture(sources, repeats=[3, 2]), 5, shuffle=True) as loader:
        crops = [image.numpy().tobytes() for _ in range(2) for batch in loader for image in batch["jpg"]]
    assert len(set(crops)) == len(crops) == 10


def test_a_bad_sample_is_told_with_its_source_and_can_be_skipped(tmp_path: Path) -> None:
    for name in "gb":
        (tmp_path / name).mkdir()
        make_ints_tar(tmp_path / name, 12)
    shard = tmp_path / "b" / "shard-1.tar"
    data = bytearray(shard.read_bytes())
    data[512:513] = b"x"
    shard.write_bytes(bytes(data))

    def open_both(**more: Any) -> Mixture:
        return Mixture([ShardedDataset(str(tmp_path / name / "*.tar"), **more) for name in "gb"])

    with DataLoader(open_both(), 4) as loader, pytest.raises(SampleError, match=r"b/shard-1\.tar"):
        list(loader)
    with DataLoader(open_both(on_error="skip"), 4) as loader:
        assert sum(len(batch["cls"]) for batch in loader) == 23
        assert loader.stats().skipped_samples == 1


# ---- resources --------------------------------------------------------------------------------------------


def test_stats_add_up_over_sources(abc: list[ShardedDataset]) -> None:
    totals = []
    for datasets in ([abc[0]], [abc[1]], abc[:2]):
        with DataLoader(Mixture(datasets), 4, Shuffle("window", 2, 1)) as loader:
            assert sum(map(len, delivered(loader))) == sum(len(d) for d in datasets)
            totals.append(loader.stats())
    assert totals[0].samples + totals[1].samples == totals[2].samples
    assert totals[2].read_bytes >= sum(int(d.catalog.blocks.length.sum()) for d in abc[:2])


def test_many_sources_share_a_small_memory_limit(tmp_path: Path) -> None:
    sources = []
    for number in range(12):
        (tmp_path / str(number)).mkdir()
        sources.append(make_ints_tar(tmp_path / str(number), 30).open())
    with DataLoader(
        Mixture(sources), 7, True, memory_limit="256kB", num_workers=1, workers="thread"
    ) as loader:
        counts = Counter(int(n) for batch in loader for n in batch["cls"])
        assert counts == dict.fromkeys(range(30), 12)
        assert loader.stats().memory.peak_bytes <= 256_000


def test_ranks_that_divide_the_lanes_read_little_twice(tmp_path: Path) -> None:
    sources = []
    for name in "xy":
        (tmp_path / name).mkdir()
        sources.append(make_parquet(tmp_path / name, 900, rows=3).open(columns=["label"]))
    blocks = sum(source.catalog.num_blocks for source in sources)
    opened: Counter[tuple[int, int]] = Counter()
    for r in range(4):
        with DataLoader(Mixture(sources), 16, Shuffle("window", 64, 8), topology=rank(r, 4)) as loader:
            plan = stream_of(loader).epoch_plan(0, 0)
            windows: Any = plan.order
            touched = set(windows.locate(plan.positions(0, plan.num_batches)[0])[0].tolist())
            mine = set()
            for window in touched:
                ordinal, _ = windows.window_samples(window, plan.rank_indices(window))
                source = windows.source_of(window)[0]
                mine |= {(source, b) for b in windows.window_blocks(window)[ordinal].tolist()}
            opened.update(mine)
    assert len(opened) == blocks
    assert sum(opened.values()) < 1.3 * blocks
