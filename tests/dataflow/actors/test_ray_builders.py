"""Builders that are actors of a cluster without Ray: reads, stats, CPUs that ranks share out, deaths.

What only a cluster can show is in tests/ecosystem/test_ecosystem_ray.py.
"""

from __future__ import annotations

import re
import tarfile
import threading
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from datasets_kit import Make
from loader_kit import session_of
from local_ray_kit import (
    ActorDiedError,
    ActorUnavailableError,
    LocalActor,
    LocalRay,
    RayTaskError,
    ray_is_local,
)
from parameters_kit import in_full

from dataflow import DataLoader, SampleError, ShardedDataset, Shuffle, Topology
from dataflow.actors import builders as module
from dataflow.actors.actor import BuilderActor
from dataflow.actors.cluster import BuilderActorError, ClusterNodes, RayClusterError
from dataflow.actors.reading import BlockReader, ReadPlan, ReadPlanPart
from prefetch.errors import StallError
from prefetch.memory.arena import Arena
from sharding.errors import ShardReadError

TIMEOUT_S = 30.0


@pytest.fixture
def local_ray() -> Iterator[LocalRay]:
    with ray_is_local() as ray:
        yield ray


def in_actors(
    dataset: Any, batch_size: int, shuffle: Any = None, *, count: int | None = 2, **options: Any
) -> Any:
    options.setdefault("timeout", TIMEOUT_S)
    return DataLoader(dataset, batch_size, shuffle, num_workers=count, builders="ray", **options)


def told(sample: dict[str, Any], *, rng: np.random.Generator) -> dict[str, Any]:
    return {"n": len(repr(sorted(sample.items()))), "draw": rng.random()}


def values(batches: Any) -> list[Any]:
    return [(batch["n"].tolist(), batch["draw"].tolist()) for batch in batches]


"""Formats that are read in different ways, values that are mapped, and blocks; others are as one of them."""


def test_compressed_shards_may_be_among_others(local_ray: LocalRay, made: Make) -> None:
    shards = [*made("tar").shards[:1], *made("tar.gz").shards[1:]]
    dataset = ShardedDataset(shards, decode={"cls": "int"}, columns=["cls", "bin"], transform=told)
    with DataLoader(dataset, 3, Shuffle("window", 3)) as loader:
        whole = values(loader)
    with in_actors(dataset, 3, Shuffle("window", 3)) as loader:
        assert values(loader) == whole


def test_blocks_are_held_to_their_checksums_but_for_single_samples(local_ray: LocalRay, made: Make) -> None:
    catalog = made("tar").open().catalog
    wrong = catalog.with_checksums(np.zeros(catalog.num_blocks, np.uint32))
    dataset = made("tar").open(catalog=wrong, transform=told)
    with in_actors(dataset, 3, True) as loader:
        with pytest.raises(ShardReadError, match=r"\.tar, byte \d+: .* have checksum"):
            list(loader)
        assert loader.stats().faults.checksum_failures
    with in_actors(dataset, 3, Shuffle("full")) as loader:
        assert len(values(loader)) == len(loader)


def odd(sample: dict[str, Any]) -> dict[str, Any]:
    if sample["label"] % 5 == 3:
        raise ZeroDivisionError(f"no {sample['label']}")
    return {"n": sample["label"], "x": torch.full((1 << 16,), float(sample["label"]))}


@pytest.mark.parametrize("name", ["jsonl", "parquet"])
def test_an_error_of_an_actor_that_reads_says_what_it_says_in_threads(
    local_ray: LocalRay, made: Make, name: str
) -> None:
    errors = []
    for open_loader in (DataLoader, in_actors):
        with open_loader(made(name).open(transform=odd), 3) as loader, pytest.raises(SampleError) as caught:
            list(loader)
        errors.append(str(caught.value))
    assert errors[0] == errors[1]


def test_a_function_given_as_on_error_stays_where_it_is(local_ray: LocalRay, made: Make) -> None:
    lock, keys = threading.Lock(), []

    def keep(error: SampleError) -> bool:
        with lock:  # which cannot be sent
            keys.append(error.key)
        return True

    with in_actors(made("parquet").open(transform=odd, on_error=keep), 4) as loader:
        batches = [batch["n"].tolist() for batch in loader]
    assert len(keys) == sum(n % 5 == 3 for n in range(47))
    assert sum(map(len, batches)) == 47 - len(keys)


