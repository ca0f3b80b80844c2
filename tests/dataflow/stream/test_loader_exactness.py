"""Every sample of every epoch, exactly: value by value as a plain loop over the plan's positions says."""

from __future__ import annotations

from collections import Counter
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets_kit import (
    MAKERS,
    NUM_SAMPLES,
    Made,
    Make,
    by_plan,
    delivered,
    make_parquet,
    make_tokens_bin,
    rank,
    rows_of,
    sort_key,
    tar_members,
    tar_sample,
    write_tar,
)
from hypothesis import HealthCheck, given, settings, strategies as st
from loader_kit import session_of
from parameters_kit import in_pairs

from dataflow import DataLoader, Shuffle, Topology

SHUFFLES = [
    Shuffle("none"),
    Shuffle("blocks", 2),
    Shuffle("window", 1),
    Shuffle("window", 2),
    Shuffle("window", 3),
    Shuffle("window", 100),
    Shuffle("full"),
]


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return make_tokens_bin(tmp_path_factory.mktemp("tokens"))


def epoch_of_all_ranks(
    made: Made, world_size: int, batch_size: int, **options: Any
) -> tuple[list[list[list[dict[str, Any]]]], DataLoader]:
    """Each rank's batches of epoch 0, checked against the plan."""
    dataset = made.open()
    ranks = []
    for r in range(world_size):
        with DataLoader(dataset, batch_size, topology=rank(r, world_size), **options) as loader:
            got = delivered(loader)
            assert got == by_plan(loader, made.samples, 0)
            assert len(got) == len(loader)
            ranks.append(got)
    return ranks, loader


def counted(rows: Any) -> Counter[str]:
    return Counter(map(sort_key, rows))


# ---- every format, value by value ---------------------------------------------------------------------


@pytest.mark.parametrize(("name", "shuffle"), in_pairs(MAKERS, SHUFFLES), ids=str)
def test_an_epoch_holds_every_sample_once_in_the_order_of_the_plan(
    made: Make, name: str, shuffle: Shuffle
) -> None:
    data = made(name)
    with DataLoader(data.open(), 5, shuffle, seed=3) as loader:
        got = delivered(loader)
        assert got == by_plan(loader, data.samples, 0)
        assert counted(chain(*got)) == counted(data.samples)


# ---- odd sizes ----------------------------------------------------------------------------------------


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    world_size=st.integers(1, 7),
    batch_size=st.integers(1, 60),
    tail=st.sampled_from(["drop", "pad", "even", "uneven"]),
    shuffle=st.sampled_from(SHUFFLES),
    seed=st.integers(-(2**63), 2**64 - 1),
    data=st.data(),
)
def test_any_split_is_that_of_the_plan(
    ints: Made, world_size: int, batch_size: int, tail: str, shuffle: Shuffle, seed: int, data: st.DataObject
) -> None:
    place = rank(data.draw(st.integers(0, world_size - 1)), world_size)
    with DataLoader(ints.open(), batch_size, shuffle, tail=tail, seed=seed, topology=place) as loader:
        assert delivered(loader) == by_plan(loader, ints.samples, 0)
        assert delivered(loader) == by_plan(loader, ints.samples, 1)


@pytest.mark.parametrize(
    ("batch_size", "tail"),
    in_pairs([20, NUM_SAMPLES - 1, NUM_SAMPLES, NUM_SAMPLES + 1, 200], ["drop", "pad", "even", "uneven"]),
)
def test_batches_may_span_windows_and_the_whole_dataset(ints: Made, batch_size: int, tail: str) -> None:
    with DataLoader(ints.open(), batch_size, Shuffle("window", 1), tail=tail) as loader:
        for epoch in range(3):
            assert delivered(loader) == by_plan(loader, ints.samples, epoch)


