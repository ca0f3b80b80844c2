"""`Mixture` of datasets: rules for shares, nesting, and what its windows stage."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets_kit import make_ints_tar, make_jsonl, make_parquet

from dataflow import DataLoader, Mixture, ShardedDataset, ShardWriter, Shuffle, convert


@pytest.fixture
def abc(tmp_path: Path) -> tuple[ShardedDataset, ...]:
    """Datasets of 47, 20 and 9 samples that deliver one integer `n`; the first two differ in format."""
    found = []
    for name, make, num_samples, column in (
        ("a", make_parquet, 47, "label"),
        ("b", make_jsonl, 20, "label"),
        ("c", make_parquet, 9, "label"),
    ):
        (tmp_path / name).mkdir()
        found.append(make(tmp_path / name, num_samples).open(columns={"n": column}))
    return tuple(found)


def samples_of(mixture: Mixture, epoch: int, seed: int = 0) -> list[tuple[int, int]]:
    """(source, sample number in the source) of each position of an epoch, through windows and blocks."""
    windows = mixture.windows(epoch, Shuffle("window", 2), seed=seed)
    found = []
    for window, slot in zip(
        *(a.tolist() for a in windows.locate(np.arange(windows.num_samples))), strict=True
    ):
        ordinal, row = windows.window_samples(window)
        source, block = windows.source_of(window)[0], windows.window_blocks(window)[ordinal[slot]]
        found.append((source, int(mixture.sources[source].catalog.blocks.first_sample[block] + row[slot])))
    return found


def test_weights_are_shares_of_the_samples(abc: tuple[ShardedDataset, ...]) -> None:
    a, b, c = abc
    mixture = Mixture({a: 0.7, b: 0.2, c: 0.1})
    assert mixture.shares == (Fraction(7, 10), Fraction(1, 5), Fraction(1, 10))
    samples = samples_of(mixture, 0)
    assert len(samples) == len(mixture)
    assert Counter(source for source, _ in samples)[0] == 47
    for stop in range(len(samples)):
        counts = Counter(source for source, _ in samples[:stop])
        assert all(abs(counts[i] - stop * float(w)) < 1 for i, w in enumerate(mixture.shares))


def test_without_weights_every_sample_comes_once_an_epoch(abc: tuple[ShardedDataset, ...]) -> None:
    mixture = Mixture(abc)
    assert len(mixture) == 76
    expected = sorted((source, n) for source, size in enumerate((47, 20, 9)) for n in range(size))
    orders = [samples_of(mixture, epoch) for epoch in range(3)]
    assert all(sorted(order) == expected for order in orders)
    assert orders[0] != orders[1] != orders[2]
    assert samples_of(mixture, 1) == orders[1]
    assert samples_of(mixture, 0, seed=1) != orders[0]


def test_sources_of_equal_shape_are_shuffled_apart(tmp_path: Path) -> None:
    made = make_ints_tar(tmp_path, 30)
    samples = samples_of(Mixture([made.open(), made.open()]), 0)
    orders = [[n for source, n in samples if source == number] for number in (0, 1)]
    assert orders[0] != orders[1]
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(30))


def test_repeats_by_name_or_in_order(abc: tuple[ShardedDataset, ...]) -> None:
    a, b, c = abc
    mixture = Mixture(abc, repeats={a: 1, b: 2, c: Fraction(1, 3)})
    counts = Counter(samples_of(mixture, 0))
    assert Counter(source for source, _ in counts.elements()) == {0: 47, 1: 40, 2: 3}
    assert {counts[1, n] for n in range(20)} == {2}
    assert mixture.fingerprint() == Mixture(abc, repeats=[1, 2, Fraction(1, 3)]).fingerprint()


def test_a_nested_mixture_is_spread_out_with_exact_shares(abc: tuple[ShardedDataset, ...]) -> None:
    a, b, c = abc
    nested = Mixture({a: Fraction(1, 3), Mixture({b: 0.9, c: 0.1}): Fraction(2, 3)})
    assert nested.shares == (Fraction(1, 3), Fraction(3, 5), Fraction(1, 15))
    assert nested.sources == (a, b, c)
    assert samples_of(nested, 0) == samples_of(Mixture({a: 5, b: 9, c: 1}), 0)


def test_temperature_looks_at_the_size_of_members(abc: tuple[ShardedDataset, ...]) -> None:
    a, b, c = abc
    assert Mixture([a, b, c], temperature=1).shares == (Fraction(47, 76), Fraction(20, 76), Fraction(9, 76))
    assert Mixture([a, b], temperature=float("inf")).shares == (Fraction(1, 2), Fraction(1, 2))
    two = Mixture([a, Mixture({b: 1, c: 1})], temperature=1)
    assert two.shares == (Fraction(47, 76), Fraction(29, 152), Fraction(29, 152))


def test_a_schedule_names_members_and_leaves_out_others(abc: tuple[ShardedDataset, ...]) -> None:
    a, b, c = abc
    mixture = Mixture([a, b, c], schedule={0: {a: 1}, 10: [0, 1, 1]}, stop="first")
    sources = [source for source, _ in samples_of(mixture, 0)]
    assert sources[:10] == [0] * 10
    assert Counter(sources[10:]) == {1: sources.count(1), 2: 9}


def test_views_can_be_mixed(abc: tuple[ShardedDataset, ...]) -> None:
    a, b, _ = abc
    mixture = Mixture([a.subset(slice(1, None, 3)), b.take(5)])
    expected = [(0, n) for n in range(1, 47, 3)] + [(1, n) for n in range(5)]
    assert sorted(samples_of(mixture, 0)) == expected


def test_an_endless_mixture_has_no_length(abc: tuple[ShardedDataset, ...]) -> None:
    mixture = Mixture({abc[0]: 1, abc[1]: 1}, stop="never")
    with pytest.raises(TypeError, match="no length"):
        len(mixture)
    window, _ = mixture.windows(0, Shuffle("window", 2), seed=0).locate(np.arange(10**9, 10**9 + 4))
    assert (window > 10**5).all()


def test_the_fingerprint_follows_shards_shares_and_rules(abc: tuple[ShardedDataset, ...]) -> None:
    a, b, c = abc
    mixtures = [
        Mixture({a: 1, b: 1}),
        Mixture({a: 1, c: 1}),
        Mixture({a: 1, b: 2}),
        Mixture({a: 1, b: 1}, stop="all"),
        Mixture({a: 1, b: 1}, run_length=4),
        Mixture({a.take(40): 1, b: 1}),
    ]
    assert len({mixture.fingerprint() for mixture in mixtures}) == len(mixtures)
    assert mixtures[0].fingerprint() == Mixture({a: 0.5, b: 0.5}).fingerprint()


def test_members_must_deliver_the_same_columns(tmp_path: Path) -> None:
    (tmp_path / "p").mkdir()
    (tmp_path / "t").mkdir()
    table, tar = make_parquet(tmp_path / "p"), make_ints_tar(tmp_path / "t")
    with pytest.raises(ValueError, match=r"delivers \['cls'\], source 0 \['label'\]"):
        Mixture([table.open(columns=["label"]), tar.open()])
    with pytest.raises(ValueError, match="column 'n' is ragged uint8 in source 1 and array int64"):
        Mixture([table.open(columns={"n": "label"}), tar.open(columns={"n": "cls"}, decode=None)])
    same = Mixture([table.open(columns={"n": "label"}), tar.open(columns={"n": "cls"})])
    assert [output.name for output in same.outputs] == ["n"]
    with pytest.raises(ValueError, match="on_error"):
        Mixture([table.open(columns=["x"]), table.open(columns=["x"], on_error="skip")])
    with pytest.raises(ValueError, match="batch_transform"):
        Mixture([table.open(columns=["x"]), table.open(columns=["x"], batch_transform=len)])


# ---- formats that store numbers in other places ---------------------------------------------------------


def numbers_as(folder: Path, form: str, first: int) -> ShardedDataset[Any]:
    """Ten samples of numbers and text, in a format; "mds" in place and "checked" as whole blocks are read."""
    rows = [{"x": first + i, "f": i / 4, "t": f"{first + i}"} for i in range(10)]
    if form in ("mds", "checked"):
        made = convert(rows, folder / form, to="mds", workers=1, progress=False)
        return ShardedDataset(f"{folder}/mds/*.mds" if form == "mds" else made.catalog)
    with ShardWriter(f"{folder}/{form}.{form}") as writer:
        writer.write_many(rows)
    return ShardedDataset(f"{folder}/{form}.{form}")


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize(
    "forms", [("mds", "parquet"), ("jsonl", "mds"), ("arrow", "checked", "parquet"), ("mds", "checked")]
)
def test_columns_of_one_dtype_and_shape_mix_whatever_format_has_them(
    tmp_path: Path, forms: tuple[str, ...], shuffle: bool
) -> None:
    sources = [numbers_as(tmp_path, form, 100 * number) for number, form in enumerate(forms)]
    mixture = Mixture(sources)
    found = {}
    for _ in range(2):
        with DataLoader(mixture, 4, shuffle=shuffle) as loader:
            for batch in loader:
                assert (batch["x"].dtype, batch["f"].dtype) == (torch.int64, torch.float64)
                values = zip(batch["t"], batch["f"].tolist(), strict=True)
                found |= dict(zip(batch["x"].tolist(), values, strict=True))
    want = {100 * n + i: (str(100 * n + i), i / 4) for n in range(len(forms)) for i in range(10)}
    assert found == want


def test_columns_of_other_dtypes_do_not_mix(tmp_path: Path) -> None:
    parquet = numbers_as(tmp_path, "parquet", 0)
    made = convert([{"x": np.int32(1), "f": 0.5, "t": ""}], tmp_path / "mds", to="mds", workers=1)
    with pytest.raises(ValueError, match=r"column 'x' is spans int32 \[\] in source 1 and array int64 \[\]"):
        Mixture([parquet, ShardedDataset(f"{tmp_path}/mds").select(["x", "f", "t"])])
    assert made.samples == 1
