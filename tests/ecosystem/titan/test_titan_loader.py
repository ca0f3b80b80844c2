"""The loader by itself, as torchtitan builds it: rows, labels, ends of epochs, states, refusals."""

from __future__ import annotations

import gc
import json
import warnings
import weakref
from collections.abc import Iterator
from contextlib import closing
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("torchtitan", reason="torchtitan has an environment of its own: see .ci/run")
with warnings.catch_warnings(action="ignore"):  # parts of torch that torchtitan imports are deprecated
    from torchtitan.models.common.attention import get_causal_mask_mod, get_document_mask_mod

from loader_kit import stream_of
from text_kit import PLAIN, TEXTS, chat, write_jsonl, write_tokenizer
from torchtitan.components.tokenizer import HuggingFaceTokenizer

from dataflow import ChatTemplate, DataLoader, Packed, ShardedDataset, ShardWriter, Tokenize
from dataflow.integrations.torchtitan import ShardedDataLoader, ShardSource

LENGTH = 16
IGNORED = -100


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Texts, chats, tokens and a tokenizer."""
    folder = tmp_path_factory.mktemp("titan")
    write_tokenizer(folder / "tokenizer.json")
    special = {"bos_token": "<|start|>", "eos_token": "<|end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(special))
    (folder / "chat_template.jinja").write_text(PLAIN)
    write_jsonl(folder / "texts.jsonl", [{"text": f"{i} {TEXTS[i % 6]}", "n": i} for i in range(41)])
    write_jsonl(folder / "code.jsonl", [{"body": f"def f{i}(x): return x + {i}"} for i in range(30)])
    write_jsonl(folder / "chats.jsonl", [{"messages": chat(i)} for i in range(12)])
    rng = np.random.default_rng(0)
    for name in ("tokens", "megatron"):
        with ShardWriter(f"{folder}/{name}.bin", format=name, dtype="uint16") as shards:
            for length in rng.integers(3, 30, 40).tolist():
                shards.write({"tokens": rng.integers(3, 300, length).tolist()})
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> HuggingFaceTokenizer:
    tokenizer = HuggingFaceTokenizer(tokenizer_path=str(folder))
    tokenizer.tokenizer.no_padding()
    tokenizer.tokenizer.no_truncation()
    return tokenizer


@pytest.fixture
def make(folder: Path, tokenizer: HuggingFaceTokenizer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Build a loader as the trainer does; all are closed at the end."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    monkeypatch.chdir(folder)
    made: list[ShardedDataLoader] = []

    def build(
        rank: int = 0,
        num_ranks: int = 1,
        rows: int = 2,
        length: int = LENGTH,
        saves: int | None = None,
        **settings: Any,
    ) -> Any:
        settings = {"num_workers": 0, "memory_limit": "64MB", **settings}
        loader = ShardedDataLoader.Config(**settings).build(
            dp_world_size=num_ranks,
            dp_rank=rank,
            tokenizer=tokenizer,
            seq_len=length,
            local_batch_size=rows,
            snapshot_every_n_steps=saves,
        )
        made.append(loader)
        return loader

    build.made = made
    yield build
    for loader in made:
        loader.close()


def measured(make: Any, **settings: Any) -> Any:
    """`make`, with the lengths of all documents known: ranks in one process cannot measure them together."""
    with closing(make(dataset_path=settings["dataset_path"], infinite=False)) as loader:
        assert list(loader)
    return make


def tokens_of(batches: Any) -> list[int]:
    """All tokens that are to be predicted, sorted."""
    labels = torch.cat([labels.flatten() for _, labels in batches])
    return sorted(labels[labels != IGNORED].tolist())


def rows_of(batches: Any) -> list[list[int]]:
    return [row for inputs, _ in batches for row in inputs["input"].tolist()]


def test_documents_are_tokenized_as_torchtitan_does(make: Any, tokenizer: HuggingFaceTokenizer) -> None:
    batches = list(make(dataset_path="texts.jsonl", infinite=False, overlong="truncate"))
    positions = torch.cat([inputs["positions"] for inputs, _ in batches])
    rows = torch.cat([inputs["input"] for inputs, _ in batches])
    documents = {
        tuple(tokenizer.encode(json.loads(line)["text"], add_bos=True, add_eos=True)[:LENGTH])
        for line in Path("texts.jsonl").read_text().splitlines()
    }
    found = set()
    for row, places in zip(rows, positions, strict=True):
        found |= {
            tuple(part.tolist()) for part in row.tensor_split((places == 0).nonzero().flatten().tolist())
        }
    assert documents <= found


def test_masks_of_torchtitan_keep_documents_apart(make: Any, folder: Path) -> None:
    (inputs, labels), *_ = make(dataset_path="texts.jsonl", infinite=False, shuffle=False, rows=8)
    transform = Tokenize(folder / "tokenizer.json", bos="<|start|>", eos="<|end|>")
    dataset = ShardedDataset("texts.jsonl", columns=["text"], transform=transform)
    with DataLoader(dataset, 8, batching=Packed(LENGTH, "input_ids", pad=2)) as loader:
        rows = next(iter(loader))["input_ids"]
    assert torch.equal(inputs["input"], rows.tokens)
    assert torch.equal(labels, rows.targets())
    document, causal = get_document_mask_mod(inputs["positions"]), get_causal_mask_mod()
    row, head, query, key = torch.meshgrid(*map(torch.arange, (8, 1, LENGTH, LENGTH)), indexing="ij")
    mask = document(row, head, query, key) & causal(row, head, query, key)
    assert torch.equal(mask, rows.attention_mask())


def test_positions_stay_below_the_length_of_a_row(make: Any) -> None:
    for inputs, labels in make(dataset_path="texts.jsonl", infinite=False):
        assert inputs["positions"].max() < LENGTH
        assert inputs["input"].dtype == inputs["positions"].dtype == labels.dtype == torch.int64
        assert inputs["input"].shape == inputs["positions"].shape == labels.shape == (2, LENGTH)
        assert all(one.is_contiguous() for one in (*inputs.values(), labels))


def test_flat_token_files_give_windows_with_all_their_labels(make: Any) -> None:
    flat = np.fromfile("tokens.bin", np.uint16).astype(np.int64)
    source = ShardSource(path="tokens.bin", kind="tokens", format="tokens")
    batches = list(make(sources=[source], infinite=False, shuffle=False))
    end = (len(flat) - 1) // LENGTH * LENGTH
    inputs = torch.cat([inputs["input"] for inputs, _ in batches]).flatten()
    labels = torch.cat([labels for _, labels in batches]).flatten()
    assert inputs[:end].tolist() == flat[:end].tolist()
    assert labels[:end].tolist() == flat[1 : end + 1].tolist()
    assert torch.equal(batches[0][0]["positions"], torch.arange(LENGTH).expand(2, LENGTH))


def test_documents_of_token_shards_are_packed_with_others_by_tokens(make: Any) -> None:
    with ShardWriter("other-%d.bin", format="megatron", dtype="uint16", overwrite=True) as shards:
        for i in range(200):
            shards.write({"tokens": [1000 + i] * (1 + i % 9)})
    paths = {"megatron.bin": 1, "other-*.bin": 3}
    options: dict[str, Any] = {"kind": "tokens", "format": "megatron"}
    sources = [ShardSource(path=path, weight=weight, **options) for path, weight in paths.items()]
    loader = make(sources=sources, stop="all", window=64)
    rows = torch.tensor(rows_of(islice(loader, 40)))
    share = (rows >= 1000).sum() / (rows > 0).sum()
    assert share == pytest.approx(0.75, abs=0.05)


def test_two_sources_of_texts_may_name_their_columns_differently(make: Any) -> None:
    sources = [
        ShardSource(path="texts.jsonl", weight=0.5),
        ShardSource(path="code.jsonl", column="body", weight=0.5),
    ]
    assert len(rows_of(islice(make(sources=sources), 10))) == 20


def test_labels_of_chats_are_what_the_assistant_says(make: Any, folder: Path) -> None:
    source = ShardSource(path="chats.jsonl", kind="chat")
    labels = tokens_of(make(sources=[source], infinite=False, length=400))
    stage = ChatTemplate(folder / "tokenizer.json", template=folder / "chat_template.jinja")
    said: list[int] = []
    for sample in ShardedDataset("chats.jsonl", transform=stage):
        said += sample["input_ids"][sample["loss_mask"].bool()].tolist()
    assert labels == sorted(said)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5])
def test_a_finite_epoch_has_equal_steps_on_all_ranks_and_each_token_once(make: Any, num_ranks: int) -> None:
    settings: dict[str, Any] = {"dataset_path": "texts.jsonl", "infinite": False, "rows": 2}
    whole = tokens_of(measured(make, **settings)(**settings))
    parts = [list(make(rank, num_ranks, **settings)) for rank in range(num_ranks)]
    assert len({len(part) for part in parts}) == 1
    assert all(len(inputs["input"]) == 2 for part in parts for inputs, _ in part)
    assert tokens_of(chain(*parts)) == whole


def steps_of(
    make: Any, num_ranks: int, count: int, state: Any = None, **settings: Any
) -> tuple[list[Any], Any]:
    """The rows of each optimizer step over all ranks, sorted, and each rank's state behind them."""
    micro, ends, parts = 8 // (2 * num_ranks), [], []
    for rank in range(num_ranks):
        loader = make(rank, num_ranks, 2, global_batch_size=8, **settings)
        loader.load_state_dict(state or {})
        parts.append([rows_of([batch]) for batch in islice(loader, count * micro)])
        ends.append(loader.state_dict())
    assert all(end == ends[0] for end in ends)
    steps = [
        sorted(chain(*(chain(*part[at : at + micro]) for part in parts)))
        for at in range(0, len(parts[0]), micro)
    ]
    return steps, ends[0]


