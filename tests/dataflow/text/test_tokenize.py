"""`Tokenize` gives the ids that the library gives, text by text; what does not fit is an error."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from text_kit import SPECIAL, TEXTS, ids_of, tokenizer, write_jsonl, write_tokenizer

from dataflow import DataLoader, Packed, SampleError, ShardedDataset, Tokenize
from dataflow.text.tokenizer import MissingTextSupportError

__all__ = ["tokenizer"]
END = SPECIAL.index("<|end|>")
START = SPECIAL.index("<|start|>")


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    return write_jsonl(tmp_path / "x.jsonl", [{"id": i, "text": TEXTS[i % len(TEXTS)]} for i in range(20)])


def lists(loader: DataLoader) -> list[list[int]]:
    return [row.tolist() for batch in loader for row in batch["input_ids"].rows()]


@pytest.mark.parametrize("workers", [{"num_workers": 0}, {"num_workers": 2}, {"workers": "thread"}])
def test_a_loader_delivers_the_ids_of_each_text(
    tokenizer: Path, texts: Path, workers: dict[str, Any]
) -> None:
    dataset = ShardedDataset(texts, transform=Tokenize(tokenizer))
    with DataLoader(dataset, 8, **workers) as loader:
        assert lists(loader) == [ids_of(tokenizer, TEXTS[i % len(TEXTS)]) for i in range(20)]
        batch = next(iter(loader))
    assert (batch["input_ids"].values.dtype, batch["input_ids"].offsets.dtype) == (torch.int32, torch.int64)
    assert batch["id"].tolist() == list(range(8))
    assert "text" not in batch


def test_documents_get_marks_and_keep_them_when_they_are_cut(tokenizer: Path) -> None:
    stage = Tokenize(tokenizer, bos=START, eos="<|end|>", max_length=10, into="tokens", dtype="int64")
    for text in TEXTS:
        ids = stage({"text": text, "more": 1})["tokens"]
        assert ids.dtype == torch.int64
        assert ids.tolist() == [START, *ids_of(tokenizer, text)[:8], END]
    assert stage({"text": ""})["tokens"].tolist() == [START, END]
    assert Tokenize(tokenizer)({"text": ""})["input_ids"].shape == (0,)


def test_a_document_that_is_too_long_is_a_bad_sample_if_so_asked(tokenizer: Path, texts: Path) -> None:
    stage = Tokenize(tokenizer, max_length=30, overlong="error")
    with (
        DataLoader(ShardedDataset(texts, transform=stage), 8) as loader,
        pytest.raises(SampleError) as caught,
    ):
        list(loader)
    assert (caught.value.shard, caught.value.key, caught.value.stage) == (str(texts), "5", "transform")
    num_tokens = len(ids_of(tokenizer, TEXTS[5]))
    assert f"{num_tokens} tokens, and max_length=30; overlong='truncate' cuts" in caught.value.reason
    with DataLoader(ShardedDataset(texts, transform=stage, on_error="skip"), 8) as loader:
        kept = [ids_of(tokenizer, TEXTS[i % len(TEXTS)]) for i in range(20)]
        assert lists(loader) == [ids for ids in kept if len(ids) <= 30]


def test_bytes_are_read_as_utf_8_and_others_are_bad_samples_unless_replaced(tokenizer: Path) -> None:
    stage = Tokenize(tokenizer)
    word = torch.tensor(list("größer".encode()), dtype=torch.uint8)
    assert stage({"text": word})["input_ids"].tolist() == ids_of(tokenizer, "größer")
    with pytest.raises(UnicodeDecodeError, match="byte 0xff in position 1"):
        stage({"text": b"a\xffb"})
    replaced = Tokenize(tokenizer, errors="replace")
    assert replaced({"text": b"a\xffb"})["input_ids"].tolist() == ids_of(tokenizer, "a\ufffdb")
    assert replaced({"text": "a\ud800b"})["input_ids"].tolist() == ids_of(tokenizer, "a?b")
    with pytest.raises(TypeError, match="text is str or bytes, got int"):
        stage({"text": 3})


@pytest.mark.parametrize("text", ["\ud800", None, 7])
def test_text_that_is_none_is_named(tokenizer: Path, tmp_path: Path, text: Any) -> None:
    column = {"\ud800": "surrogate", None: "null", 7: "number"}[text]
    value = tmp_path / "x.jsonl"
    write_jsonl(value, [{"id": 0, column: "fine"}, {"id": 1, column: "fine"}])

    def spoilt(sample: dict[str, Any]) -> dict[str, Any]:
        return {**sample, "text": text if sample["id"] else "fine"}

    class Spoilt(Tokenize):
        def batch(self, samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
            return super().batch([spoilt(sample) for sample in samples])

    dataset = ShardedDataset(value, transform=Spoilt(tokenizer))
    with DataLoader(dataset, 2, num_workers=0) as loader, pytest.raises(SampleError) as caught:
        list(loader)
    assert (caught.value.key, caught.value.stage) == ("1", "transform")


def test_a_sample_without_the_column_is_told_what_there_is(tokenizer: Path, texts: Path) -> None:
    dataset = ShardedDataset(texts, transform=Tokenize(tokenizer, column="body"))
    with (
        DataLoader(dataset, 2, num_workers=0) as loader,
        pytest.raises(SampleError, match="KeyError: 'body'; it was given a dict of 'id', 'text'"),
    ):
        list(loader)


def test_a_state_is_refused_with_another_tokenizer(tokenizer: Path, texts: Path, tmp_path: Path) -> None:
    other = write_tokenizer(tmp_path / "other.json", vocabulary=290)
    with DataLoader(ShardedDataset(texts, transform=Tokenize(tokenizer)), 8, num_workers=0) as loader:
        next(iter(loader))
        state = loader.state_dict()
    hashes = [Tokenize(path).file.hash for path in (tokenizer, other)]
    assert hashes[0] in state["fingerprint"]
    with (
        DataLoader(ShardedDataset(texts, transform=Tokenize(other)), 8) as loader,
        pytest.raises(ValueError, match=f"fingerprint {hashes[0]}-.* fingerprint {hashes[1]}-"),
    ):
        loader.load_state_dict(state)
    with (
        DataLoader(ShardedDataset(texts, transform=Tokenize(tokenizer, eos="<|end|>")), 8) as loader,
        pytest.raises(ValueError, match=f"fingerprint {hashes[0]}-.* fingerprint {hashes[0]}-"),
    ):
        loader.load_state_dict(state)


def test_a_file_that_changes_while_a_job_runs_is_an_error(tokenizer: Path, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(tokenizer.read_bytes())
    stage = Tokenize(tmp_path)  # the folder of a model
    copied = pickle.loads(pickle.dumps(stage))
    assert copied({"text": "one"})["input_ids"].tolist() == ids_of(tokenizer, "one")
    late = pickle.loads(pickle.dumps(stage))
    write_tokenizer(path, vocabulary=290)
    with pytest.raises(
        ValueError, match=f"another tokenizer .* than when the transform was made .{stage.file.hash}"
    ):
        late({"text": "one"})
    assert stage({"text": "one"})["input_ids"].tolist() == ids_of(tokenizer, "one")


def test_what_crosses_to_a_process_is_small_and_says_which_file(tokenizer: Path) -> None:
    stage = Tokenize(tokenizer, eos="<|end|>")
    assert len(pickle.dumps(stage)) < 1000
    assert repr(stage) == f"Tokenize(tokenizer.json ({stage.file.hash}), text -> input_ids)"
    assert pickle.loads(pickle.dumps(stage)).fingerprint == stage.fingerprint


def test_without_the_library_the_error_names_the_extra(
    tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(MissingTextSupportError, match=r"pip install 'dataflow-loader\[text\]'"):
        Tokenize(tokenizer)


def test_threads_build_what_the_tokenizer_makes_as_it_needs_no_interpreter_lock(
    tokenizer: Path, texts: Path
) -> None:
    for batching in None, Packed(64, "input_ids"):
        dataset = ShardedDataset(texts, transform=Tokenize(tokenizer))
        with DataLoader(dataset, 2, batching=batching) as loader:
            list(loader)
            assert loader.stats().workers == "thread"
            assert loader.stats().workers_reason.startswith("no function of yours may hold")