class Keeps:
    """A transform that keeps more while it is packed, so many times, as what another thread's loop uses."""

    def __init__(self, times: int) -> None:
        self.times = times
        self.kept: dict[str, Any] = {"part": KeptPart(self), "other": 1}

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        return {"n": sample["label"]}


class KeptPart:
    def __init__(self, whole: Keeps) -> None:
        self.whole = whole

    def __reduce__(self) -> Any:
        if self.whole.times:
            self.whole.times -= 1
            self.whole.kept[f"more {self.whole.times}"] = 1
        return int, ()


@pytest.mark.parametrize(("times", "is_sent"), [(3, True), (1000, False)])
def test_what_changes_while_it_is_packed_is_packed_again(
    local_ray: LocalRay, made: Make, times: int, is_sent: bool
) -> None:
    with in_actors(made("parquet").open(transform=Keeps(times)), 4) as loader:
        if is_sent:
            assert sorted(n for batch in loader for n in batch["n"].tolist()) == [*range(47)]
        else:
            with pytest.raises(ValueError, match="changed size during iteration"):
                list(loader)


@pytest.mark.parametrize(("keep_bytes", "times"), [(1 << 20, 1), (0, 2)])
def test_blocks_are_decoded_once_as_long_as_they_are_kept(made: Make, keep_bytes: int, times: int) -> None:
    dataset = made("parquet").open()
    reader = BlockReader([dataset], Arena(limit_bytes=1 << 20), keep_bytes)
    blocks, zeros = np.arange(2), np.zeros(2, np.int64)
    part = ReadPlanPart(
        source=0,
        epoch=None,
        blocks=blocks,
        ordinals=np.arange(2),
        rows=zeros,
        chunk_rows=np.arange(2),
        whole=True,
    )
    plan: Any = SimpleNamespace(sizes=np.array([2]), cut=None, epoch=0)
    numbers = []
    for _ in range(2):
        rows = reader.begin(ReadPlan(plan=plan, parts=[part])).rows()
        numbers.append([window.samples.number(row) for window, row in rows.find_all(np.arange(2))])
    assert numbers == [[dataset.catalog.block(number).first_sample for number in (0, 1)]] * 2
    assert reader.traffic.read_bytes == times * int(dataset.catalog.blocks.length[:2].sum())
    reader._threads.close()


@pytest.mark.parametrize("name", ["parquet", "tar"])
def test_what_actors_read_is_in_the_stats(local_ray: LocalRay, made: Make, name: str) -> None:
    dataset = made(name).open(transform=told)
    figures = []
    for open_loader in (DataLoader, partial(in_actors, count=1)):
        with open_loader(dataset, 3, True) as loader:
            list(loader)
            figures.append((loader.stats().read_bytes, loader.stats().decoded_bytes))
    if name == "parquet":
        assert figures[1] == figures[0]
    else:  # of mapped files what is used of a block counts, not all of it
        sizes = [len(value) for file in made(name).shards for value in values_in(file)]
        assert figures[1] == (sum(sizes), sum(sizes))
        assert figures[1] < figures[0]


def values_in(path: Path) -> list[bytes]:
    with tarfile.open(path) as tar:
        return [tar.extractfile(member).read() for member in tar]  # type: ignore[union-attr]


# ---- several ranks ----------------------------------------------------------------------------------------


def nodes_of(*cpus: int, labels: Sequence[dict[str, str]] = ()) -> ClusterNodes:
    """Of a cluster; the training process is on the first."""
    nodes = [
        {"NodeID": f"{number}", "Resources": {"CPU": float(count)} if count else {}, "Labels": of}
        for number, (count, of) in enumerate(zip(cpus, labels or [{}] * len(cpus), strict=True))
    ]
    return ClusterNodes(nodes=nodes, home_id="0")


