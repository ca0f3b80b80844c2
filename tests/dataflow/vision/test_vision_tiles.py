"""`VisionChat` of families that see tiles: lengths, levels, turns left out, settings that are refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from vision_kit import OTHERS, SPECIAL, image_bytes, template_of_family, vision_chat, write_vision_tokenizer

from dataflow import VisionChat
from dataflow.vision.families import family_of
from dataflow.vision.tiles import TILE_FAMILIES

HAS_LANCZOS = "lanczos" in str(torch.nn.functional.interpolate.__doc__)
SIDE = 28
SQUARE = {"height": SIDE, "width": SIDE}
POINTS = [[SIDE * high, SIDE * wide] for high in (1, 2) for wide in (1, 2, 3)]
IDEFICS = {"size": {"longest_edge": 3 * SIDE}, "max_image_size": {"longest_edge": SIDE}}
IMAGE: dict[str, dict[str, Any]] = {
    "llava": {"size": {"shortest_edge": SIDE}, "crop_size": SQUARE},
    "llava_onevision": {"size": SQUARE, "image_grid_pinpoints": POINTS},
    "idefics3": IDEFICS,
    "smolvlm": {**IDEFICS, "image_processor_type": "SmolVLMImageProcessor"},
    "gemma3": {"size": SQUARE},
}
OWN: dict[str, dict[str, Any]] = {
    "llava": {
        "patch_size": 14,
        "num_additional_image_tokens": 1,
        "vision_feature_select_strategy": "default",
    },
    "llava_onevision": {"num_image_tokens": 4, "vision_feature_select_strategy": "full"},
    "idefics3": {"image_seq_len": 4},
    "smolvlm": {"image_seq_len": 4},
    "gemma3": {"image_seq_length": 4},
}


@pytest.fixture(params=TILE_FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    if not _is_made_here(request.param):
        pytest.skip("this torch has no Lanczos filter")
    return str(request.param)


def _is_made_here(family: str) -> bool:
    return HAS_LANCZOS or TILE_FAMILIES[family].mode != "lanczos"


@pytest.fixture
def folder(family: str, tmp_path: Path) -> Path:
    """A model's folder, of small pictures."""
    write_vision_tokenizer(tmp_path / "tokenizer.json", [*SPECIAL, *OTHERS])
    (tmp_path / "processor_config.json").write_text(
        json.dumps({**OWN[family], "image_processor": IMAGE[family]})
    )
    (tmp_path / "chat_template.jinja").write_text(template_of_family(family))
    return tmp_path


def test_what_is_measured_from_headers_is_what_is_made(folder: Path, family: str) -> None:
    chats = VisionChat(folder, family=family)
    exact = VisionChat(folder, family=family, patches="float32")
    for seed in range(8):
        sample = vision_chat(seed)
        made = chats(sample)
        assert chats.measure(sample) == {name: len(made[name]) for name in chats.lists}
        assert made["pixel_values"].dtype == torch.uint8
        assert made["pixel_values"].shape[1:] == (3, SIDE, SIDE)
        assert torch.equal(chats.normalized(made["pixel_values"]), exact(sample)["pixel_values"])


def test_a_picture_of_one_tile_is_seen_as_a_whole_alone() -> None:
    idefics = replace(TILE_FAMILIES["idefics3"], side=SIDE, longest=SIDE)
    [plan] = idefics.planned([(60, 90)])
    assert (plan.rows, "<row_" in plan.text) == (1, False)
    [plan] = replace(idefics, longest=2 * SIDE).planned([(60, 90)])
    assert (plan.rows, plan.text.count("<row_")) == (5, 4)


