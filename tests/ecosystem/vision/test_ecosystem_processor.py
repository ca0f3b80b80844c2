"""`Processor` makes what one of transformers makes, plans by its hook, and tells where that is wrong."""

from __future__ import annotations

import json
import pickle
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from vision_kit import TEMPLATE, image_bytes, vision_chat

from dataflow import DataLoader, Packed, Processor, Ragged, SampleError, ShardedDataset

pytest.importorskip("transformers")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from processors_kit import make_processor, theirs_of

pytestmark = pytest.mark.filterwarnings("ignore")
FAMILIES = ["qwen2_5_vl", "qwen3_vl", "llava", "llava_onevision", "idefics3", "gemma3"]
PLANNED = {"qwen2_5_vl", "qwen3_vl", "llava", "idefics3"}
"""Families whose hook tells lengths of any number of pictures."""


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def theirs(family: str, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return make_processor(family, tmp_path_factory.mktemp(family))


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return make_processor("qwen2_5_vl", tmp_path_factory.mktemp("qwen"))


def test_samples_are_what_the_processor_makes(theirs: Any, family: str) -> None:
    chats = Processor(theirs)
    assert (chats.measure is not None) == (family in PLANNED)
    pictures = set()
    for seed in range(12):
        sample = vision_chat(seed, 20, 300)
        made, expected = chats({**sample, "id": seed}), theirs_of(theirs, sample)
        assert made["input_ids"].tolist() == expected["input_ids"][0].tolist()
        is_said = torch.as_tensor(expected["assistant_masks"][0]).bool()
        assert torch.equal(made["loss_mask"], is_said)
        assert all(isinstance(made[name], torch.Tensor) for name in made if name != "id")
        for name in chats._columns:
            if sample["images"]:
                value = expected[name][0] if chats._columns[name].is_batched else expected[name]
                assert torch.equal(made[name], value), name
                pictures.add(len(sample["images"]))
            elif made[name].dim():
                assert len(made[name]) == 0
        if chats.measure is not None:
            measured = chats.measure(sample)
            assert {name: len(made[name]) for name in measured} == measured
            assert "pixel_values" in measured
    assert pictures == {1, 2, 3}


def test_lists_of_one_shape_become_ragged_columns(theirs: Any, family: str) -> None:
    chats = Processor(theirs)
    columns = {
        "qwen2_5_vl": {"pixel_values", "image_grid_thw", "mm_token_type_ids"},
        "qwen3_vl": {"pixel_values", "image_grid_thw", "mm_token_type_ids"},
        "llava": {"pixel_values"},
        "llava_onevision": {"image_sizes"},  # tiles differ
        "idefics3": {"pixel_values", "pixel_attention_mask"},
        "gemma3": {"pixel_values", "token_type_ids"},
    }
    assert {*chats.lists} == {"input_ids", "loss_mask"} | columns[family]


def test_rows_are_planned_without_pixels_and_hold_what_each_chat_is_alone(qwen: Any, tmp_path: Path) -> None:
    part = pa.struct([("type", pa.string()), ("text", pa.string())])
    message = pa.struct([("role", pa.string()), ("content", pa.list_(part))])
    schema = pa.schema({"id": pa.int64(), "messages": pa.list_(message), "images": pa.list_(pa.binary())})
    rows = [{"id": n, **vision_chat(n, 30, 120)} for n in range(20)]
    pq.write_table(pa.Table.from_pylist(rows, schema), tmp_path / "chats.parquet")
    chats, made = Processor(qwen), []
    answer = chats._answer
    chats._answer = lambda *given: made.append(1) or answer(*given)  # type: ignore[assignment, method-assign, func-returns-value]
    dataset = ShardedDataset(tmp_path / "chats.parquet", decode={"images": None}, transform=chats)
    whole = ["pixel_values", "image_grid_thw"]
    batching = Packed(400, columns=["input_ids", "loss_mask"], whole=whole, overlong="error")
    with DataLoader(dataset, 2, batching=batching, num_workers=0) as loader:
        number, seen = len(loader), []
        assert not made
        for batch in loader:
            assert isinstance(batch["pixel_values"], Ragged)
            seen += batch["id"].tolist()
            assert len(made) == len(seen)
            for at, pixels in zip(batch["id"].tolist(), batch["pixel_values"].rows(), strict=True):
                assert len(pixels) == len(rows[at]["images"]) == 0 or torch.equal(
                    pixels, theirs_of(qwen, rows[at])["pixel_values"]
                )
    assert sorted(seen) == [*range(20)]
    assert number > 3


def test_a_hook_that_is_wrong_for_blank_pictures_is_not_used(tmp_path: Path) -> None:
    processor = make_processor("gemma3", tmp_path)
    with pytest.warns(
        UserWarning, match=r"Gemma3Processor does not tell .*its hook says \d+ tokens for 1 blank"
    ):
        assert Processor(processor).measure is None


def test_a_hook_that_is_wrong_later_is_an_error_that_says_so(tmp_path: Path) -> None:
    processor = make_processor("qwen2_5_vl", tmp_path)
    chats = Processor(processor)
    right = processor._get_num_multimodal_tokens

    def wrong(**given: Any) -> Any:
        told = right(**given)
        tokens = [number + 1 for number in told.num_image_tokens]
        return SimpleNamespace(num_image_tokens=tokens, num_image_patches=told.num_image_patches)

    processor._get_num_multimodal_tokens = wrong
    with pytest.raises(
        ValueError, match=r"makes \d+ of 'input_ids', and its hook .* says \d+: it cannot plan"
    ):
        chats(vision_chat(5))
    chats.measure = None
    assert len(chats(vision_chat(5))["input_ids"])


def test_the_fingerprint_changes_with_what_decides_about_the_samples(qwen: Any, tmp_path: Path) -> None:
    others = [
        Processor(qwen),
        Processor(qwen, upright=False),
        Processor(qwen, template=TEMPLATE.replace("assistant", "model")),
        Processor(qwen, arguments={"max_pixels": 20_000}),
        Processor(make_processor("qwen2_5_vl", tmp_path, max_pixels=30_000)),
        Processor(make_processor("qwen2_5_vl", tmp_path, image_mean=[0.4] * 3)),
    ]
    assert len({each.fingerprint for each in others}) == len(others)
    first = others[0]
    assert first.fingerprint == Processor(make_processor("qwen2_5_vl", tmp_path)).fingerprint
    copy = pickle.loads(pickle.dumps(first))
    sample = vision_chat(5)
    assert copy.fingerprint == first.fingerprint
    assert copy.measure is not None
    assert copy.measure(sample) == {name: len(copy(sample)[name]) for name in copy.measure(sample)}


def test_arguments_go_to_the_processor_and_its_hook(qwen: Any) -> None:
    sample = {
        "messages": [{"role": "user", "content": [{"type": "image"}]}],
        "images": [image_bytes(300, 300)],
    }
    small = Processor(qwen, arguments={"max_pixels": 28**2 * 9})
    assert small.measure is not None
    assert len(small(sample)["pixel_values"]) == 36 < len(Processor(qwen)(sample)["pixel_values"])
    assert small.measure(sample)["input_ids"] == len(small(sample)["input_ids"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.update(images=[]), "its messages have 1 pictures, and column 'images' has 0"),
        (lambda s: s.update(images=[b"<html>"]), "picture 0: .*not an image"),
        (lambda s: s.update(images=[image_bytes(200, 200)[:900]]), "picture 0: "),
        (
            lambda s: s["messages"].append({"role": "user", "content": "a <|image_pad|>"}),
            "the text of message 1 has the token",
        ),
    ],
)
def test_bad_samples_are_named(qwen: Any, tmp_path: Path, change: Any, message: str) -> None:
    sample = {"messages": [{"role": "user", "content": [{"type": "image"}]}], "images": [image_bytes(60, 60)]}
    change(sample)
    row = {
        "messages": [json.dumps(sample["messages"])],
        "images": pa.array([sample["images"]], pa.list_(pa.binary())),
    }
    pq.write_table(pa.table(row), tmp_path / "x.parquet")
    dataset = ShardedDataset(tmp_path / "x.parquet", decode={"images": None}, transform=Processor(qwen))
    with pytest.raises(SampleError, match=message) as caught:
        dataset[0]
    assert (Path(caught.value.shard).name, caught.value.key) == ("x.parquet", "0")


def test_what_is_no_processor_is_refused(qwen: Any) -> None:
    with pytest.raises(TypeError, match="Qwen2VLImageProcessor is no processor of pictures and text"):
        Processor(qwen.image_processor)
    template, qwen.chat_template = qwen.chat_template, None
    try:
        with pytest.raises(ValueError, match="has no chat template: pass template="):
            Processor(qwen)
    finally:
        qwen.chat_template = template