@pytest.mark.parametrize(
    ("nodes", "num_ranks", "actors", "cpus"),
    [
        (nodes_of(0, 4, 4), 1, 8, 1.0),
        (nodes_of(0, 4, 4), 3, 2, 1.0),
        (nodes_of(1, 1), 2, 1, 1.0),
        (nodes_of(1, 1), 3, 1, 0.5),
        (nodes_of(1, 1), 12, 1, 0.1666),
        (nodes_of(0), 4, 1, 1.0),
    ],
)
def test_ranks_share_out_the_cpus_of_a_cluster(
    nodes: ClusterNodes, num_ranks: int, actors: int, cpus: float
) -> None:
    assert (nodes.actors_of(num_ranks), nodes.cpus_of_actor(num_ranks)) == (actors, cpus)


def test_actors_are_wanted_in_the_zone_of_the_trainer_then_in_its_region_then_anywhere() -> None:
    zone, region = {"ray.io/availability-zone": "b"}, {"ray.io/availability-region": "north"}
    assert nodes_of(0, 4, labels=[{**region, **zone}, {}]).near() == {
        "label_selector": zone,
        "fallback_strategy": [{"label_selector": region}, {"label_selector": {}}],
    }
    assert nodes_of(0, 4, labels=[{}, zone]).near() == {}


def test_without_a_number_a_rank_has_its_part_of_the_cluster(local_ray: LocalRay, made: Make) -> None:
    dataset = made("parquet").open(transform=told)
    place = Topology(rank=1, world_size=3)
    with DataLoader(dataset, 4, topology=place) as loader:
        whole = values(loader)
    with in_actors(dataset, 4, count=None, topology=place) as loader:
        assert values(loader) == whole
        assert loader.num_workers == len(local_ray.actors) == 8 // 3
        reason = r'builders="ray", 8 CPUs of its cluster for 3 ranks: [12] are there'
        assert re.fullmatch(reason, loader.stats().workers_reason)


def test_a_rank_asks_for_more_than_its_part_when_that_is_there(local_ray: LocalRay, made: Make) -> None:
    dataset = made("parquet").open(transform=told)
    asked_at_opening: list[int] = []
    opened = BuilderActor.open

    def open_and_count(*arguments: Any) -> Any:
        asked_at_opening.append(len(local_ray.actors))
        return opened(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BuilderActor, "open", open_and_count)
        local_ray.num_cpus = 4
        with in_actors(dataset, 4, count=3, topology=Topology(rank=0, world_size=2)) as loader:
            for _ in range(1000):
                list(loader)
                if len(local_ray.actors) == 3:
                    break
    assert asked_at_opening[:2] == [2, 2]
    assert len(local_ray.actors) == 3


