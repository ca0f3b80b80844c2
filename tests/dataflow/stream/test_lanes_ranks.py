"""Lanes with real processes: what each rank yields, and which blocks each node reads."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from forked_kit import fast_ranks

from dataflow import DataLoader, ShardedDataset, Shuffle, Topology

LENGTH, PER_BLOCK, NUM_BLOCKS = 4, 4, 64
NUM_SAMPLES = PER_BLOCK * NUM_BLOCKS
SHUFFLE = Shuffle("window", 16)


def make(folder: Path) -> str:
    """Tokens that name their sample."""
    path = folder / "tokens.bin"
    np.arange(NUM_SAMPLES * LENGTH + 1, dtype=np.uint16).tofile(path)
    return str(path)


def open_tokens(path: str) -> ShardedDataset:
    block_bytes = PER_BLOCK * LENGTH * 2
    options = {"dtype": "uint16", "length": LENGTH, "block_bytes": block_bytes}
    return ShardedDataset(path, format="tokens", catalog=path + ".catalog", **options)


def loader_of(path: str, batch_size: int, topology: Topology) -> DataLoader:
    return DataLoader(open_tokens(path), batch_size, SHUFFLE, seed=3, topology=topology)


def samples_of(batch: dict[str, object]) -> list[int]:
    return [int(t) // LENGTH for t in batch["tokens"][:, 0]]  # type: ignore[index]


def two_epochs(path: str, batch_size: int, num_nodes: int) -> list[list[list[int]]]:
    topology = Topology.even(dist.get_world_size(), num_nodes, dist.get_rank())
    with loader_of(path, batch_size, topology) as loader:
        return [[samples_of(batch) for batch in loader] for _ in range(2)]


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("world_size", "num_nodes"), [(4, 2), (2, 2), (4, 1)])
def test_each_sample_comes_once_and_each_block_is_read_by_one_node(
    tmp_path: Path, world_size: int, num_nodes: int
) -> None:
    path = make(tmp_path)
    open_tokens(path)  # the catalog is built once
    ranks = fast_ranks(two_epochs, world_size, args=(path, 32 // world_size, num_nodes), timeout_s=90)
    with loader_of(path, 32, Topology()) as loader:
        alone = [[samples_of(batch) for batch in loader] for _ in range(2)]
    for epoch in range(2):
        joint = [list(chain(*parts)) for parts in zip(*(rank[epoch] for rank in ranks), strict=True)]
        assert joint == alone[epoch]
        assert sorted(chain(*joint)) == list(range(NUM_SAMPLES))
        readers: dict[int, set[int]] = {}
        for rank, batches in enumerate(rank[epoch] for rank in ranks):
            for sample in chain(*batches):
                readers.setdefault(sample // PER_BLOCK, set()).add(rank * num_nodes // world_size)
        assert all(len(nodes) == 1 for nodes in readers.values())
        assert len(readers) == NUM_BLOCKS


def stepping_together(folder: Path, cases: Sequence[tuple[int, int, str]]) -> list[tuple[int, list[int]]]:
    """Steps of each case, each with a reduction that hangs if a rank lacks one; and the samples."""
    found = []
    for num_samples, batch_size, tail in cases:
        dataset = opened_few(folder, num_samples)
        with DataLoader(dataset, batch_size, tail=tail) as loader:  # type: ignore[arg-type]
            samples = []
            for batch in loader:
                count = torch.ones(1)
                dist.all_reduce(count)
                assert int(count) == dist.get_world_size()
                samples += samples_of(batch)
            found.append((len(loader), samples))
    return found


def opened_few(folder: Path, num_samples: int) -> ShardedDataset:
    path = str(folder / f"{num_samples}.bin")
    return ShardedDataset(path, format="tokens", dtype="uint16", length=LENGTH, catalog=path + ".catalog")


def test_ranks_take_the_same_number_of_steps_with_fewer_samples_than_ranks_or_a_rest(tmp_path: Path) -> None:
    cases = [(1, 2, "pad"), (2, 1, "drop"), (7, 2, "pad"), (2, 2, "even"), (7, 2, "even")]
    for num_samples in {size for size, *_ in cases}:
        np.arange(num_samples * LENGTH + 1, dtype=np.uint16).tofile(tmp_path / f"{num_samples}.bin")
        opened_few(tmp_path, num_samples)
    ranks = fast_ranks(stepping_together, 3, args=(tmp_path, cases), timeout_s=90)
    for (num_samples, batch_size, tail), *found in zip(cases, *ranks, strict=True):
        steps = -(-num_samples // (3 * batch_size)) if tail != "drop" else num_samples // (3 * batch_size)
        assert [own[0] for own in found] == [steps] * 3
        taken = set(chain(*(own[1] for own in found)))
        assert taken == (set(range(num_samples)) if tail != "drop" else set())