def test_turns_that_have_no_room_are_left_out_with_their_pictures(folder: Path, family: str) -> None:
    """OneVision's picture is tiled once it is the only one that is left."""
    parts = [{"type": "image"}, {"type": "text", "text": "what?"}]
    turn = [{"role": "user", "content": parts}, {"role": "assistant", "content": "a tree"}]
    picture = image_bytes(60, 90)
    alone = VisionChat(folder, family=family)({"messages": turn, "images": [picture]})
    both = {"messages": [*turn, *turn], "images": [picture] * 2}
    longer = len(VisionChat(folder, family=family)(both)["input_ids"])
    room = max(len(alone["input_ids"]), longer - 1)
    if room >= longer:
        pytest.skip("two pictures are shorter than one")
    chats = VisionChat(folder, family=family, max_length=room)
    with pytest.warns(UserWarning, match="the last 2 messages of a chat are left out"):
        made = chats(both)
    assert made["messages_left_out"] == 2
    assert all(torch.equal(made[name], alone[name]) for name in chats.lists)
    assert chats.measure(both) == {name: len(made[name]) for name in chats.lists}


def test_a_literal_token_of_pictures_in_text_is_bad(folder: Path, family: str) -> None:
    chats = VisionChat(folder, family=family)
    for token in (chats.family.image_token, chats.family.run_token):
        with pytest.raises(ValueError, match=f"the text of message 0 has the token {token}"):
            chats.measure({"messages": [{"role": "user", "content": f"a {token}"}], "images": []})


def test_settings_that_no_code_is_for_are_refused(folder: Path, family: str) -> None:
    with pytest.raises(ValueError, match="max_pixels= are of Qwen's families"):
        VisionChat(folder, family=family, max_pixels=10_000)
    wrong = {
        "llava": ({"do_center_crop": False}, "do_center_crop=False; only True"),
        "llava_onevision": ({"size": {"height": 28, "width": 56}}, "is no square"),
        "idefics3": ({"do_image_splitting": False}, "do_image_splitting=False; only True"),
        "smolvlm": ({"size": {"longest_edge": 5000}}, "a longest_edge of at most 4096"),
        "gemma3": ({"do_pan_and_scan": True}, "do_pan_and_scan=True; only False"),
    }
    for change, message in (wrong[family], ({"resample": 0}, "resample=0; only")):
        text = json.dumps({**OWN[family], "image_processor": {**IMAGE[family], **change}})
        (folder / "processor_config.json").write_text(text)
        with pytest.raises(ValueError, match=message):
            VisionChat(folder, family=family)


def test_a_torch_that_lacks_a_filter_is_named_when_the_chat_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_vision_tokenizer(tmp_path / "tokenizer.json", [*SPECIAL, *OTHERS])
    monkeypatch.setattr(type(TILE_FAMILIES["gemma3"]), "mode", "cubist")
    with pytest.raises(
        RuntimeError, match=r"resized by mode='cubist', which torch .* does not have: install"
    ):
        VisionChat(path, family="gemma3", template=template_of_family("gemma3"))


def test_published_settings_are_those_without_a_file(tmp_path: Path) -> None:
    path = write_vision_tokenizer(tmp_path / "tokenizer.json", [*SPECIAL, *OTHERS])
    sample = {
        "messages": [{"role": "user", "content": [{"type": "image"}]}],
        "images": [image_bytes(700, 900)],
    }
    rows, tokens = {}, {}
    for family in filter(_is_made_here, TILE_FAMILIES):
        chats = VisionChat(path, family=family, template=template_of_family(family))
        lengths = chats.measure(sample)
        rows[family], tokens[family] = (
            lengths["pixel_values"],
            int((chats(sample)["input_ids"] == chats._image_id).sum()),
        )
    published = {
        "llava": (1, 576),
        "llava_onevision": (7, 4509),
        "idefics3": (17, 17 * 169),
        "smolvlm": (17, 17 * 81),
        "gemma3": (1, 256),
    }
    assert {family: (rows[family], tokens[family]) for family in rows} == {
        family: published[family] for family in rows
    }


def test_a_model_of_smolvlm_is_not_taken_for_one_of_idefics3(tmp_path: Path) -> None:
    """Where its settings say nothing of tokens, it has others."""
    settings = {"image_processor_type": "SmolVLMImageProcessor"}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match="is for SmolVLMImageProcessor"):
        family_of("idefics3", tmp_path, None, None)
    assert family_of("smolvlm", tmp_path, None, None).row == (3, 384, 384)