def test_a_rank_that_gets_no_cpu_builds_all_the_same_until_it_has_one(
    local_ray: LocalRay, made: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    dataset = made("parquet").open(transform=told)
    local_ray.num_cpus = 2
    with in_actors(dataset, 4, True) as first, in_actors(dataset, 4, True) as loader:
        loop = iter(first)
        next(loop)
        monkeypatch.setattr(module, "_PATIENCE_S", 0.01)
        epochs = [values(loader)]
        assert "no free CPU for an actor of this rank" in caplog.text
        (unreserved,) = [actor for actor in local_ray.actors if not actor.options_given["num_cpus"]]
        assert unreserved.options_given["scheduling_strategy"] == "one"
        first.close()
        while unreserved.error is None and len(epochs) < 1000:
            epochs.append(values(loader))
        assert unreserved.error
    with DataLoader(dataset, 4, True) as loader:
        assert epochs == [values(loader) for _ in epochs]


def test_without_any_cpu_a_loop_ends_with_what_is_missing(
    local_ray: LocalRay, made: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "_PATIENCE_S", 0.01)
    local_ray.num_cpus = 0
    with (
        in_actors(made("parquet").open(transform=told), 4, timeout=0.3) as loader,
        pytest.raises(StallError, match="none of the 1 Ray actors"),
    ):
        list(loader)
    assert caplog.text.count("no node has any") == 1


# ---- deaths -----------------------------------------------------------------------------------------------


def dies_at(ray: LocalRay, calls: set[int], error: Exception) -> None:
    """Let actors die with the calls about chunks of these numbers, counted over all actors."""
    lock, count = threading.Lock(), iter(range(1_000_000))

    def hears(actor: LocalActor, kind: int, number: int) -> None:
        with lock:
            at = next(count)
        if at in calls:
            actor.die(error)

    ray.hears = hears


@pytest.mark.parametrize("ship_blocks", [False, True])
@pytest.mark.parametrize("call", [1, 4, *in_full(0, 2, 7, 10)])
def test_a_death_at_any_call_costs_no_batch_and_no_second_decision(
    local_ray: LocalRay, made: Make, call: int, *, ship_blocks: bool
) -> None:
    # A batch of 4 samples of 256 KB is a piece: several of a chunk are delivered one by one.
    dataset = made("parquet").open(transform=odd, on_error="skip")
    with DataLoader(dataset, 4, True) as loader:
        whole = [batch["n"].tolist() for batch in loader]
        skipped = loader.stats().skipped_samples
    dies_at(local_ray, {call}, ActorUnavailableError("the way there is lost"))
    with in_actors(dataset, 4, True, ship_blocks=ship_blocks) as loader:
        batches = [*loader]
        assert [batch["n"].tolist() for batch in batches] == whole
        assert all((batch["x"] == batch["n"][:, None]).all() for batch in batches)
        assert loader.stats().skipped_samples == skipped
        del batches
        held = session_of(loader).resources.ledger.snapshot().in_use_bytes
        assert 0 <= held <= 1 << 21  # of the next epoch's heap
    assert len(local_ray.actors) == 3


def test_two_deaths_with_one_chunk_are_told_by_name(local_ray: LocalRay, made: Make) -> None:
    dataset = made("parquet").open(transform=told)

    def hears(actor: LocalActor, kind: int, number: int) -> None:
        if number == 0:
            actor.die(ActorDiedError("its process was killed"))

    local_ray.hears = hears
    with in_actors(dataset, 4, count=1) as loader, pytest.raises(BuilderActorError) as caught:
        list(loader)
    assert "Ray actor 0" in str(caught.value)
    assert "Ray actor 1" in str(caught.value)


def test_actors_that_all_die_at_their_start_end_the_loop(
    local_ray: LocalRay, made: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = local_ray.remote

    def dead(made: type) -> Any:
        def begin(options: dict[str, Any]) -> LocalActor:
            actor: LocalActor = start(made).options(**options).remote()
            actor.die(ActorDiedError("No module named 'dataflow'"))
            return actor

        return SimpleNamespace(options=lambda **options: SimpleNamespace(remote=partial(begin, options)))

    monkeypatch.setattr(local_ray, "remote", dead)
    with (
        in_actors(made("parquet").open(transform=told), 4) as loader,
        pytest.raises(BuilderActorError, match=r"is dataflow-loader\[ray\] installed"),
    ):
        list(loader)


def test_a_method_that_fails_ends_the_loop_and_does_not_come_again(
    local_ray: LocalRay, made: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> Any:
        raise KeyError("no such method")

    dataset = made("parquet").open(transform=told)
    for name, error in (("info", RayClusterError), ("handle", RayTaskError)):
        with monkeypatch.context() as patch:
            patch.setattr(BuilderActor, name, fails)
            with in_actors(dataset, 4) as loader, pytest.raises(error, match="no such method"):
                list(loader)


def test_blocks_that_cannot_be_read_are_an_error_of_their_chunk(
    local_ray: LocalRay, made: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> Any:
        raise ShardReadError("a.tar", "its index is damaged", 512)

    monkeypatch.setattr(BlockReader, "begin", fails)
    with (
        in_actors(made("parquet").open(transform=told), 4) as loader,
        pytest.raises(ShardReadError, match=r"a\.tar, byte 512"),
    ):
        list(loader)


def test_what_lies_in_rays_store_has_credits_before_it_is_asked_for(local_ray: LocalRay, made: Make) -> None:
    dataset = made("parquet").open(transform=odd, on_error="skip")
    limit = 16 << 20
    with in_actors(dataset, 4, memory_limit=limit, count=3) as loader:
        for _ in range(3):
            for batch in loader:
                del batch
        held = session_of(loader).resources.ledger.snapshot()
    batch = (4 << 18) * 2 * 9 // 8  # in a slot of rounded size, and what it held in its actor
    assert held.peak_bytes <= limit + 4 * batch  # one a builder, and the one in use