@pytest.mark.parametrize("num_samples", [1, 2])
@pytest.mark.parametrize(
    ("tail", "shuffle"),
    in_pairs(["drop", "pad", "even", "uneven"], [Shuffle("window", 2), Shuffle("full"), Shuffle("none")]),
    ids=str,
)
def test_fewer_samples_than_ranks(tmp_path: Path, num_samples: int, tail: str, shuffle: Shuffle) -> None:
    data = make_ints_tar_of(tmp_path, num_samples)
    for world_size in (1, 3, 5):
        epoch_of_all_ranks(data, world_size, 2, shuffle=shuffle, tail=tail)


@pytest.mark.parametrize(
    ("num_samples", "world_size", "batch_size", "sizes"),
    [(10, 2, 32, [[5], [5]]), (45, 2, 4, [[4] * 5 + [3]] * 2), (9, 4, 2, [[2, 1]] * 4), (1, 3, 2, [[1]] * 3)],
)
def test_several_ranks_share_the_last_batch_evenly_unless_told_otherwise(
    tmp_path: Path, num_samples: int, world_size: int, batch_size: int, sizes: list[list[int]]
) -> None:
    """An evaluation counts no sample twice, but where ranks could not have equal parts."""
    data = make_ints_tar_of(tmp_path, num_samples)
    for shuffle in (None, True):
        ranks, loader = epoch_of_all_ranks(data, world_size, batch_size, shuffle=shuffle)
        assert [[len(batch) for batch in batches] for batches in ranks] == sizes
        assert counted(data.samples) <= counted(chain(*chain(*ranks)))
        assert loader.state_dict()["position"] == 0


def make_ints_tar_of(folder: Path, num_samples: int) -> Made:
    """All samples in one shard: an empty shard is another test's subject."""
    samples = [{"cls": i} for i in range(num_samples)]
    write_tar(folder / "shard.tar", ((f"{i}.cls", str(i).encode()) for i in range(num_samples)))
    return Made({"source": str(folder / "shard.tar"), "catalog": str(folder / "x.catalog")}, samples, folder)


def test_shards_without_samples_are_passed_over(tmp_path: Path) -> None:
    write_tar(tmp_path / "shard-0.tar", [])
    write_tar(tmp_path / "shard-1.tar", tar_members(7))
    write_tar(tmp_path / "shard-2.tar", [])
    data = Made(
        {"source": str(tmp_path / "*.tar"), "catalog": str(tmp_path / "c")}, [tar_sample(7)], tmp_path
    )
    ranks, _ = epoch_of_all_ranks(data, 2, 1, tail="uneven")
    assert ranks == [[[tar_sample(7)]], []]


def test_plain_and_compressed_shards_may_be_mixed(tmp_path: Path) -> None:
    for k, suffix in enumerate(["tar", "tar.gz", "tar", "tar.zst"]):
        members = chain(*(tar_members(i) for i in range(k * 10, k * 10 + 10)))
        write_tar(tmp_path / f"shard-{k}.{suffix}", members)
    data = Made(
        {"source": str(tmp_path / "shard*"), "catalog": str(tmp_path / "c"), "block_bytes": 9000},
        [tar_sample(i) for i in range(40)],
        tmp_path,
    )
    for shuffle in SHUFFLES:
        epoch_of_all_ranks(data, 2, 3, shuffle=shuffle, tail="uneven")


# ---- epochs -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tail", ["drop", "pad", "even", "uneven"])
@pytest.mark.parametrize("shuffle", [Shuffle("window", 2), Shuffle("full")], ids=str)
def test_epochs_follow_without_a_break_and_differ(tokens: Made, tail: str, shuffle: Shuffle) -> None:
    with DataLoader(tokens.open(), 5, shuffle, tail=tail, topology=rank(1, 2)) as loader:
        epochs = [delivered(loader) for _ in range(5)]
        assert session_of(loader)
        assert epochs == [by_plan(loader, tokens.samples, epoch) for epoch in range(5)]
    firsts = {str(epoch[0]) for epoch in epochs}
    assert len(firsts) == 5


def test_one_engine_serves_all_epochs(ints: Made) -> None:
    with DataLoader(ints.open(), 5, True) as loader:
        list(loader)
        session = session_of(loader)
        list(loader)
        loader.set_epoch(2)  # the next one anyway
        list(loader)
        assert session_of(loader) is session


