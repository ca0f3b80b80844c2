"""Without `shuffle=`, samples come as the files have them: over ranks, mixtures and batches by length."""

from __future__ import annotations

from collections import Counter
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from datasets_kit import MAKERS, Made, Make, delivered, make_ints_tar, make_parquet, rank, write_tar
from forked_kit import fast_ranks
from parameters_kit import in_pairs

from dataflow import Bucketed, DataLoader, Mixture, Packed, ShardedDataset, Shuffle, TokenBudget, Topology
from sharding.plan.placement import shard_index_of


def gathered(parts: list[list[Any]]) -> list[Any]:
    """The ranks' batches put together as a gather does: batch by batch, rank by rank."""
    return list(chain(*chain(*zip_longest(*parts, fillvalue=[]))))


def of_all_ranks(dataset: Any, batch_size: int, places: list[Topology], **options: Any) -> list[Any]:
    parts = []
    for place in places:
        with DataLoader(dataset, batch_size, topology=place, **options) as loader:
            parts.append(delivered(loader))
    return parts


# ---- the order ------------------------------------------------------------------------------------------


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("name", "world_size"), in_pairs([*MAKERS][::-1], [1, 2, 3]))
def test_gathered_samples_are_in_the_files_order_for_any_number_of_ranks(
    made: Make, name: str, world_size: int
) -> None:
    data = made(name)
    parts = of_all_ranks(data.open(), 4, [rank(r, world_size) for r in range(world_size)])
    found, size = gathered(parts), len(data.samples)
    assert found[:size] == data.samples
    assert found[size:] == data.samples[: len(found) - size]
    assert len(found) - size < world_size


@pytest.mark.parametrize("source", ["*.tar", ["shard-10.tar", "shard-9.tar"]], ids=["glob", "list"])
def test_shards_come_as_they_are_listed_and_globs_are_sorted(tmp_path: Path, source: Any) -> None:
    for shard, first in (("shard-9.tar", 0), ("shard-10.tar", 5)):
        write_tar(tmp_path / shard, ((f"{i:05d}.cls", str(i).encode()) for i in range(first, first + 5)))
    named = [str(tmp_path / one) for one in ([source] if isinstance(source, str) else source)]
    with DataLoader(ShardedDataset(named), 4) as loader:
        assert list(chain(*(batch["cls"].tolist() for batch in loader))) == [*range(5, 10), *range(5)]


def test_false_none_and_the_shuffle_none_are_one_order(ints: Made) -> None:
    states = []
    for shuffle in (None, False, Shuffle("none")):
        with DataLoader(ints.open(), 5, shuffle) as loader:
            batches = iter(loader)
            next(batches)
            states.append(loader.state_dict())
    assert states[0] == states[1] == states[2]
    with DataLoader(ints.open(), 5) as loader:
        assert delivered(loader) == delivered(loader)


