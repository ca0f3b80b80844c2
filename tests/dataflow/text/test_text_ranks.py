"""Real text, tokenized and mixed by tokens as it is packed: the same rows for any number of ranks."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from ranks_kit import fast_ranks
from text_kit import tokenizer, write_jsonl

from dataflow import DataLoader, Mixture, Packed, PackedRows, ShardedDataset, Tokenize

__all__ = ["tokenizer"]
GLOBAL_ROWS, ROW, EVERY = 12, 512, 10
WEIGHTS = {"early": 0.7, "late": 0.3}
pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The standard library in pieces of up to 3,000 characters; one source has the names up to "c"."""
    folder = tmp_path_factory.mktemp("sources")
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in WEIGHTS}
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("[a-z]*.py"))[:60]:
        text = path.read_text(errors="replace")
        name = "early" if path.name < "d" else "late"
        rows[name] += [{"text": text[at : at + 3000]} for at in range(0, min(len(text), 15_000), 3000)]
    for name, of_name in rows.items():
        write_jsonl(folder / f"{name}.jsonl", of_name)
    return folder


def loader_of(folder: Path, tokenizer: Path, world_size: int) -> DataLoader[Any, Any]:
    stage = Tokenize(tokenizer, eos=2)
    members = {
        ShardedDataset(folder / f"{name}.jsonl", transform=stage, block_bytes=20_000): weight
        for name, weight in WEIGHTS.items()
    }
    return DataLoader(
        Mixture(members, shares="tokens"),
        GLOBAL_ROWS // world_size,
        shuffle=True,
        seed=4,
        num_workers=0,
        drop_last=True,
        batching=Packed(ROW, "input_ids", window=60),
    )


def rows_of(batch: Mapping[str, Any]) -> list[list[int]]:
    assert isinstance(batch["input_ids"], PackedRows)
    return batch["input_ids"].tokens.tolist()


def epoch_on_rank(folder: Path, tokenizer: Path, cache: str) -> tuple[list[Any], dict[int, Any]]:
    """Rows of each batch of an epoch, and a state at every tenth."""
    os.environ["XDG_CACHE_HOME"] = cache
    batches, states = [], {}
    with loader_of(folder, tokenizer, dist.get_world_size()) as loader:
        for batch in loader:
            batches.append(rows_of(batch))
            if len(batches) % EVERY == 0:
                states[len(batches)] = loader.state_dict()
    return batches, states


def rest_on_rank(folder: Path, tokenizer: Path, cache: str, states: Mapping[int, Any]) -> dict[int, Any]:
    """Rows of each batch that is left after each state; no length is known."""
    rest = {}
    for number, state in states.items():
        os.environ["XDG_CACHE_HOME"] = f"{cache}/{number}"
        with loader_of(folder, tokenizer, dist.get_world_size()) as loader:
            loader.load_state_dict(state)
            rest[number] = [rows_of(batch) for batch in loader]
    return rest


def whole(of_ranks: Any) -> list[list[list[int]]]:
    """Global batches."""
    return [list(chain(*rows)) for rows in zip(*of_ranks, strict=True)]


def test_any_number_of_ranks_delivers_the_same_rows_and_goes_on_from_every_tenth_batch(
    sources: Path, tokenizer: Path, tmp_path: Path
) -> None:
    epochs = {}
    for ranks in (1, 2, 3, 4):
        told = fast_ranks(
            epoch_on_rank, ranks, args=(sources, tokenizer, str(tmp_path / f"{ranks}")), timeout_s=110
        )
        assert all(states == told[0][1] for _, states in told)
        epochs[ranks] = whole(batches for batches, _ in told), told[0][1]
    batches = epochs[1][0]
    assert len(batches) > 4 * EVERY
    assert all(other == batches for other, _ in epochs.values())
    for before, after in ((2, 3), (3, 2)):
        states = epochs[before][1]
        assert len(states) == len(batches) // EVERY
        cache = str(tmp_path / f"{before}-{after}")
        told = fast_ranks(rest_on_rank, after, args=(sources, tokenizer, cache, states), timeout_s=110)
        for number in states:
            assert whole(rest[number] for rest in told) == batches[number:]
