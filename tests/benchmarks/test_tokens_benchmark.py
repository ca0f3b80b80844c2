"""Packed tokens from raw text: each way delivers what the text has, and what is held against the bars."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("psutil")
pytest.importorskip("tokenizers")

from benchmarks.tokens.compare import TokensRun, documents, prepared, run_twice, verdicts
from benchmarks.tokens.loaders import LIMIT, LOADERS, OURS, DatasetsMap, TextData

MINE = TokensRun(loader=OURS, tokens_per_s=300.0, fill=0.995, resume_s=1.0)
THEIRS = replace(MINE, loader="Grain", tokens_per_s=100.0)
NEEDS = {OURS: "tokenizers", "datasets.map": "datasets", "Grain": "grain", "torchtitan": "torchtitan"}
NEEDS[LIMIT] = "tokenizers"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> TextData:
    return prepared(tmp_path_factory.mktemp("tokens") / "data", megabytes=0.3)


@pytest.mark.full  # benchmarks/transforms has a run of ours that is tried
@pytest.mark.parametrize("loader", LOADERS)
def test_each_loader_delivers_the_tokens_and_resumes(data: TextData, loader: str) -> None:
    pytest.importorskip(NEEDS[loader])
    run = run_twice(data, TokensRun(loader=loader), length=256, rows=4, window=None)
    if loader == "torchtitan" and run.reason == "resuming: RuntimeError: nothing was left to deliver":
        return  # it gives up what it has of the last document
    assert run.reason == ""
    cuts = loader == "torchtitan"  # and leaves out what does not fill a row, and each document's last token
    assert (run.lost_tokens == 0) == (not cuts)
    assert min(run.tokens_per_s, run.first_batch_s, run.cpu_s_per_million) > 0
    if loader != LIMIT:
        assert 0.9 < run.fill <= 1
        assert run.resume_s > 0


def test_the_text_is_the_library_s_and_is_made_once(data: TextData) -> None:
    folder = Path(data.folder)
    assert data.texts()[0] == next(documents())
    assert sorted(data.texts()) == sorted(itertools.islice(documents(), data.documents))
    before = (folder / "tokenizer.json").stat().st_mtime_ns
    assert prepared(folder, megabytes=0.3) == data
    assert (folder / "tokenizer.json").stat().st_mtime_ns == before


def test_the_packer_by_hand_fills_rows_and_takes_every_document_once() -> None:
    packer = object.__new__(DatasetsMap)
    packer._length = 10
    lengths = [7, 3, 5, 5, 10, 1, 2, 8, 9, 4]
    rows = packer._best_fit(lengths)
    assert sorted(number for row in rows for number in row) == list(range(len(lengths)))
    assert all(sum(lengths[number] for number in row) <= 10 for row in rows)
    assert len(rows) == 6


def test_bars_compare_with_the_best_peer() -> None:
    says = {bar.workload: bar.says for bar in verdicts([MINE, THEIRS, replace(THEIRS, tokens_per_s=250.0)])}
    assert says["tokens/s"] == "short by 20.0 %"
    limited = verdicts([MINE, THEIRS, replace(THEIRS, loader=LIMIT, tokens_per_s=900.0)])
    assert {bar.says for bar in limited} == {"reached"}
    assert says["fill"] == says["resume"] == says["tokens lost"] == "reached"
    assert verdicts([replace(MINE, reason="no"), THEIRS]) == []
