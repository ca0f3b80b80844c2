"""Mixtures of what transforms make: lengths that are found, packed by shares of samples and of tokens."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dataflow import DataLoader, Mixture, Packed, SampleError, ShardedDataset

NUMBERS = {"a": 150, "b": 60}
LENGTHS = {"a": 3, "b": 11}
ROW = 24


class MakesTokens:
    """A document is its number, as often as it is long, with what tells the source."""

    fingerprint = "makes-tokens"

    def __call__(self, sample: Mapping[str, Any]) -> dict[str, Any]:
        name = sample["name"]
        return {
            "tokens": torch.full(
                (1 + sample["n"] % LENGTHS[name],), 1000 * (1 + "ab".index(name)) + sample["n"]
            )
        }


@pytest.fixture
def mixed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two datasets, and an empty cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name, count in NUMBERS.items():
        rows = "".join(json.dumps({"name": name, "n": n}) + "\n" for n in range(count))
        (tmp_path / f"{name}.jsonl").write_text(rows)
    return tmp_path


def opened(folder: Path, transform: Any = None, **options: Any) -> Mixture:
    transform = transform or MakesTokens()
    a, b = (
        ShardedDataset(folder / f"{name}.jsonl", transform=transform, block_bytes=300) for name in NUMBERS
    )
    return Mixture({a: 0.7, b: 0.3}, **options)


def loader_of(mixture: Any, batch_size: int = 4, **options: Any) -> DataLoader:
    options = {"num_workers": 0, "batching": Packed(ROW, window=50), **options}
    return DataLoader(mixture, batch_size, True, seed=3, **options)


def rows_of(loader: DataLoader) -> list[list[list[int]]]:
    return [batch["tokens"].tokens.tolist() for batch in loader]


def test_each_sample_is_packed_whole_as_often_as_the_mixture_says(mixed: Path) -> None:
    mixture = opened(mixed, stop="all")
    with loader_of(mixture) as loader:
        got = Counter(token for token in chain(*chain(*rows_of(loader))) if token)
    source, index = mixture.spec.epoch(0).locate(np.arange(mixture.num_samples(0)))
    assert {token // 1000 for token in got} == {1, 2}
    assert len(got) == sum(NUMBERS.values())
    for number, name in enumerate(NUMBERS):
        whole, more = divmod(int((source == number).sum()), NUMBERS[name])
        assert index[source == number].max() + 1 == whole * NUMBERS[name] + more
        times = Counter(got[1000 * (number + 1) + n] / (1 + n % LENGTHS[name]) for n in range(NUMBERS[name]))
        assert times == Counter({whole: NUMBERS[name] - more, whole + 1: more}) - Counter(
            {whole: 0, whole + 1: 0}
        )


def test_tokens_come_in_their_shares(mixed: Path) -> None:
    with loader_of(opened(mixed, shares="tokens", stop="all")) as loader:
        tokens = [token for token in chain(*chain(*rows_of(loader))) if token]
    first = sum(token < 2000 for token in tokens)
    assert abs(first - 0.7 * len(tokens)) <= max(LENGTHS.values())


def test_samples_are_made_for_their_lengths_once_and_not_in_the_next_run(mixed: Path) -> None:
    made: list[int] = []

    class Counts(MakesTokens):
        def __call__(self, sample: Mapping[str, Any]) -> dict[str, Any]:
            made.append(sample["n"])
            return super().__call__(sample)

    with loader_of(opened(mixed, Counts(), shares="tokens")):
        assert len(made) == sum(NUMBERS.values())
    with loader_of(opened(mixed, Counts(), shares="tokens")) as loader:
        assert len(made) == sum(NUMBERS.values())
        assert len(loader) > 3


def test_a_source_whose_lengths_are_kept_is_not_made_again_and_no_batch_is_transformed(mixed: Path) -> None:
    made: list[str] = []

    class Counts(MakesTokens):
        def __call__(self, sample: Mapping[str, Any]) -> dict[str, Any]:
            made.append(sample["name"])
            return super().__call__(sample)

    def never(batch: Any) -> Any:
        raise AssertionError("a batch that nobody asked for")

    with loader_of(opened(mixed, Counts()).sources[0]) as loader:
        rows_of(loader)
    made.clear()
    mixture = opened(mixed, Counts(), shares="tokens")
    for source in mixture.sources:
        source.batch_transform = never
    mixture.batch_transform = never
    with loader_of(mixture):
        assert Counter(made) == {"b": NUMBERS["b"]}


def test_without_a_name_for_lengths_shares_of_tokens_say_what_they_lack(mixed: Path) -> None:
    with pytest.raises(ValueError, match=r'shares="tokens" needs the lengths .* lengths_key='):
        loader_of(opened(mixed, lambda sample: MakesTokens()(sample), shares="tokens"))


def test_an_error_names_the_sample_of_its_own_source(mixed: Path) -> None:
    def with_mask(sample: Mapping[str, Any]) -> dict[str, Any]:
        tokens = MakesTokens()(sample)["tokens"]
        is_bad = (sample["name"], sample["n"]) == ("b", 17)
        return {"tokens": tokens, "mask": tokens[1:] if is_bad else tokens}

    batching = Packed(ROW, columns=["tokens", "mask"], window=50)
    with (
        loader_of(opened(mixed, with_mask, stop="all"), batching=batching) as loader,
        pytest.raises(SampleError, match="they must be alike") as caught,
    ):
        rows_of(loader)
    assert caught.value.shard.endswith("b.jsonl")
    assert caught.value.key == "17"