def test_ranks_that_are_numbered_across_nodes_take_their_parts_by_rank(ints: Made, made: Make) -> None:
    """A shuffle lists ranks node by node, and what is gathered by rank would be out of order."""
    places = [
        Topology(r, 4, r // 2, 2, node=r % 2, num_nodes=2, hosts=("a", "b"), nodes_of_ranks=(0, 1, 0, 1))
        for r in range(4)
    ]
    assert [shard_index_of(place) for place in places] == [0, 2, 1, 3]
    assert gathered(of_all_ranks(ints.open(), 3, places))[: len(ints.samples)] == ints.samples
    batching = Bucketed(2, "lst", boundaries=(2,), window=16)
    data = made("parquet")
    alone = gathered(labels_of_all(data, 1, batching))
    assert gathered(labels_of_all(data, 4, batching, places))[: len(alone)] == alone


# ---- what it costs --------------------------------------------------------------------------------------


@pytest.mark.reads_here
@pytest.mark.parametrize(("shuffle", "most"), [(None, 4.0), (True, 1.0)])
def test_stats_say_how_often_ranks_read_a_byte(tmp_path: Path, shuffle: Any, most: float) -> None:
    """Four ranks with batches of 2, over row groups of 40: each rank needs every one in file order."""
    dataset = make_parquet(tmp_path, 3 * 40 * 16, rows=40).open()
    read, told = 0, set()
    for r in range(4):
        with DataLoader(dataset, 2, shuffle, topology=rank(r, 4)) as loader:
            for _ in loader:
                pass
            stats = loader.stats()
        told.add(stats.read_amplification)
        read += stats.read_bytes
    (amplification,) = told
    assert amplification == pytest.approx(most, abs=0.05)
    with DataLoader(dataset, 8, shuffle) as loader:
        for _ in loader:
            pass
        stats = loader.stats()
    assert stats.read_amplification == 1
    assert read / stats.read_bytes == pytest.approx(amplification, rel=0.1)


def test_what_is_not_known_of_reads_is_not_told(made: Make) -> None:
    data, place = made("parquet"), {"topology": rank(0, 2)}
    for dataset, options in (
        (data.open(), {"shuffle": Shuffle("full")}),
        (data.open(), {"batching": TokenBudget(12, "lst")}),
        (Mixture([data.open()]), {}),
    ):
        with DataLoader(dataset, **options, **place) as loader:
            assert loader.stats().read_amplification is None
    with DataLoader(data.open(), shuffle=Shuffle("full")) as loader:
        assert loader.stats().read_amplification is None


# ---- mixtures -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_mixture_keeps_its_shares_and_takes_each_source_in_file_order(
    tmp_path: Path, world_size: int
) -> None:
    (tmp_path / "a").mkdir(), (tmp_path / "b").mkdir()
    a, b = make_ints_tar(tmp_path / "a", 47), make_ints_tar(tmp_path / "b", 20)
    mixture = Mixture({a.open(columns=["cls", "__url__"]): 2, b.open(columns=["cls", "__url__"]): 1})
    parts = of_all_ranks(mixture, 2, [rank(r, world_size) for r in range(world_size)])
    found = gathered(parts)[: len(mixture)]
    names = [Path(row["__url__"]).parent.name for row in found]
    for name in "ab":
        own = [row["cls"] for row, at in zip(found, names, strict=True) if at == name]
        assert own == list(range(len(own)))
    for size in range(len(found)):
        assert abs(Counter(names[:size])["a"] - 2 * size / 3) < 1


# ---- batches by length ----------------------------------------------------------------------------------


def labels_of_all(
    data: Made, world_size: int, batching: Any, places: list[Topology] | None = None
) -> list[list[list[int]]]:
    rows = {"batch_size": 2} if isinstance(batching, Packed) else {}
    parts = []
    for place in places or [rank(r, world_size) for r in range(world_size)]:
        with DataLoader(data.open(), batching=batching, topology=place, **rows) as loader:
            parts.append([batch["label"].tolist() for batch in loader])
    return parts


@pytest.mark.parametrize(
    "batching", [Bucketed(5, "lst", boundaries=(1, 2)), TokenBudget(12, "lst"), Packed(6, "lst")], ids=str
)
def test_batches_by_length_follow_their_first_samples(made: Make, batching: Any) -> None:
    data = made("parquet")
    (alone,) = labels_of_all(data, 1, batching)
    firsts = [labels[0] for labels in alone]
    short = isinstance(batching, Bucketed)  # the short one comes last
    assert firsts[: len(firsts) - short] == sorted(firsts[: len(firsts) - short])
    assert isinstance(batching, Packed) or all(labels == sorted(labels) for labels in alone)
    for world_size in (2, 3):
        found = gathered(labels_of_all(data, world_size, batching))
        assert found[: len(gathered([alone]))] == gathered([alone])


# ---- processes ------------------------------------------------------------------------------------------


def predictions(kwargs: dict[str, Any]) -> list[int]:
    """What a rank gathers of an evaluation: here the label stands for a prediction."""
    found: list[int] = []
    with DataLoader(ShardedDataset(**kwargs), 4) as loader:
        for batch in loader:
            parts = [torch.empty_like(batch["cls"]) for _ in range(dist.get_world_size())]
            dist.all_gather(parts, batch["cls"])
            found += torch.cat(parts).tolist()
    return found


@pytest.mark.one_in(2)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_gathered_predictions_of_processes_are_in_the_files_order(ints: Made, world_size: int) -> None:
    ints.open()  # the catalog is built once
    for found in fast_ranks(predictions, world_size, args=(ints.kwargs,), timeout_s=90):
        assert found[: len(ints.samples)] == [row["cls"] for row in ints.samples]
        assert len(found) - len(ints.samples) < world_size