@pytest.mark.parametrize("tail", ["drop", "pad"])
def test_steps_are_the_same_at_any_number_of_ranks_also_over_epochs(make: Any, tail: str) -> None:
    settings = {"dataset_path": "texts.jsonl", "tail": tail, "seed": 3}
    whole, _ = steps_of(measured(make, **settings), 2, 24, **settings)
    done, state = [], None
    for num_ranks in (4, 1, 2):
        steps, state = steps_of(make, num_ranks, 8, state, **settings)
        done += steps
    assert done == whole


def test_a_state_at_the_end_of_an_epoch_goes_on_with_the_next_in_silence(make: Any) -> None:
    settings = {"dataset_path": "texts.jsonl", "infinite": False, "num_epochs": 2}
    whole = rows_of(make(**settings))
    loader = make(**settings)
    first = rows_of(islice(loader, len(whole) // 4))
    assert loader.state_dict()["epoch"] == 0
    resumed = make(**settings)
    resumed.load_state_dict(loader.state_dict())
    with warnings.catch_warnings(action="error"):
        assert first + rows_of(resumed) == whole


def test_a_finished_loader_has_nothing_more(make: Any) -> None:
    loader = make(dataset_path="texts.jsonl", infinite=False)
    assert rows_of(loader)
    assert rows_of(loader) == []
    resumed = make(dataset_path="texts.jsonl", infinite=False)
    resumed.load_state_dict(loader.state_dict())
    assert rows_of(resumed) == []


@pytest.mark.parametrize("steps", [None, 2])
def test_a_loader_ends_with_its_validation_though_torchtitan_collects_no_garbage(
    make: Any, steps: int | None
) -> None:
    gc.disable()
    try:
        loader = make(dataset_path="texts.jsonl", infinite=steps is not None)
        stream = weakref.ref(stream_of(loader.loader))
        assert rows_of(islice(loader, steps))
        make.made.clear()
        del loader
        assert stream() is None
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "names no shards"),
        ({"dataset": "c4"}, "names a dataset of torchtitan"),
        ({"dataset_path": "a", "sources": [ShardSource(path="b")]}, "leave one"),
        ({"sources": [ShardSource()]}, "names no shards"),
        ({"sources": [ShardSource(path="a"), ShardSource(path="b", kind="tokens")]}, "text and tokens"),
        ({"dataset_path": "texts.jsonl", "global_batch_size": 3}, "multiple of the 2 rows"),
        ({"dataset_path": "texts.jsonl", "global_batch_size": 8, "saves": 6}, "saves every 6 microbatches"),
    ],
)
def test_settings_that_do_not_fit_are_refused(make: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(**settings)


def test_an_epoch_without_a_step_is_an_error_and_not_an_endless_loop(make: Any) -> None:
    loader = make(dataset_path="texts.jsonl", rows=500)
    with pytest.raises(ValueError, match="not enough rows for one optimizer step"):
        next(iter(loader))


def test_a_state_inside_a_step_is_refused(make: Any) -> None:
    loader = make(dataset_path="texts.jsonl", global_batch_size=8)
    next(iter(loader))
    with pytest.raises(ValueError, match="3 of 4 microbatches of a step left"):
        loader.state_dict()


def test_the_state_of_another_loader_is_refused(make: Any) -> None:
    with pytest.raises(ValueError, match="not a state of a DataLoader"):
        make(dataset_path="texts.jsonl").load_state_dict({"dp_rank_0": b"", "world_size": 1})


def test_a_tokenizer_without_its_file_is_named(
    make: Any, tokenizer: HuggingFaceTokenizer, monkeypatch: Any
) -> None:
    monkeypatch.setattr(tokenizer, "tokenizer_path", "nowhere")
    with pytest.raises(ValueError, match="nowhere has none"):
        make(dataset_path="texts.jsonl")
