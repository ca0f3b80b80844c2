"""Weights that are set while a mixture is packed or bucketed: what is planned together keeps its weights."""

from __future__ import annotations

import copy
import json
import pickle
import re
from collections import Counter
from collections.abc import Mapping
from itertools import chain, product
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets_kit import edited
from parameters_kit import in_pairs, one_in

from dataflow import Bucketed, DataLoader, Mixture, Packed, ShardedDataset, TokenBudget
from sharding.mixture import weight_steps

SIZES = {"a": 60, "b": 25, "c": 20}
WINDOW = 12
BATCHINGS = {
    "packed": Packed(24, window=WINDOW),
    "budget": TokenBudget(48, window=WINDOW),
    "buckets": Bucketed(4, boundaries=[4, 8], window=WINDOW),
}
CHANGES = {2: [1, 1, 1], 3: [1, 5, 1], 7: [0, 1, 2]}
"""After so many batches."""


def length(name: str, number: int) -> int:
    return 1 + number % {"a": 3, "b": 11, "c": 5}[name]


def tokens(name: str, number: int) -> list[int]:
    """A document is its number, as often as it is long, with what tells the source."""
    return [1000 * (1 + "abc".index(name)) + number] * length(name, number)


class MakesTokens:
    fingerprint = "makes-tokens"

    def __call__(self, sample: Mapping[str, Any]) -> dict[str, Any]:
        return {"tokens": torch.tensor(tokens(sample["name"], sample["n"]))}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three datasets, of tokens and of what they are made from, and an empty cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name, size in SIZES.items():
        rows = [{"name": name, "n": n} for n in range(size)]
        (tmp_path / f"{name}-found.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        lists = [{"tokens": tokens(name, n)} for n in range(size)]
        (tmp_path / f"{name}-known.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lists))
    return tmp_path


def sources_of(folder: Path, kind: str, names: str = "abc") -> list[ShardedDataset]:
    transform = MakesTokens() if kind == "found" else None
    urls = [folder / f"{name}-{kind}.jsonl" for name in names]
    return [ShardedDataset(url, transform=transform, block_bytes=300) for url in urls]


def mixture_of(folder: Path, kind: str = "known", **options: Any) -> Mixture:
    return Mixture(dict(zip(sources_of(folder, kind), (0.6, 0.3, 0.1), strict=True)), **options)


def again(mixture: Mixture) -> Mixture:
    """The same sources and shares, of which no weights were set."""
    other = copy.copy(mixture)
    other.weights_set = None
    return other


def loader_of(mixture: Any, batching: str = "packed", batch_size: int = 2, **options: Any) -> DataLoader:
    options = {"num_workers": 0, "batching": BATCHINGS[batching], **options}
    size = batch_size if batching == "packed" else 1
    return DataLoader(mixture, size, True, seed=3, **options)


def rows_of(batch: Any) -> list[list[int]]:
    values = batch["tokens"]
    return values.tokens.tolist() if hasattr(values, "tokens") else values.tolist()


def run(
    loader: DataLoader, changes: Mapping[int, Any], epochs: int = 2, states: list[Any] | None = None
) -> list[list[list[int]]]:
    """All batches of some epochs; weights are set after so many."""
    got = []
    for _ in range(epochs):
        for batch in loader:
            got.append(rows_of(batch))
            if len(got) in changes:
                loader.dataset.set_weights(changes[len(got)])
            if states is not None:
                states.append(loader.state_dict())
    return got


def documents(batches: list[list[list[int]]]) -> Counter[int]:
    """How often each document came, in whole."""
    counted = Counter(token for token in chain(*chain(*batches)) if token)
    of_name = {document: "abc"[document // 1000 - 1] for document in counted}
    return Counter({d: n / length(of_name[d], d % 1000) for d, n in counted.items()})


WAYS = one_in(5, [*product(["known", "found"], ["samples", "tokens"], [*BATCHINGS], ["first", "all"])])


@pytest.mark.parametrize(("kind", "shares", "batching", "stop"), WAYS)
def test_no_document_is_lost_or_torn_and_no_source_begins_anew(
    folder: Path, kind: str, shares: Any, batching: str, stop: Any
) -> None:
    with loader_of(mixture_of(folder, kind, shares=shares, stop=stop), batching) as loader:
        plain = run(loader, {})
    with loader_of(mixture_of(folder, kind, shares=shares, stop=stop), batching) as loader:
        changed = run(loader, CHANGES)
    assert changed[: min(CHANGES)] == plain[: min(CHANGES)]
    assert changed != plain
    came = documents(changed)
    for number, (name, size) in enumerate(SIZES.items(), 1):
        times = [came[1000 * number + n] for n in range(size)]
        assert all(time == int(time) for time in times), name
        assert max(times) - min(times) <= 1, name


@pytest.mark.parametrize("kind", ["known", "found"])
@pytest.mark.parametrize("shares", ["samples", "tokens"])
def test_what_is_planned_after_the_packing_window_has_the_new_shares(
    folder: Path, kind: str, shares: Any
) -> None:
    mixture = mixture_of(folder, kind, shares=shares, stop="all")
    with loader_of(mixture, batch_size=1) as loader:
        batches = run(loader, {2: [0, 0, 1]}, epochs=1)
        since = re.search(r"weights 0, 0, 1 from sample ([0-9]+) of epoch 0 on", repr(loader.mixture))
    assert since is not None
    assert int(since[1]) > 0
    sources = [{token // 1000 for token in chain(*batch) if token} for batch in batches]
    last_old = max(at for at, found in enumerate(sources) if found - {3})
    of_two_packing_windows = 2 * WINDOW * max(length("b", n) for n in range(SIZES["b"])) / 24
    assert 1 <= last_old < of_two_packing_windows
    assert sources[last_old + 1 :]
    assert all(found == {3} for found in sources[last_old + 1 :])


@pytest.mark.parametrize("kind", ["known", "found"])
def test_weights_set_before_an_epoch_hold_from_its_first_batch(folder: Path, kind: str) -> None:
    mixture = mixture_of(folder, kind)
    with loader_of(mixture) as loader:
        mixture.set_weights([0, 1, 0])
        assert {token // 1000 for token in chain(*chain(*run(loader, {}, 1)))} <= {0, 2}
        mixture.set_weights([0, 0, 1])
        assert {token // 1000 for token in chain(*chain(*run(loader, {}, 1)))} <= {0, 3}


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("kind", "shares"), in_pairs(["known", "found"], ["samples", "tokens"]))
def test_what_came_before_the_oldest_weights_that_are_kept_does_not_begin_anew(
    folder: Path, kind: str, shares: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_steps, "MAX_STEPS", 4)
    mixture = mixture_of(folder, kind, stop="all", shares=shares)
    changes = {2 * n: [1, 1 + n % 5, 1 + n % 3] for n in range(1, 9)}
    with loader_of(mixture) as loader:
        states: list[Any] = []
        whole = run(loader, changes, 1, states)
        following = run(loader, {}, 1)
        assert max(len(json.loads(state["weights"])["steps"]) for state in states[2:]) == 4
        loader.set_epoch(0)
        with pytest.raises(ValueError, match="epoch 0 cannot begin anew: weights were set more than"):
            next(iter(loader))
        loader.set_epoch(1)
        assert run(loader, {}, 1) == following
    for cut in (3, 9, len(whole) - 1):
        with loader_of(again(mixture)) as loader:
            loader.load_state_dict(json.loads(json.dumps(states[cut - 1])))
            later = {at - cut: weights for at, weights in changes.items() if cut < at <= len(whole)}
            assert run(loader, later, 2) == whole[cut:] + following


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", ["known", "found"])
def test_a_source_that_is_added_goes_on_with_a_state_of_the_others(folder: Path, kind: str) -> None:
    """A new source comes last, has no share at first, and gets one by `set_weights`."""
    old = Mixture(dict(zip(sources_of(folder, kind, "ab"), (0.6, 0.4), strict=True)), stop="all")
    with loader_of(old) as loader:
        states: list[Any] = []
        whole = run(loader, {2: [1, 1]}, states=states)
    for cut in (0, 5):
        new = Mixture(dict(zip(sources_of(folder, kind), (0.6, 0.4, 0), strict=True)), stop="all")
        with loader_of(new) as loader:
            loader.load_state_dict(states[cut])
            later = run(loader, {1: [1, 1, 2]}, 1)
        assert {token // 1000 for token in chain(*chain(*later)) if token} == {1, 2, 3}
        assert later[0] == whole[cut + 1]
    ((*place, shares),) = json.loads(states[5]["weights"])["steps"]
    more = edited(states[5], weights={"steps": [[*place, shares + " 0"]]})
    with loader_of(old) as loader, pytest.raises(ValueError, match="of 3 sources, and the mixture has 2"):
        loader.load_state_dict(more)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
@pytest.mark.parametrize("kind", ["known", "found"])
def test_a_copy_of_a_loader_that_has_run_goes_on_like_it(folder: Path, kind: str, copied: Any) -> None:
    with loader_of(mixture_of(folder, kind)) as loader:
        loop = iter(loader)
        for _ in range(4):
            next(loop)
        loader.dataset.set_weights([1, 0, 1])
        for _ in range(2):
            next(loop)
        with copied(loader) as other:
            assert other.state_dict() == loader.state_dict()
            others = run(other, {}, 1)
        assert [*loop]
        assert run(loader, {}, 1) == others


def test_a_state_of_sixteen_packed_sources_is_small(folder: Path) -> None:
    (source,) = sources_of(folder, "known", "a")
    mixture = Mixture(dict.fromkeys([source.take(30 - i) for i in range(16)], 1), stop="all")
    with loader_of(mixture, batch_size=8) as loader:
        states: list[Any] = []
        run(loader, {2: [i + 1 for i in range(16)]}, 1, states)
    assert max(len(json.dumps(state)) for state in states) < 1100
