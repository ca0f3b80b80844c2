"""What `shuffle=True` makes of a dataset's size and of the memory limit: windows, their reason, states."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.utils.data
from datasets_kit import edited

import dataflow.limits
import dataflow.staging.rows
from dataflow import DataLoader, Mixture, Packed, ShardedDataset, Shuffle
from dataflow.tools.inspect.command import inspect_dataset
from dataflow.tools.inspect.settings import InspectSettings
from prefetch.errors import MemoryLimitError
from sharding.errors import DataflowError

BLOCK, LENGTH = 4096, 31
NUM_BLOCKS, NUM_SHARDS = 100, 4
NUM_SAMPLES = 5000


def shards(folder: Path, num_shards: int = NUM_SHARDS, num_samples: int = NUM_SAMPLES) -> Path:
    """Samples that begin with their number, ascending: as if sorted by it."""
    folder.mkdir()
    for number, part in enumerate(np.array_split(np.arange(num_samples, dtype=np.uint16), num_shards)):
        np.append(np.repeat(part, LENGTH), np.uint16(0)).tofile(folder / f"{number:03d}.bin")
    return folder


def opened(folder: Path, **options: Any) -> ShardedDataset:
    given = {"format": "tokens", "dtype": "uint16", "length": LENGTH, "block_bytes": BLOCK} | options
    return ShardedDataset(sorted(map(str, folder.glob("*.bin"))), **given)


@pytest.fixture(scope="module")
def sorted_shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shards(tmp_path_factory.mktemp("sizes") / "data")


def numbers(loader: Any) -> list[np.ndarray]:
    return [batch["tokens"].numpy()[:, 0] for batch in loader]


def dispersion(batches: list[np.ndarray], num_samples: int = NUM_SAMPLES) -> float:
    """Chi-square of ten labels, which follow from the sample's number, by its degrees of freedom."""
    counts = np.stack([np.bincount(batch * 10 // num_samples, minlength=10) for batch in batches])
    expected = counts.sum(1, keepdims=True) / 10
    return float((np.square(counts - expected) / expected).sum(1).mean() / 9)


def test_a_small_dataset_sorted_by_class_is_mixed_from_the_first_batch_on_in_every_epoch(
    sorted_shards: Path,
) -> None:
    dataset = opened(sorted_shards)
    with DataLoader(dataset, 50, shuffle=True) as loader, DataLoader(dataset, 50, Shuffle("full")) as full:
        for _ in range(3):
            batches = numbers(loader)
            assert dispersion(batches) < 1.2 * dispersion(numbers(full))
            assert dispersion(batches[:10]) < 1.5
        assert "the whole dataset fits into one window" in loader.stats().window_reason
        assert "begins with" not in loader.stats().window_reason


def test_a_dataset_beyond_a_quarter_of_the_limit_has_small_windows_in_epoch_0_alone(
    sorted_shards: Path,
) -> None:
    with DataLoader(opened(sorted_shards), 50, shuffle=True, memory_limit=20 * BLOCK * 4) as loader:
        assert loader.stats().window_blocks == 20
        assert loader.stats().window_reason.endswith("; epoch 0 begins with 8, 16")
        first, second = numbers(loader), numbers(loader)
    # Eight blocks hold few of the values: those of the first batches lie close together, in epoch 0 alone.
    spread = [len({*(np.concatenate(batches[:4]) // 64).tolist()}) for batches in (first, second)]
    assert spread[0] <= 2 * 8 < spread[1]


def test_windows_given_by_hand_are_all_alike(sorted_shards: Path) -> None:
    with DataLoader(opened(sorted_shards), 50, Shuffle(window_blocks=1000)) as loader:
        assert dispersion(numbers(loader)) < 1.2
        assert loader.stats().window_reason == "as given"


@pytest.mark.parametrize("limit", [1 << 30, 30 * BLOCK * 4, None])
def test_a_state_resumes_in_its_own_order_under_another_memory_limit(
    sorted_shards: Path, limit: int | None
) -> None:
    dataset = opened(sorted_shards)
    with DataLoader(dataset, 50, shuffle=True, memory_limit=20 * BLOCK * 4) as loader:
        batches = iter(loader)
        list(islice(batches, 7))
        state = loader.state_dict()
        left = numbers(batches)
    with DataLoader(dataset, 50, shuffle=True, memory_limit=limit) as other:
        assert other.stats().window_blocks != 20
        other.load_state_dict(state)
        assert np.array_equal(np.concatenate(numbers(other)), np.concatenate(left))


def test_a_state_of_the_order_before_is_refused(sorted_shards: Path) -> None:
    with DataLoader(opened(sorted_shards), 50, shuffle=True) as loader:
        state = loader.state_dict()
        before = {name: state["shuffle"][name] for name in ("kind", "window_blocks", "canonical_nodes")}
        old = edited(state, version=2, shuffle={**before, "exchange": 1.0})
        with pytest.raises(ValueError, match="state version 2, and only version 4 can be read"):
            loader.load_state_dict(old)


def test_each_source_of_a_mixture_has_windows_of_its_own_and_a_state_keeps_them(
    tmp_path: Path, sorted_shards: Path
) -> None:
    few = opened(shards(tmp_path / "few", 2, 1000), block_bytes=1024)
    mixture = Mixture([few, opened(sorted_shards)])
    # A quarter of half of it holds 20 blocks of the larger one, and all 63 small ones of the other.
    with DataLoader(mixture, 60, shuffle=True, memory_limit=20 * BLOCK * 8) as loader:
        assert "1 of 2 sources in one window each; epoch 0 begins with 8, 16" in loader.stats().window_reason
        state = loader.state_dict()
        assert state["shuffle"]["source_windows"] == [len(few.catalog.blocks.length), 20]
        batches = numbers(loader)
    with DataLoader(mixture, 60, shuffle=True) as other:
        other.load_state_dict(state)
        assert np.array_equal(np.concatenate(numbers(other)), np.concatenate(batches))


def test_a_source_of_a_mixture_that_fits_into_one_window_is_mixed_whatever_the_other_one_is(
    tmp_path: Path, sorted_shards: Path
) -> None:
    few = opened(shards(tmp_path / "few", 2, 1000), block_bytes=1024)
    large = opened(sorted_shards, transform=_beyond)
    mixture = Mixture([few, large], run_length=50)
    with DataLoader(mixture, 50, shuffle=True, memory_limit=20 * BLOCK * 8) as loader:
        of_few = [batch for batch in numbers(loader) if batch[0] < 10_000]
    assert len(of_few) == 20
    assert dispersion(of_few, 1000) < 1.3


def _beyond(sample: dict[str, Any]) -> dict[str, Any]:
    return {name: value + 20_000 for name, value in sample.items()}


def test_a_small_machine_has_a_limit_that_holds_the_windows_of_the_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dataflow.limits, "machine_memory", lambda: 512 << 20)
    path = tmp_path / "zeros.bin"
    path.touch()
    with path.open("r+b") as file:
        file.truncate(100 << 20)
    dataset = ShardedDataset(str(path), format="tokens", dtype="uint16", length=(1 << 19) - 1)
    with DataLoader(dataset, 1, shuffle=True) as loader:
        assert "one window" in loader.stats().window_reason
        assert next(iter(loader))["tokens"].shape == (1, 1 << 19)
    with DataLoader(dataset, 1, shuffle=False) as loader:
        next(iter(loader))
        assert loader.stats().memory.limit_bytes == 64 << 20


@pytest.mark.filterwarnings("ignore:This DataLoader will create 16 worker processes")
@pytest.mark.parametrize(
    ("workers", "machine_gib", "limit"),
    [
        # 33 batches of eight samples, 8 MiB each decoded and 1 MiB stored, and four windows of all there is
        ({"num_workers": 16, "workers": "process"}, 128, 33 * 8 * (9 << 20) + 4 * (65 << 20)),
        ({"num_workers": 16, "workers": "process"}, 16, 2 << 30),
        ({"num_workers": 2, "workers": "process"}, 128, 1 << 30),
        ({"num_workers": 16, "workers": "process", "memory_limit": "300MB"}, 128, 300_000_000),
    ],
)
def test_without_a_limit_there_is_memory_for_two_batches_of_each_builder_up_to_an_eighth_of_the_machine(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    workers: dict[str, Any],
    machine_gib: int,
    limit: int,
) -> None:
    monkeypatch.setattr(dataflow.limits, "machine_memory", lambda: machine_gib << 30)
    path = tmp_path / "zeros.bin"
    path.touch()
    with path.open("r+b") as file:
        file.truncate(65 << 20)
    tokens = ShardedDataset(str(path), format="tokens", dtype="uint8", length=(1 << 20) - 1, transform=dict)
    with DataLoader(tokens, 8, shuffle=True, **workers) as loader:
        assert loader.memory_limit == pytest.approx(limit, rel=0.05)


def test_more_shards_than_can_be_mapped_are_read(
    sorted_shards: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dataflow.staging.rows, "_MOST_MAPPED", NUM_SHARDS - 1)
    with DataLoader(opened(sorted_shards), 50, shuffle=True) as loader:
        found = np.sort(np.concatenate(numbers(loader)))
        assert loader.stats().mapped_bytes == 0
    assert len({*found.tolist()}) == len(found)


@pytest.fixture(scope="module")
def trillion(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A file of 2**41 bytes, which takes no space."""
    path = tmp_path_factory.mktemp("trillion") / "x.bin"
    path.touch()
    os.truncate(path, (1 << 41) + 2)
    return str(path)


def of_a_trillion(path: str, block_bytes: int = 1 << 40, **options: Any) -> ShardedDataset:
    given = {"format": "tokens", "dtype": "uint16", "length": 1, "block_bytes": block_bytes}
    data = ShardedDataset(path, **given, **options)
    assert len(data) == 1 << 40
    return data


@pytest.fixture
def watchdog() -> Iterator[None]:
    """Ends the test where it does not end by itself."""
    signal.alarm(60)
    yield
    signal.alarm(0)


IN_A_BLOCK = r"x.bin, byte \d+: the catalog says that a block has 549,755,813,888 samples, and at most"
CLAIM = r".*the catalog says that \S*x.bin has 1,099,511,627,776 samples, 549,755,813,888 in a block; "
LENGTHS = pytest.mark.skipif(
    Path("/proc/sys/vm/overcommit_memory").read_text().strip() == "1",
    reason="this kernel promises any memory and kills who uses it",
)


def looped(data: Any, *args: Any, **options: Any) -> object:
    with DataLoader(data, *args, **options) as loader:
        return next(iter(loader))


@pytest.mark.usefixtures("watchdog")
@pytest.mark.parametrize(
    ("use", "says"),
    [
        pytest.param(
            lambda data: DataLoader(data, 4, batching=Packed(128, "tokens")),
            f"no memory to plan an epoch of 1,099,511,627,776 samples{CLAIM}",
            marks=LENGTHS,
        ),
        pytest.param(
            lambda data: DataLoader(Mixture([data, data]), 4),
            f"no memory to plan an epoch of 2,199,023,255,552 samples{CLAIM}",
            marks=LENGTHS,
        ),
        (lambda data: data.subset(slice(0, None, 2)), f"pick among 1,099,511,627,776 samples{CLAIM}"),
        (lambda data: data.take(10), f"pick among 1,099,511,627,776 samples{CLAIM}"),
        (lambda data: data.split({"a": 0.9, "b": 0.1}), f"split 1,099,511,627,776 samples{CLAIM}"),
        (lambda data: data[1 << 39], IN_A_BLOCK),
        (lambda data: looped(data, 4), IN_A_BLOCK),
        (lambda data: looped(data, 4, shuffle=True), IN_A_BLOCK),
        (lambda data: looped(data, 4, Shuffle("full")), IN_A_BLOCK),
        (lambda data: next(iter(torch.utils.data.DataLoader(data, 4))), IN_A_BLOCK),
        (lambda data: inspect_dataset(data, InspectSettings(batch_size=4)), IN_A_BLOCK),
    ],
)
def test_what_of_2_to_the_40_samples_cannot_be_held_is_told_with_shard_and_claim(
    trillion: str, use: Any, says: str
) -> None:
    with pytest.raises(DataflowError, match=says):
        use(of_a_trillion(trillion))


@pytest.mark.usefixtures("watchdog")
def test_views_of_2_to_the_40_samples_list_none_that_they_keep_with_their_block(trillion: str) -> None:
    data = of_a_trillion(trillion, 1 << 30)
    assert len(data.skip(1 << 39)) == 1 << 39
    parts = data.split({"a": 0.9, "b": 0.1}, by="shard")
    assert sorted(map(len, parts.values())) == [0, len(data)]
    with pytest.raises(
        MemoryLimitError, match=r"split .*at most 8,589,934,592 .*x.bin has 1,099.*by=\"shard\""
    ):
        data.split({"a": 0.9, "b": 0.1})
