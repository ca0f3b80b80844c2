"""`model_inputs`: packed samples give the logits and gradients of each sample alone, for every family."""

from __future__ import annotations

import json
import warnings
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from dataflow import DataLoader, Packed, Ragged, ShardedDataset

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("accelerate")
    pytest.importorskip("transformers")
    from vision_models_kit import IMAGE, VIDEO, alone, flash_stand_in, linear_stand_in, make_chat, make_model

    from dataflow.integrations import vision_inputs
    from dataflow.integrations.transformers import model_inputs
    from dataflow.integrations.vision_inputs import FAMILIES
    from dataflow.vision.positions import image_positions

pytestmark = pytest.mark.filterwarnings("ignore")

CHATS = 5
QWEN = ["qwen2_5_vl", "qwen3_vl", "qwen3_5"]


class Chats:
    """A transform: the chat of a number, as a processor would make it."""

    def __init__(self, family: str) -> None:
        self.fingerprint, self._family, self._model = f"chats-{family}", family, make_model(family)

    def __call__(self, sample: dict[str, Any]) -> dict[str, Tensor]:
        return make_chat(self._family, self._model, int(sample["n"]))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chats")
    (folder / "chats.jsonl").write_text("".join(json.dumps({"n": n}) + "\n" for n in range(CHATS)))
    return folder


@pytest.fixture
def batch_of(folder: Path) -> Any:
    def make(family: str, **given: Any) -> dict[str, Any]:
        return _batch(folder, family, **given)

    return make


@cache
def _batch(folder: Path, family: str) -> dict[str, Any]:
    """Two rows of a loader, with all chats, in an order of its own."""
    data = ShardedDataset(str(folder / "chats.jsonl"), transform=Chats(family))
    batching = Packed(420, columns=["input_ids", "loss_mask"], overlong="error")
    with DataLoader(
        data, 2, shuffle=True, seed=2, batching=batching, num_workers=1, workers="thread"
    ) as loader:
        batch = next(iter(loader))
    assert len(batch["input_ids"].segments.length) == CHATS
    return batch


def chats_of(batch: dict[str, Any]) -> list[dict[str, Tensor]]:
    """The samples of a batch, in its order."""
    segments = batch["input_ids"].segments
    out = []
    vision = [name for name in batch if name in vision_inputs._PICTURES]
    places = map(Tensor.tolist, (segments.row, segments.start, segments.length))
    for i, (row, start, length) in enumerate(zip(*places, strict=True)):
        inside = (row, slice(start, start + length))
        own = {"input_ids": batch["input_ids"].tokens[inside], "loss_mask": batch["loss_mask"][inside]}
        out.append(own | {name: batch[name][i] for name in vision})
    return out


def gradients(model: Any) -> dict[str, Tensor]:
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def cosine(one: dict[str, Tensor], other: dict[str, Tensor], part: str) -> float:
    names = sorted(name for name in one if part in name)
    assert names
    flat = [torch.cat([each[name].flatten() for name in names]).double() for each in (one, other)]
    return float(torch.nn.functional.cosine_similarity(*flat, 0))


CASES = [(family, how) for family in FAMILIES for how in ("sdpa", "eager", "flash")]
FAST = {*((family, "sdpa") for family in FAMILIES), ("gemma3", "eager"), ("llava", "flash")}


