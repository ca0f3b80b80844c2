"""Chats with pictures from folders of Energon and from Parquet as Hugging Face's `datasets` writes it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from vision_kit import TEMPLATE, vision_chat, write_vision_tokenizer

from dataflow import SampleError, ShardedDataset, ShardWriter, VisionChat

pytestmark = pytest.mark.usefixtures("own_cache")
NUM_CHATS = 6
DATASET = "__module__: megatron.energon\n__class__: CrudeWebdataset\n"
SPLIT = "split_parts:\n  train:\n  - chats-0.tar\n  val:\n  - chats-1.tar\nexclude: []\n"
IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
PART = pa.struct([("type", pa.string()), ("text", pa.string()), ("index", pa.int64())])
MESSAGE = pa.struct([("role", pa.string()), ("content", pa.list_(PART))])


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> VisionChat:
    path = write_vision_tokenizer(tmp_path_factory.mktemp("vision") / "tokenizer.json")
    return VisionChat(
        path, family="qwen2_5_vl", template=TEMPLATE, min_pixels=4 * 28**2, max_pixels=40 * 28**2
    )


def agree(dataset: ShardedDataset, chats: VisionChat, numbers: range) -> None:
    assert len(dataset) == len(numbers)
    for place, number in enumerate(numbers):
        made, expected = dataset[place], chats(vision_chat(number))
        assert all(torch.equal(made[name], expected[name]) for name in chats.lists)


def test_chats_lie_in_a_folder_of_energon(chats: VisionChat, tmp_path: Path) -> None:
    with ShardWriter(f"{tmp_path}/chats-%d.tar", max_count=4) as shards:
        for number in range(NUM_CHATS):
            sample = vision_chat(number)
            pictures = {f"{place}.jpg": data for place, data in enumerate(sample["images"])}
            shards.write({"__key__": f"{number:03d}", "json": sample["messages"], **pictures})
    (tmp_path / ".nv-meta").mkdir()
    (tmp_path / ".nv-meta" / "dataset.yaml").write_text(DATASET)
    (tmp_path / ".nv-meta" / "split.yaml").write_text(SPLIT)
    info = {"energon_version": "7.4.1", "shard_counts": {"chats-0.tar": 4, "chats-1.tar": 2}}
    (tmp_path / ".nv-meta" / ".info.json").write_text(json.dumps(info))
    given: dict[str, Any] = {"columns": {"messages": "json", "images": "*.jpg"}, "decode": {"images": None}}
    for split, numbers in (("train", range(4)), ("val", range(4, NUM_CHATS))):
        agree(ShardedDataset(tmp_path, split=split, transform=chats, **given), chats, numbers)


@pytest.mark.parametrize("large", [False, True])
def test_chats_lie_in_parquet_of_hugging_face(chats: VisionChat, tmp_path: Path, large: bool) -> None:
    samples = [vision_chat(number) for number in range(NUM_CHATS)]
    images = [[{"bytes": data, "path": f"{n}.jpg"} for n, data in enumerate(s["images"])] for s in samples]
    lists = pa.large_list(IMAGE) if large else pa.list_(IMAGE)
    schema = pa.schema({"images": lists, "messages": pa.list_(MESSAGE)})
    features = {"info": {"features": {"images": {"feature": {"_type": "Image"}, "_type": "List"}}}}
    schema = schema.with_metadata({"huggingface": json.dumps(features)})
    rows = {"images": images, "messages": [sample["messages"] for sample in samples]}
    pq.write_table(pa.table(rows, schema), tmp_path / "chats.parquet")
    dataset = ShardedDataset(tmp_path / "chats.parquet", decode={"images": None}, transform=chats)
    agree(dataset, chats, range(NUM_CHATS))


def test_a_picture_that_has_a_path_alone_is_named(chats: VisionChat, tmp_path: Path) -> None:
    sample = vision_chat(5)
    images = [[{"bytes": None, "path": "/etc/passwd"} for _ in sample["images"]]]
    schema = pa.schema({"images": pa.list_(IMAGE), "messages": pa.list_(MESSAGE)})
    rows = {"images": images, "messages": [sample["messages"]]}
    pq.write_table(pa.table(rows, schema), tmp_path / "chats.parquet")
    dataset = ShardedDataset(tmp_path / "chats.parquet", decode={"images": None}, transform=chats)
    with pytest.raises(SampleError, match="only the path of a file is stored, not its bytes"):
        dataset[0]
