"""`ShardedDataset` as a map-style dataset: every index of every format, torch's own DataLoader, threads."""

from __future__ import annotations

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets_kit import MAKERS, NUM_SAMPLES, Make, make_tar, npy, plain, rows_of, write_tar
from programs_kit import run_script

from dataflow import DataLoader, Image, Ragged, ShardedDataset, Shuffle
from sharding.errors import SampleError, ShardChangedError, ShardReadError


def plain_of(sample: dict[str, Any]) -> dict[str, Any]:
    return {name: plain(value) for name, value in sample.items()}


@pytest.mark.parametrize("name", MAKERS)
def test_every_index_gives_its_sample(made: Make, name: str) -> None:
    data = made(name)
    dataset = data.open()
    assert len(dataset) == len(data.samples)
    assert [plain_of(dataset[i]) for i in range(len(dataset))] == data.samples
    assert [plain_of(dataset[-1 - i]) for i in range(3)] == data.samples[:-4:-1]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", [*MAKERS][::-1])
def test_any_list_of_indices_gives_its_samples_in_that_order(made: Make, name: str) -> None:
    data, rng = made(name), np.random.default_rng(0)
    dataset = data.open()
    for size in (1, 2, 30):
        indices = rng.integers(-NUM_SAMPLES, NUM_SAMPLES, size).tolist()
        got = [plain_of(sample) for sample in dataset.__getitems__(indices)]
        assert got == [data.samples[i] for i in indices]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", MAKERS)
def test_a_slice_or_a_list_of_indices_gives_columns_as_a_batch_has_them(made: Make, name: str) -> None:
    data = made(name)
    dataset = data.open()
    with DataLoader(dataset, 7, shuffle=False) as loader:
        batch = next(iter(loader))
    columns = dataset[:7]
    assert {k: type(v) for k, v in columns.items()} == {k: type(v) for k, v in batch.items()}
    assert rows_of(columns) == rows_of(batch) == data.samples[:7]
    assert rows_of(dataset[-1::-9]) == data.samples[-1::-9]
    for indices in ([3, -1, 3], range(2, 9, 3), np.array([4, 1]), torch.tensor([2, 2])):
        assert rows_of(dataset[indices]) == [data.samples[i] for i in indices]


def test_a_slice_of_transformed_samples_is_collated_as_a_batch_is(made: Make) -> None:
    dataset = made("tar").open(transform=lambda s: {"n": s["cls"] * 10})
    assert dataset[2:5]["n"].tolist() == [20, 30, 40]


def test_no_indices_give_no_samples_and_no_columns(made: Make) -> None:
    dataset = made("tar").open()
    assert dataset.__getitems__([]) == []
    for indices in ([], slice(NUM_SAMPLES, None)):
        with pytest.raises(IndexError, match="no sample"):
            dataset[indices]


def test_a_for_loop_ends_by_the_index_error(made: Make) -> None:
    data = made("tokens.bin")
    assert [plain_of(sample) for sample in data.open()] == data.samples


def test_numpy_and_torch_integers_are_indices(made: Make) -> None:
    data = made("tar")
    dataset = data.open()
    assert plain_of(dataset[np.int64(7)]) == data.samples[7]
    assert plain_of(dataset[torch.tensor(7)]) == data.samples[7]


def test_samples_stay_valid_when_others_are_read(made: Make) -> None:
    """Values are views of buffers, which must not be reused while a sample is held."""
    for name in ("tar", "tokens.bin", "parquet"):
        data = made(name)
        dataset = data.open()
        held = [dataset[i] for i in range(len(dataset))]
        assert [plain_of(sample) for sample in held] == data.samples


def test_transforms_apply_and_random_ones_repeat(made: Make) -> None:
    dataset = made("tar").open(transform=lambda s: s["cls"] * 10)
    assert dataset[4] == 40
    dataset = made("tar").open(transform=lambda s, rng: (s["cls"], rng.random()))
    assert dataset[4] == dataset[4]
    assert len({dataset[i][1] for i in range(NUM_SAMPLES)}) == NUM_SAMPLES
    with DataLoader(dataset, 1, shuffle=False, collate_fn=lambda s: s[0]) as loader:
        assert list(loader) == [dataset[i] for i in range(NUM_SAMPLES)]


def test_columns_and_decoders_hold_for_single_samples(made: Make) -> None:
    dataset = made("tar").open(columns={"n": "cls", "k": "__key__", "u": "__url__"})
    assert list(dataset[5]) == ["n", "k", "u"]
    assert dataset[5]["n"] == 5
    assert dataset[5]["k"] == "00005"
    assert dataset[5]["u"].endswith("shard-1.tar")