@pytest.mark.parametrize(
    ("family", "attention"),
    [
        pytest.param(*case, marks=[] if case in FAST else pytest.mark.full)
        for case in CASES
        if case != ("gemma3", "flash")
    ],
)
def test_packed_samples_give_the_logits_and_gradients_of_each_alone(
    batch_of: Any, family: str, attention: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = batch_of(family)
    model = make_model(family, "sdpa" if attention == "flash" else attention)
    if family == "qwen3_5":
        linear_stand_in(monkeypatch)
    if attention == "flash":
        flash_stand_in(monkeypatch, model)
    logits, total, count = [], 0.0, 0
    for chat in chats_of(batch):
        arguments = alone(family, chat)
        learned = int((arguments["labels"][0, 1:] != -100).sum())
        out = model(**arguments)
        (out.loss * learned).backward()
        logits.append(out.logits[0].detach())
        total, count = total + float(out.loss) * learned, count + learned
    expected = {name: value / count for name, value in gradients(model).items()}
    out = model(**model_inputs(batch, model))
    out.loss.backward()
    found = gradients(model)
    assert float((out.logits[0] - torch.cat(logits)).abs().max()) < 1e-5
    assert float(out.loss) == pytest.approx(total / count, abs=2e-6)
    assert found.keys() == expected.keys()
    for part in ("", "vision" if any("vision" in name for name in expected) else "visual", "language_model"):
        part = "text_model" if part == "language_model" and family in ("idefics3", "smolvlm") else part
        assert cosine(found, expected, part) >= 1 - 1e-6


@pytest.mark.parametrize("family", QWEN)
def test_positions_are_those_of_the_model(family: str) -> None:
    model = make_model(family)
    merge = model.config.vision_config.spatial_merge_size
    chats = [make_chat(family, model, number) for number in range(40)]
    expected = []
    for chat in chats:
        ids, grids = chat["input_ids"][None], chat["image_grid_thw"]
        kinds = (ids == IMAGE).int()
        own = model.model.get_rope_index(ids, mm_token_type_ids=kinds, image_grid_thw=grids)[0]
        expected.append(own[:, 0])
    tokens = torch.cat([chat["input_ids"] for chat in chats])
    lengths = torch.tensor([len(chat["input_ids"]) for chat in chats])
    grids = torch.cat([chat["image_grid_thw"] for chat in chats])
    assert torch.equal(image_positions(tokens == IMAGE, lengths, grids, merge), torch.cat(expected, 1))


def test_positions_of_nothing_are_none() -> None:
    none = torch.zeros(0, dtype=torch.int64)
    assert image_positions(none.bool(), none, torch.zeros(0, 3, dtype=torch.int64), 2).shape == (3, 0)


def test_ragged_columns_give_the_same_arguments(batch_of: Any) -> None:
    batch, config = batch_of("qwen3_vl"), make_model("qwen3_vl").config
    names = ("pixel_values", "image_grid_thw")
    ragged = batch | {name: Ragged.of_rows(batch[name]) for name in names}
    expected, found = model_inputs(batch, config), model_inputs(ragged, config)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found if name != "use_cache")


def test_tiles_of_all_pictures_of_a_sample_in_one_column_give_the_same_arguments(batch_of: Any) -> None:
    batch, config = batch_of("llava_onevision"), make_model("llava_onevision").config
    flat = [part.flatten(0, 1) if len(part) else part[:, 0] for part in batch["pixel_values"]]
    assert {part.dim() for part in flat} == {4}
    expected = model_inputs(batch, config)
    for column in (flat, Ragged.of_rows(flat)):
        found = model_inputs({**batch, "pixel_values": column}, config)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in found if name != "use_cache")


@pytest.mark.parametrize("left_out", ["seq_idx", "image_positions"])
def test_a_missing_argument_shows(batch_of: Any, left_out: str, monkeypatch: pytest.MonkeyPatch) -> None:
    linear_stand_in(monkeypatch)
    model = make_model("qwen3_5")
    arguments = model_inputs(batch_of("qwen3_5"), model)
    wrong = {name: value for name, value in arguments.items() if name != left_out}
    if left_out == "image_positions":
        wrong["position_ids"] = arguments["position_ids"][0]
    with torch.no_grad():
        assert float((model(**arguments).logits - model(**wrong).logits).abs().max()) > 1e-3


def test_only_linear_attention_is_told_of_segments(batch_of: Any) -> None:
    for family, is_told in (("qwen3_5", True), ("qwen3_vl", False)):
        arguments = model_inputs(batch_of(family), make_model(family))
        assert [name in arguments for name in ("seq_idx", "cu_seq_lens_q")] == [is_told, is_told]
        assert arguments["position_ids"].shape == (4, 1, arguments["input_ids"].shape[1])
        assert "attention_mask" not in arguments