def test_set_epoch_gives_that_epoch_before_between_and_within_loops(ints: Made) -> None:
    with DataLoader(ints.open(), 5, Shuffle("window", 2)) as loader:
        oracle = [by_plan(loader, ints.samples, epoch) for epoch in range(10)]
        loader.set_epoch(7)
        assert delivered(loader) == oracle[7]
        assert delivered(loader) == oracle[8]
        loader.set_epoch(2)
        assert delivered(loader) == oracle[2]
        loader.set_epoch(2)
        assert delivered(loader) == oracle[2]
        for _ in loader:
            loader.set_epoch(5)
        assert delivered(loader) == oracle[5]


def test_seeds_give_different_orders_and_the_same_seed_the_same(ints: Made) -> None:
    orders = []
    for seed in (0, 1, 1, -1, 2**64 - 1):
        with DataLoader(ints.open(), 5, Shuffle("window", 2), seed=seed) as loader:
            orders.append(delivered(loader))
    assert orders[1] == orders[2]
    assert len({str(order) for order in orders[:4]}) == 3
    assert orders[3] == orders[4]  # the same 64 bits


# ---- several loaders ----------------------------------------------------------------------------------


def test_two_loaders_over_one_dataset_do_not_disturb_each_other(ints: Made) -> None:
    dataset = ints.open()
    with DataLoader(dataset, 3, Shuffle("window", 2)) as a, DataLoader(dataset, 7, Shuffle("full")) as b:
        got_a, got_b = [], []
        for batch_a, batch_b in zip(a, b, strict=False):
            got_a.append(rows_of(batch_a))
            got_b.append(rows_of(batch_b))
        assert got_a == by_plan(a, ints.samples, 0)[: len(got_a)]
        assert got_b == by_plan(b, ints.samples, 0)[: len(got_b)]
        assert len(got_b) == len(b)


# ---- what must not matter -----------------------------------------------------------------------------


def test_the_memory_limit_does_not_change_the_order_of_a_given_shuffle(ints: Made) -> None:
    runs = []
    for limit in ("300kB", "1GB"):
        with DataLoader(ints.open(), 4, Shuffle("window", 3), memory_limit=limit) as loader:
            runs.append(delivered(loader))
    assert runs[0] == runs[1]


def test_the_memory_of_the_machine_does_not_change_the_order_of_shuffle_true(tmp_path: Path) -> None:
    """Ranks on machines of different memory must agree on the order, be it shared among many of them."""
    data = make_parquet(tmp_path, 200)
    orders = []
    for sharers in (4096, 1):
        place = Topology(world_size=4096, local_world_size=sharers, source="test")
        with DataLoader(data.open(), 4, True, topology=place, tail="pad") as loader:
            orders.append((loader.shuffle, loader.memory_limit))
    assert orders[0][0] == orders[1][0]
    assert orders[0][1] < orders[1][1]


def test_a_given_memory_limit_bounds_the_window_and_stats_say_it(tmp_path: Path) -> None:
    data = make_parquet(tmp_path, 200)
    with (
        DataLoader(data.open(), 4, True) as wide,
        DataLoader(data.open(), 4, True, memory_limit=60_000) as narrow,
    ):
        assert narrow.stats().window_blocks < wide.stats().window_blocks


def test_batches_of_a_whole_epoch_have_the_promised_types(made: Make) -> None:
    with DataLoader(made("parquet").open(), 5, Shuffle("none")) as loader:
        batch = next(iter(loader))
    assert {name: str(getattr(value, "dtype", type(value))) for name, value in batch.items()} == {
        "label": "torch.int64",
        "x": "torch.float32",
        "txt": "<class 'list'>",
        "lst": "<class 'dataflow.ragged.Ragged'>",
        "vec": "torch.float32",
    }
    assert batch["lst"].values.numpy().dtype == np.int32
    assert batch["vec"].shape == (5, 3)
