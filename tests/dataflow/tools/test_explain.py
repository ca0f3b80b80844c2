"""`dataflow explain`: which state of a file it takes, the table it prints, the page it writes."""

from __future__ import annotations

import base64
import html
import json
import re
import sys
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from datasets_kit import write_tar
from programs_kit import run_command
from text_kit import chat, text_in, tokenizer as tokenizer, write_jsonl

from dataflow import ChatTemplate, DataLoader, Mixture, Packed, ShardedDataset, ShardWriter
from dataflow.explain.batch import mark_of
from dataflow.state_checksum import checked_fields, with_checksum
from dataflow.tools.explain.page import POLICY
from dataflow.tools.explain.saved import state_in
from dataflow.tools.explain.values import png_of

HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>\x1b[31m"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards, and checkpoints of a training on them."""
    folder = tmp_path_factory.mktemp("trained")
    for shard in range(2):
        members = [
            (f"k{n:02d}.{name}", data)
            for n in range(10 * shard, 10 * shard + 10)
            for name, data in (("txt", HOSTILE.encode()), ("cls", b"%d" % n), ("png", png_of(pixels(n))))
        ]
        write_tar(folder / f"{shard}.tar", members)
    with loader_over(folder) as loader:
        for _ in range(2):
            for _ in loader:
                pass
        state = loader.state_dict()
    (folder / "state.json").write_text(json.dumps(state))
    torch.save({"model": {"w": torch.zeros(2)}, "loaders": [{"train": state}]}, folder / "whole.pt")
    torch.save({"train": state, "validation": {"loader": state}}, folder / "two.pt")
    old = with_checksum({k: v for k, v in checked_fields(state).items() if k != "history"})
    (folder / "old.json").write_text(json.dumps({"loader": old}))
    return folder


def pixels(n: int) -> Any:
    return np.full((8, 6, 3), 12 * n, np.uint8)


def loader_over(folder: Path) -> DataLoader:
    return DataLoader(ShardedDataset(f"{folder}/*.tar"), 4, shuffle=True, seed=2, num_workers=0)


def test_a_table_of_a_step_is_printed(folder: Path) -> None:
    code, text = run_command("explain", f"{folder}/*.tar", "--state", f"{folder}/state.json", "--step", "6")
    assert code == 0, text
    assert "step 6: epoch 1, from position 4; batch of 4 on 1 rank" in text
    assert len(re.findall(r"\bk\d\d +[01]\.tar\b", text)) == 4
    code, text = run_command(
        *("explain", f"{folder}/0.tar", f"{folder}/1.tar", "--state", f"{folder}/whole.pt", "--step", "6"),
        *("--around", "20", "--json", "-", "--no-keys"),
    )
    told = json.loads(text)
    assert [place["step"] for place in told["steps"]] == [*range(10)]
    assert len(told["rows"]) == 40
    assert {row["key"] for row in told["rows"]} == {None}


def test_an_optimizer_step_is_told_by_its_microbatches(folder: Path, tmp_path: Path) -> None:
    """Ten steps of two epochs: of three each, and two that are left."""
    given = ("explain", f"{folder}/*.tar", "--state", f"{folder}/state.json", "--accumulate", "3")
    page = ("--html", f"{tmp_path}/page.html")
    code, text = run_command(*given, "--step", "2", *page)
    assert code == 0, text
    assert "step 2, microbatch 0: epoch 1, from position 0; batch of 4 on 1 rank" in text
    assert "step 2, microbatch 2: epoch 1, from position 8" in text
    assert "<h2>Step 2, microbatch 1</h2>" in (tmp_path / "page.html").read_text()
    code, text = run_command(*given, "--around", "1", "--json", "-")
    told = json.loads(text)
    assert [(place["step"], place["microbatch"]) for place in told["steps"]] == [
        *[(2, 0), (2, 1), (2, 2)],
        *[(3, 0), (3, 1)],
    ]
    assert [row["microbatch"] for row in told["rows"]] == [n for n in (0, 1, 2, 0, 1) for _ in range(4)]
    assert "the last one of an epoch has the batches that are left" in told["notes"][0]
    code, text = run_command(*given, "--step", "4")
    assert (code, "steps 0 to 3 are complete" in " ".join(text.split())) == (1, True)


def test_the_last_step_is_told_unless_one_is_named(folder: Path) -> None:
    code, text = run_command("explain", f"{folder}/*.tar", "--state", f"{folder}/state.json", "--rows", "1")
    assert code == 0, text
    assert "step 9: epoch 1, from position 16" in text
    assert "3 more samples: --rows prints more" in text


def test_a_state_is_found_in_what_was_saved(folder: Path) -> None:
    state = json.loads((folder / "state.json").read_text())
    assert state_in(f"{folder}/whole.pt") == state
    assert state_in(f"{folder}/whole.pt:loaders.0.train") == state
    with pytest.raises(
        ValueError, match=r"states of 2 loaders: name one of .*two\.pt:train, .*:validation\.l"
    ):
        state_in(f"{folder}/two.pt")
    with pytest.raises(ValueError, match=r"has no '3' of 'loaders\.3'"):
        state_in(f"{folder}/whole.pt:loaders.3")
    with pytest.raises(ValueError, match="no state of a loader over shards"):
        state_in(f"{folder}/whole.pt:model")
    with pytest.raises(FileNotFoundError, match="there is no file"):
        state_in(f"{folder}/none.pt")
    with pytest.raises(ValueError, match=r"is no JSON, and torch\.load\(weights_only=True\) fails"):
        state_in(f"{folder}/0.tar")
    with pytest.raises(ValueError, match="dcp_to_torch_save"):
        state_in(str(folder))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--step", "99"), "step 99 is not known: of 10 steps, steps 0 to 9 are"),
        (("--step", "1", "--rank", "2"), "rank must be in [0, 1) in step 1, got 2"),
        (("--step", "1", "--epoch", "0"), "not both"),
        (("--epoch", "0"), "say which steps; or all of"),
    ],
)
def test_what_cannot_be_told_is_one_line(folder: Path, options: tuple[str, ...], words: str) -> None:
    code, text = run_command("explain", f"{folder}/*.tar", "--state", f"{folder}/state.json", *options)
    assert code == 1
    assert words in " ".join(text.split())
    assert "Traceback" not in text