def test_a_batch_without_pictures_has_no_pixels(batch_of: Any) -> None:
    batch = {name: batch_of("qwen3_vl")[name] for name in ("input_ids", "loss_mask")}
    tokens = batch["input_ids"].tokens
    batch["input_ids"] = batch["input_ids"]._replace(tokens=tokens.masked_fill(tokens == IMAGE, 9))
    arguments = model_inputs(batch, make_model("qwen3_vl"))
    assert "pixel_values" not in arguments
    assert torch.equal(arguments["position_ids"][0], arguments["position_ids"][3])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attention_mask": 1}, "a mask keeps transformers from seeing where samples begin"),
        ({"video_grid_thw": []}, "videos were not tried"),
        ({"image_sizes": []}, "which qwen3_vl does not take"),
        ({"pixel_values": [torch.zeros(1, 1)]}, "1 entries for 5 segments"),
        ({"pixel_values": [torch.zeros(4, 1, dtype=torch.uint8)] * 5}, "whole numbers"),
        ({"pixel_values": [torch.zeros(0, 1)] * 5}, "patches, and image_grid_thw says"),
        (
            {"image_grid_thw": [torch.zeros(0, 3, dtype=torch.int64)] * 5},
            "tokens of pictures, and their sizes",
        ),
        ({"input_ids": 3}, "no packed rows"),
    ],
)
def test_a_batch_that_is_wrong_is_refused(batch_of: Any, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        model_inputs(batch_of("qwen3_vl") | change, make_model("qwen3_vl"))


def test_videos_and_split_samples_are_refused(batch_of: Any) -> None:
    batch, config = batch_of("qwen3_vl"), make_model("qwen3_vl").config
    rows = batch["input_ids"]
    split = rows.segments._replace(begin=rows.segments.begin + 1)
    with pytest.raises(ValueError, match="overlong='error'"):
        model_inputs(batch | {"input_ids": rows._replace(segments=split)}, config)
    video = rows.tokens.masked_fill(rows.tokens == 9, VIDEO)
    video[0, 0] = VIDEO
    with pytest.raises(ValueError, match="tokens of videos"):
        model_inputs(batch | {"input_ids": rows._replace(tokens=video)}, config)


def test_what_was_not_tried_is_refused_by_name_with_what_to_pass(
    batch_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = batch_of("llava")
    with pytest.raises(ValueError, match=r"not tried with glm4v, but with qwen2_5_vl.*use_cache=False"):
        model_inputs(batch, SimpleNamespace(model_type="glm4v"))
    pixtral = make_model("llava").config
    pixtral.vision_config.model_type = "pixtral"
    with pytest.raises(ValueError, match="whose vision_config is 'pixtral'"):
        model_inputs(batch, pixtral)
    with pytest.raises(ValueError, match="attn_implementation='flex_attention'"):
        model_inputs(batch, make_model("llava", "flex_attention"))
    gemma = flash_stand_in(monkeypatch, make_model("gemma3"))
    with pytest.raises(ValueError, match="use 'sdpa' or 'eager'"):
        model_inputs(batch_of("gemma3"), gemma)
    monkeypatch.setattr(vision_inputs, "TRIED", ("4.0", "4.1"))
    with pytest.raises(ValueError, match=r"tried with transformers 4.1 alone.*By hand"):
        model_inputs(batch, make_model("llava"))


def test_flattened_refuses_a_model_whose_positions_have_three_dimensions(batch_of: Any) -> None:
    rows = batch_of("qwen3_vl")["input_ids"]
    model = make_model("qwen3_vl")
    for wrapped in (model, torch.nn.DataParallel(model)):
        with pytest.raises(ValueError, match=r"use dataflow\.integrations\.transformers\.model_inputs"):
            rows.flattened(model=wrapped)
    assert rows.flattened(model=make_model("llava")).keys() == rows.flattened().keys()
