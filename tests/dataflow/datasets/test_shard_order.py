"""What training frameworks find in a loader over shards: a distributed sampler that is its order."""

from __future__ import annotations

import copy
import os
from itertools import islice
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from ecosystem_kit import make_shards, numbers_of
from loader_kit import session_of
from torch.utils.data import BatchSampler, DistributedSampler

from dataflow import DataLoader, ShardedDataset, Shuffle, Topology
from sharding.topology import topology


@pytest.fixture
def shards(tmp_path: Path) -> ShardedDataset:
    return make_shards(tmp_path)


def epoch_of(dataset: ShardedDataset, epoch: int) -> list[list[int]]:
    with DataLoader(dataset, 4, shuffle=True, seed=3) as loader:
        loader.set_epoch(epoch)
        return [numbers_of(batch) for batch in loader]


def test_the_sampler_is_a_distributed_one_that_knows_the_plan(shards: ShardedDataset) -> None:
    with DataLoader(shards, 4, shuffle=True, seed=3, topology=Topology(1, 4), num_workers=2) as loader:
        sampler = loader.sampler
        assert isinstance(sampler, DistributedSampler)
        assert (sampler.rank, sampler.num_replicas, sampler.seed, sampler.epoch) == (1, 4, 3, 0)
        assert (sampler.shuffle, sampler.drop_last, sampler.dataset) == (True, False, shards)
        assert type(loader.batch_sampler) is BatchSampler
        assert (loader.batch_size, loader.num_workers) == (4, 2)


def test_the_sampler_sets_the_epoch_even_between_iter_and_next(shards: ShardedDataset) -> None:
    with DataLoader(shards, 4, shuffle=True, seed=3) as loader:
        batches = iter(loader)
        loader.sampler.set_epoch(2)  # type: ignore[attr-defined]
        assert [numbers_of(batch) for batch in batches] == epoch_of(shards, 2)
        assert loader.state_dict()["epoch"] == 3


@pytest.mark.parametrize("told", [0, 5])
def test_epochs_are_counted_from_a_loaded_state_on(shards: ShardedDataset, told: int) -> None:
    """A framework that resumes tells the state's epoch, or begins to count at 0."""
    with DataLoader(shards, 4, shuffle=True, seed=3) as loader:
        loader.set_epoch(5)
        head = [numbers_of(batch) for batch in islice(loader, 3)]
        state = loader.state_dict()
    with DataLoader(shards, 4) as loader:
        loader.load_state_dict(state)
        found = []
        for epoch in range(told, told + 2):
            loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
            found.append([numbers_of(batch) for batch in loader])
    assert [head + found[0], found[1]] == [epoch_of(shards, 5), epoch_of(shards, 6)]


def test_after_the_last_batch_of_an_epoch_the_next_one_may_be_told(shards: ShardedDataset) -> None:
    with DataLoader(shards, 4, shuffle=True, seed=3) as loader:
        for _ in loader:
            state = loader.state_dict()
    with DataLoader(shards, 4) as loader:
        loader.load_state_dict(state)
        batches = iter(loader)
        loader.sampler.set_epoch(1)  # type: ignore[attr-defined]
        assert [numbers_of(batch) for batch in batches] == epoch_of(shards, 1)


@pytest.mark.parametrize("keep", [True, False], ids=["iterator kept", "iterator dropped"])
def test_a_loop_that_counts_batches_leaves_the_threads_reading(shards: ShardedDataset, keep: bool) -> None:
    with DataLoader(shards, 4, shuffle=True, seed=3) as loader:
        engines, found, kept = set(), [], []
        for epoch in range(3):
            if epoch == 2:
                loader.set_epoch(2)
            batches = iter(loader)
            found.append([numbers_of(next(batches)) for _ in range(len(loader))])
            kept.append(batches if keep else None)
            del batches
            engines.add(id(session_of(loader)))
        assert found == [epoch_of(shards, epoch) for epoch in range(3)]
        assert len(engines) == 1


def test_a_loader_made_anew_with_the_order_has_all_its_settings(shards: ShardedDataset) -> None:
    """As Lightning does for predictions, which knows torch's arguments only."""
    made = DataLoader(shards, 4, Shuffle("full"), seed=9, topology=Topology(1, 2), tail="drop")
    indices = BatchSampler(made.sampler, 1, False)
    again = DataLoader(shards, sampler=None, shuffle=False, batch_sampler=indices, collate_fn=list)
    assert again.batch_sampler is indices
    assert [numbers_of(batch) for batch in again] == [numbers_of(batch) for batch in made]
    made.close()
    again.close()


def test_a_copy_has_an_order_and_stats_of_its_own(shards: ShardedDataset) -> None:
    with DataLoader(shards, 4, shuffle=True, seed=3) as loader, copy.copy(loader) as other:
        other.sampler.set_epoch(5)  # type: ignore[attr-defined]
        assert (other.batch_sampler.sampler.epoch, other.epoch, loader.epoch) == (5, 5, 0)  # type: ignore[union-attr]
        assert [numbers_of(batch) for batch in other] == epoch_of(shards, 5)
        assert (loader.stats().batches, other.stats().batches) == (0, len(epoch_of(shards, 5)))


def test_a_copy_shares_the_dataset_and_a_batch_sampler_that_was_given(shards: ShardedDataset) -> None:
    indices = BatchSampler(DataLoader(shards, 4).sampler, 1, False)
    with DataLoader(shards, batch_sampler=indices) as loader, copy.copy(loader) as other:
        assert other.dataset is loader.dataset
        assert other.batch_sampler is indices
        assert [numbers_of(batch) for batch in other] == [numbers_of(batch) for batch in loader]


def test_what_a_loader_has_over_shards_only_can_be_looked_up_on_the_class(shards: ShardedDataset) -> None:
    """As by `help`, `inspect` and mock's `autospec`."""
    descriptor = DataLoader.batching
    with DataLoader(shards, 4) as loader, DataLoader([1, 2]) as other:
        assert descriptor.__get__(loader, DataLoader) is None
        with pytest.raises(AttributeError, match="a DataLoader has 'batching' over shards only"):
            descriptor.__get__(other, DataLoader)


def test_a_loader_alone_knows_its_machine_when_it_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = Mock(wraps=topology.read_hardware)
    monkeypatch.setattr(topology, "read_hardware", read)
    with DataLoader(make_shards(tmp_path), 4) as loader:
        assert len(next(iter(loader)))
        assert not read.called
        assert loader.topology is loader.topology
    assert read.call_count == 1
    assert loader.topology == Topology.detect()


@pytest.mark.ranks(2, backend=None)
def test_a_loader_made_before_the_process_group_finds_its_rank_later(tmp_path: Path) -> None:
    """Also where the launcher's variables are not complete, as Lightning's are not."""
    rank = int(os.environ.pop("RANK"))
    whole = Topology(rank, 2)
    dataset = make_shards(tmp_path / str(rank))
    loader = DataLoader(dataset, 4, shuffle=True, seed=3)
    with pytest.raises(ValueError, match="RANK missing"):
        len(loader)
    os.environ["RANK"] = str(rank)
    torch.distributed.init_process_group("gloo")
    assert (loader.topology.rank, loader.topology.world_size) == (rank, 2)
    with DataLoader(dataset, 4, shuffle=True, seed=3, topology=whole) as told, loader:
        assert len(loader) == len(told) == 5
        assert [numbers_of(batch) for batch in loader] == [numbers_of(batch) for batch in told]