def test_an_older_state_answers_for_a_position(folder: Path) -> None:
    old = ("explain", f"{folder}/*.tar", "--state", f"{folder}/old.json")
    code, text = run_command(*old, "--step", "6")
    assert (code, "before states told" in text) == (1, True)
    code, text = run_command(*old, "--epoch", "1", "--position", "4", "--global-batch", "4", "--json", "-")
    new = run_command(
        *("explain", f"{folder}/*.tar", "--state", f"{folder}/state.json", "--step", "6", "--json", "-")
    )
    for mine, other in zip(json.loads(text)["rows"], json.loads(new[1])["rows"], strict=True):
        assert {**mine, "step": 6} == other


def test_a_function_makes_the_loader(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with ShardWriter(f"{tmp_path}/a.jsonl") as shards:
        for n in range(30):
            shards.write({"n": n, "tokens": [n] * (n % 7)})

    def mixed() -> DataLoader:
        parts = [ShardedDataset(f"{tmp_path}/a.jsonl").subset(slice(at, None, 2)) for at in (0, 1)]
        batching = Packed(8, "tokens", window=8, whole=["n"])
        return DataLoader(Mixture({parts[0]: 2, parts[1]: 1}), 2, batching=batching, num_workers=0)

    monkeypatch.setattr(sys.modules[__name__], "mixed", mixed, raising=False)
    with mixed() as loader:
        batch = next(iter(loader))
        (tmp_path / "state.json").write_text(json.dumps(loader.state_dict()))
    page = tmp_path / "page.html"
    given = (f"{__name__}:mixed", "--state", f"{tmp_path}/state.json", "--html", str(page))
    code, text = run_command("explain", *given)
    assert code == 0, text
    assert "source 0: " in text
    tokens = " ".join(str(token) for token in batch["tokens"].tokens[0].tolist() if token)
    assert re.sub(r"<[^>]*>", "", page.read_text()).count(tokens[:12]) > 0


def test_a_page_shows_pictures_and_text_and_runs_nothing(folder: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    given = ("--state", f"{folder}/state.json", "--step", "3", "--html", str(page))
    code, text = run_command("explain", f"{folder}/*.tar", *given)
    assert code == 0, text
    made = page.read_text()
    assert f'content="{POLICY.replace(chr(39), "&#x27;")}"' in made
    assert "script" not in re.findall(r"<(\w+)", made)
    assert "onerror" not in re.sub(r">[^<]*<", "><", made)
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in made
    assert "\x1b" not in made
    with loader_over(folder) as loader:
        batch = [*loader][3]
    shown = [base64.b64decode(data) for data in re.findall(r"data:image/png;base64,([\w+/=]+)", made)]
    for data, values in zip(shown, batch["png"], strict=True):
        picture = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR)
        assert np.array_equal(picture, values.permute(1, 2, 0).numpy() if len(values) == 3 else values)


def test_tokens_are_told_as_text_with_pieces_and_what_is_trained(
    tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_jsonl(tmp_path / "chats.jsonl", [{"messages": chat(n)} for n in range(12)])
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"

    def chats() -> DataLoader:
        dataset = ShardedDataset(
            f"{tmp_path}/chats.jsonl", transform=ChatTemplate(tokenizer, template=template)
        )
        return DataLoader(dataset, 2, num_workers=0)

    monkeypatch.setattr(sys.modules[__name__], "chats", chats, raising=False)
    with chats() as loader:
        ids, mask = (next(iter(loader))[name] for name in ("input_ids", "loss_mask"))
        (tmp_path / "state.json").write_text(json.dumps(loader.state_dict()))
    given = (f"{__name__}:chats", "--state", f"{tmp_path}/state.json", "--html", f"{tmp_path}/page.html")
    code, text = run_command("explain", *given)
    assert code == 0, text
    made = (tmp_path / "page.html").read_text()
    (first, *_), (own, *_) = ids.rows(), mask.rows()
    said = text_in(
        tokenizer, [i for i, is_trained in zip(first.tolist(), own.tolist(), strict=True) if is_trained]
    )
    shown = html.unescape(
        re.sub(r"<[^>]*>", "", " ".join(re.findall(r'<span class="p1">.*?</span>', made, re.DOTALL)))
    )
    assert said.split()[0] in shown
    assert f"{own.float().mean():.0%} trained" in made
    assert '<span class="p1 m">' in made


def added(sample: dict[str, Any]) -> dict[str, Any]:
    return {**sample, "cls": sample["cls"] + 1}


def test_a_page_without_the_transform_of_the_run_says_so(folder: Path, tmp_path: Path) -> None:
    dataset = ShardedDataset(f"{folder}/*.tar", transform=added)
    with DataLoader(dataset, 4, num_workers=0) as loader:
        next(iter(loader))
        (tmp_path / "state.json").write_text(json.dumps(loader.state_dict()))
    given = ("explain", f"{folder}/*.tar", "--state", f"{tmp_path}/state.json")
    said = f"taken with transform= {mark_of(added)} (name, and hash of its source), and here it is none"
    assert said not in " ".join(run_command(*given)[1].split())
    code, text = run_command(*given, "--html", f"{tmp_path}/page.html")
    assert (code, said in " ".join(text.split())) == (0, True)
    assert f"<p class=odd>the state was {said}" in (tmp_path / "page.html").read_text()


def test_a_picture_is_written_as_it_is() -> None:
    noise = np.random.default_rng(0).integers(0, 256, (9, 5, 3), np.uint8)
    read = cv2.imdecode(np.frombuffer(png_of(noise), np.uint8), cv2.IMREAD_COLOR)
    assert np.array_equal(read[:, :, ::-1], noise)
