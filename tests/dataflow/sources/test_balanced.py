"""Datasets whose classes come in other shares: labels, weights, what is read, what is refused."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from datasets_kit import MAKERS, Make, delivered, plain, rows_of, write_tar
from http_kit import RangeServer, serving

from dataflow import DataLoader, Mixture, ShardedDataset, Shuffle, convert
from sharding.errors import SampleError

NUM_CLASSES = 20


@pytest.fixture
def tars(tmp_path: Path) -> Path:
    """1,200 samples of 20 classes in unlike numbers, mixed in four tars, each with 1,000 bytes of noise."""
    rng = np.random.default_rng(0)
    classes = np.minimum(rng.geometric(0.2, 1200) - 1, NUM_CLASSES - 1)
    for shard in range(4):
        numbers = range(shard * 300, (shard + 1) * 300)
        members = [
            (f"{n:04d}.{name}", data)
            for n in numbers
            for name, data in (("bin", rng.bytes(1000)), ("cls", b"%d" % classes[n]), ("n.txt", b"%d" % n))
        ]
        write_tar(tmp_path / f"{shard}.tar", members)
    return tmp_path


def opened(folder: Path, **more: Any) -> ShardedDataset:
    return ShardedDataset(str(folder / "*.tar"), block_bytes=1 << 15, **more)


def classes_of(dataset: ShardedDataset, **options: Any) -> Counter[Any]:
    with DataLoader(dataset, 32, **{"shuffle": True, **options}) as loader:
        batches = list(loader)
        assert len(batches) == len(loader)
    return Counter(label for batch in batches for label in plain(batch["cls"]))


def test_classes_of_mixed_tars_come_alike_and_an_epoch_reads_each_byte_once(tars: Path) -> None:
    dataset = opened(tars).balanced("cls")
    size = sum(path.stat().st_size for path in tars.glob("*.tar"))
    with DataLoader(dataset, 32, shuffle=Shuffle("window", 8)) as loader:
        counts = Counter(int(label) for batch in loader for label in batch["cls"])
        assert loader.stats().read_bytes <= 1.2 * size
    assert counts == dict.fromkeys(range(NUM_CLASSES), len(dataset) // NUM_CLASSES)


def test_weights_share_an_epoch_out_and_zero_leaves_a_class_out(tars: Path) -> None:
    weights = dict.fromkeys(range(NUM_CLASSES), 0) | {0: 1, 3: 2, 19: 0.2}
    assert classes_of(opened(tars).balanced("cls", weights)) == {0: 375, 3: 750, 19: 75}
    in_order = np.array([weights[n] for n in range(NUM_CLASSES)])
    assert classes_of(opened(tars).balanced("cls", in_order.tolist())) == {0: 375, 3: 750, 19: 75}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", [*MAKERS][::-1])
def test_labels_of_every_format_are_classes(made: Make, name: str) -> None:
    data = made(name)
    if (by := next((c for c in ("cls", "label", "txt") if c in data.samples[0]), None)) is None:
        pytest.skip("it has no labels")
    dataset = data.open().balanced(by)
    with DataLoader(dataset, 7, shuffle=True) as loader:
        rows = [row for batch in loader for row in rows_of(batch)]
    assert len(rows) == len(data.samples)
    assert all(row in data.samples for row in rows)


def test_text_labels_views_and_renamed_columns_are_balanced(tmp_path: Path) -> None:
    rows = [{"n": n, "kind": "owl" if n % 5 == 0 else "cat"} for n in range(40)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet", row_group_size=7)
    dataset = ShardedDataset(str(tmp_path / "a.parquet"), columns={"n": "n", "what": "kind"})
    view = dataset.skip(1).balanced("what", {"owl": 3, "cat": 1})
    with DataLoader(view, 39, shuffle=True) as loader:
        (batch,) = delivered(loader)
    assert Counter(row["what"] for row in batch) == {"owl": 29, "cat": 10}
    assert {row["n"] for row in batch if row["what"] == "owl"} == {*range(5, 40, 5)}


def test_labels_are_read_once_and_kept(tars: Path) -> None:
    with serving(RangeServer(tars)) as server:
        urls = [f"{server.url}/{n}.tar" for n in range(4)]
        first = ShardedDataset(urls, block_bytes=1 << 15).balanced("cls")
        assert sum(asked.nbytes for asked in server.asked) > 0
        server.asked.clear()
        again = ShardedDataset(urls, block_bytes=1 << 15).balanced("cls")
        assert sum(asked.nbytes for asked in server.asked) == 0
    assert again.fingerprint() == first.fingerprint()


def test_a_state_of_other_shares_is_refused_in_words(tars: Path) -> None:
    dataset = opened(tars, columns=["cls"])
    with DataLoader(dataset.balanced("cls"), 32, shuffle=True) as loader:
        next(iter(loader))
        state = loader.state_dict()
    others = (dataset, dataset.balanced("cls", [1, *[2] * (NUM_CLASSES - 1)]))
    for other in others:
        with DataLoader(other, 32) as loader, pytest.raises(ValueError, match="balanced"):
            loader.load_state_dict(state)


def test_what_does_not_fit_is_an_error_that_says_so(tars: Path) -> None:
    dataset = opened(tars)
    for by, weights, message in (
        ("nothing", None, "nothing"),
        ("bin", [1], "integers, text or bytes"),
        ("cls", [1, 2], "20 classes, and weights 2 numbers"),
        ("cls", {77: 1}, "77.*no class"),
        ("cls", {0: 1}, "lack class 1"),
        ("cls", [1, 1e-9, *[1] * 18], "1 classes with a weight, such as 1 of"),
        ("cls", [0] * 20, "positive"),
    ):
        with pytest.raises(ValueError, match=message):
            dataset.balanced(by, weights)  # type: ignore[arg-type]


def test_a_label_that_is_none_names_its_sample(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", [("x0.cls", b"1"), ("x1.cls", b"one")])
    with pytest.raises(SampleError, match="x1"):
        opened(tmp_path).balanced("cls")


def test_a_balanced_dataset_is_streamed_and_nothing_else_that_would_lose_the_balance(
    tars: Path, tmp_path: Path
) -> None:
    dataset = opened(tars).balanced("cls")
    for view in (lambda: dataset.take(3), lambda: dataset.split({"a": 0.5, "b": 0.5})):
        with pytest.raises(ValueError, match="then balanced"):
            view()
    with pytest.raises(ValueError, match="convert what it was made of"):
        convert(dataset, str(tmp_path / "out"), to="parquet")
    with pytest.raises(ValueError, match="joined is balanced"):
        opened(tars).join(dataset)
    with pytest.raises(TypeError, match=r"only a dataflow.DataLoader balances"):
        dataset[0]
    assert classes_of(dataset.select(["cls"])).keys() == {*range(NUM_CLASSES)}


def test_a_sampler_is_refused_with_the_view_that_does_the_same(tars: Path) -> None:
    sampler = torch.utils.data.WeightedRandomSampler([1.0] * 1200, 1200)
    with pytest.raises(ValueError, match=r"sampler= cannot be used here; dataset.balanced\(by="):
        DataLoader(opened(tars), 32, sampler=sampler)


def test_a_mixture_draws_from_a_balanced_member(tars: Path) -> None:
    dataset = opened(tars, columns=["cls"])
    rare = Mixture({dataset.balanced("cls"): 1, dataset: 1}, stop="all")
    counts = classes_of(rare)  # type: ignore[arg-type]
    assert counts[19] == len(dataset) // NUM_CLASSES + classes_of(dataset)[19]