def test_a_bad_sample_is_an_error_at_its_index_alone(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", [("x0.cls", b"1"), ("x1.cls", b"one"), ("x2.cls", b"2")])
    dataset = ShardedDataset(str(tmp_path / "a.tar"), catalog=str(tmp_path / "c"))
    assert [dataset[0]["cls"], dataset[2]["cls"]] == [1, 2]
    with pytest.raises(SampleError, match="not a number") as caught:
        dataset[1]
    assert caught.value.shard.endswith("a.tar")
    assert caught.value.key in ("x1", "1")


def test_a_shard_that_changed_or_vanished_is_an_error(tmp_path: Path) -> None:
    data = make_tar(tmp_path)
    dataset = data.open()
    data.shards[0].write_bytes(data.shards[1].read_bytes())
    with pytest.raises(ShardChangedError, match="shard-0"):
        dataset[0]
    data.shards[1].unlink()
    with pytest.raises(ShardReadError, match="shard-1"):
        dataset[6]
    assert plain_of(dataset[40]) == data.samples[40]


def test_images_are_decoded_for_single_samples(tmp_path: Path) -> None:
    cv2 = pytest.importorskip("cv2")
    pytest.importorskip("simplejpeg")
    pixels = np.full((20, 30, 3), 128, np.uint8)
    write_tar(tmp_path / "a.tar", [("0.png", cv2.imencode(".png", pixels)[1].tobytes()), ("0.npy", npy([1]))])
    source, catalog = str(tmp_path / "a.tar"), str(tmp_path / "c")
    assert ShardedDataset(source, catalog=catalog)[0]["png"].shape == (3, 20, 30)
    sized = ShardedDataset(source, catalog=catalog, decode={"png": Image(size=8), "npy": "npy"})
    assert sized[0]["png"].shape == (3, 8, 8)
    assert sized[0]["npy"].tolist() == [1]


@pytest.mark.parametrize("name", ["tar", "tar.gz", "parquet", "tokens.bin", "megatron"])
def test_many_threads_may_read_one_dataset(made: Make, name: str) -> None:
    data = made(name)
    dataset = data.open()

    def read(start: int) -> bool:
        order = [(start * 5 + i) % NUM_SAMPLES for i in range(NUM_SAMPLES)]
        return all(plain_of(dataset[i]) == data.samples[i] for i in order)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(read, range(8)))


def test_datasets_can_be_pickled_and_copied(made: Make) -> None:
    for name in ("tar", "parquet"):
        data = made(name)
        dataset = data.open()
        assert dataset[1]
        for other in (pickle.loads(pickle.dumps(dataset)), copy.copy(dataset), copy.deepcopy(dataset)):
            assert plain_of(other[5]) == data.samples[5]


def test_random_access_and_streaming_give_the_same_values(made: Make) -> None:
    for name in ("tar", "jsonl", "arrow-stream", "megatron-windows"):
        dataset = made(name).open()
        with DataLoader(dataset, 7, Shuffle("none")) as loader:
            streamed = [row for batch in loader for row in rows_of(batch)]
        assert streamed == [plain_of(dataset[i]) for i in range(len(dataset))]


# ---- torch's own DataLoader -----------------------------------------------------------------------------


def test_torchs_loader_reads_it_in_this_process(made: Make) -> None:
    data = made("parquet")
    dataset = data.open(columns=["label", "vec"])
    loader = torch.utils.data.DataLoader(dataset, batch_size=5, shuffle=True)
    rows = sorted((row for batch in loader for row in rows_of(batch)), key=lambda row: row["label"])
    assert rows == [{"label": s["label"], "vec": s["vec"]} for s in data.samples]


WORKERS = """
import sys, warnings
import torch
from dataflow import ShardedDataset

def main():
    source, catalog = sys.argv[1:]
    dataset = ShardedDataset(source, catalog=catalog, columns=["cls", "key"])
    assert dataset[3]["cls"] == 3
    loader = torch.utils.data.DataLoader(dataset, batch_size=4, num_workers=2)
    for epoch in range(2):
        got = [int(i) for batch in loader for i in batch["cls"]]
        assert got == list(range(len(dataset))), got
    print("fine")

if __name__ == "__main__":
    main()
"""


def test_torchs_loader_reads_it_in_worker_processes(made: Make, tmp_path: Path) -> None:
    data = made("tar")
    data.open()
    command = (WORKERS, data.kwargs["source"], data.kwargs["catalog"])
    code, out, err = run_script(*command, how="forked", folder=tmp_path)
    assert (code, out) == (0, "fine\n"), err


def test_ragged_values_come_as_rows(made: Make) -> None:
    sample = made("megatron").open()[4]
    assert not isinstance(sample["tokens"], Ragged)
    assert sample["tokens"].tolist() == [4, 5, 6, 7, 8]


def test_blocks_of_another_size_than_the_catalogs_are_indexed_anew(tmp_path: Path) -> None:
    made, catalog = make_tar(tmp_path), str(tmp_path / "kept.catalog")
    first = ShardedDataset([str(s) for s in made.shards], catalog=catalog, block_bytes=10_000)
    assert (
        ShardedDataset([str(s) for s in made.shards], catalog=catalog).catalog.num_blocks
        == first.catalog.num_blocks
    )
    small = ShardedDataset([str(s) for s in made.shards], catalog=catalog, block_bytes=1000)
    assert small.catalog.block_bytes == 1000
    assert small.catalog.num_blocks > first.catalog.num_blocks
