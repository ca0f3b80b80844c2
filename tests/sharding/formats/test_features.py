"""Features of `datasets` and structs of bytes and path: which columns a file has, and what they are."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from formats_kit import build_catalog, decoded_blocks, scan_of

from sharding.blocks import PATH_ONLY, ColumnSpec, Spans, spec_text
from sharding.catalog.schema import merge_schemas, schema_from_json, schema_to_json
from sharding.errors import CorruptShardError
from sharding.formats.arrow.ipc import ArrowStreamFormat
from sharding.formats.arrow.parquet import ParquetFormat
from sharding.formats.arrow.schema import features_of, specs_of

MEDIA = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
IMAGE = {"_type": "Image"}


def specs(fields: dict[str, pa.DataType], features: dict[str, Any] | None = None) -> dict[str, ColumnSpec]:
    metadata = None
    if features is not None:
        metadata = {"huggingface": json.dumps({"info": {"features": features}})}
    return specs_of(pa.schema(fields, metadata))


def test_a_struct_of_bytes_and_path_is_one_column_and_its_leaves_are_there_when_named() -> None:
    found = specs({"image": MEDIA, "n": pa.int64()})
    assert {name: (spec.kind, spec.is_part) for name, spec in found.items()} == {
        "image": ("bytes", False),
        "image.bytes": ("bytes", True),
        "image.path": ("text", True),
        "n": ("fixed", False),
    }


@pytest.mark.parametrize(
    ("name", "feature"),
    [
        ("image", "Image"),
        ("front_IMG", "Image"),
        ("speech", "Audio"),
        ("Video", "Video"),
        ("mp4", "Video"),
        ("content", ""),
    ],
)
def test_without_features_the_name_of_such_a_struct_says_what_it_holds(name: str, feature: str) -> None:
    assert specs({name: MEDIA})[name].feature_type == feature
    assert specs({name: pa.list_(MEDIA)})[name].feature_type == feature
    assert specs({name: pa.binary()})[name].feature_type == ""
    assert specs({name: MEDIA}, {name: {"_type": "Mesh"}})[name].feature_type == "Mesh"


def test_features_reach_columns_inside_structs_and_lists() -> None:
    fields = {
        "outer": pa.struct([("picture", MEDIA), ("label", pa.int64())]),
        "raw": pa.binary(),
        "list": pa.list_(MEDIA),
        "old": pa.list_(pa.binary()),
        "columns": pa.struct([("x", pa.list_(MEDIA))]),
    }
    label = {"names": ["a", "b"], "_type": "ClassLabel", "id": None}
    features: dict[str, Any] = {
        "outer": {"picture": {**IMAGE, "mode": None}, "label": label},
        "raw": IMAGE,
        "list": {"feature": IMAGE, "_type": "List"},
        "old": [IMAGE],
        "columns": {"feature": {"x": IMAGE}, "_type": "Sequence"},
    }
    found = specs(fields, features)
    images = ["outer.picture", "raw", "list", "old", "columns.x"]
    assert {found[name].feature for name in images} == {'{"_type": "Image"}'}
    assert json.loads(found["outer.label"].feature) == {"_type": "ClassLabel", "names": ["a", "b"]}
    assert spec_text(found["list"]) == "list of bytes (Image)"


@pytest.mark.parametrize(
    "text", ["", "[", "[]", "3", '{"info": 3}', '{"info": {"features": [1]}}', "[" * 10**5]
)
def test_metadata_that_is_no_features_is_as_if_there_were_none(text: str) -> None:
    schema = pa.schema({"image": pa.binary()}, {"huggingface": text})
    assert features_of(schema) == {}
    assert specs_of(schema)["image"].feature == ""


@pytest.mark.parametrize(
    "strange", [3, None, [], {}, {"_type": 3}, {"_type": "List", "feature": 3}, [[]], "x"]
)
def test_descriptions_that_make_no_sense_are_passed_over(strange: Any) -> None:
    assert specs({"x": pa.binary()}, {"x": strange})["x"] == ColumnSpec("bytes", optional=True)


def arrow_stream(table: pa.Table) -> bytes:
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=2)
    return sink.getvalue()


def parquet(table: pa.Table) -> bytes:
    sink = io.BytesIO()
    pq.write_table(table, sink, row_group_size=2)
    return sink.getvalue()


@pytest.mark.parametrize("codec", [ParquetFormat(), ArrowStreamFormat()], ids=lambda codec: codec.name)
@pytest.mark.parametrize("columns", [None, ["image"], ["image.path", "image"], ["n", "image.bytes"]])
def test_every_column_is_decoded_alone_and_with_others(codec: Any, columns: list[str] | None) -> None:
    values = [
        {"bytes": b"one", "path": None},
        {"bytes": b"", "path": "a"},
        {"bytes": None, "path": "b.jpg"},
        None,
        {"bytes": b"one", "path": "a"},
    ]
    lists = [[values[0], values[1]], [], [values[4]] * 3, None, [values[2]]]
    table = pa.table(
        {"image": pa.array(values, MEDIA), "n": range(5), "images": pa.array(lists, pa.list_(MEDIA))}
    )
    content = (parquet if codec.name == "parquet" else arrow_stream)(table)
    blocks = decoded_blocks(codec, content, "s", columns, block_bytes=1)
    assert all(columns is None or list(block) == columns for block in blocks)
    if columns is None or "image" in columns:
        spans = [block["image"] for block in blocks]
        found = [
            span.value(i).tobytes() if span.lengths[i] >= 0 else int(span.lengths[i])
            for span in spans
            if isinstance(span, Spans)
            for i in range(len(span))
        ]
        assert found == [b"one", b"", PATH_ONLY, -1, b"one"]
    assert scan_of(codec, content, "s", 1).schema["images"].items == 2


def test_blocks_promise_memory_for_the_copies_of_lists() -> None:
    image = bytes(10_000)
    rows = [[bytes([row, item]) + image for item in range(4)] for row in range(20)]
    table = pa.table({"images": pa.array(rows, pa.list_(pa.binary()))})
    for codec, content in ((ParquetFormat(), parquet(table)), (ArrowStreamFormat(), arrow_stream(table))):
        (block, *_) = decoded_blocks(codec, content, "s", ["images"], 1)
        spans = block["images"]
        assert isinstance(spans, Spans)
        # Arrow's own bytes are there while the lists are made.
        assert spans.buffer.nbytes + 2 * 4 * len(image) <= scan_of(codec, content, "s", 1).nbytes[0]


def test_classes_of_other_names_in_another_shard_are_an_error() -> None:
    def labelled(*names: str) -> dict[str, ColumnSpec]:
        return specs({"label": pa.int64()}, {"label": {"names": names, "_type": "ClassLabel"}})

    plain = specs({"label": pa.int64()})
    merged = merge_schemas([("a", plain), ("b", labelled("cat", "dog"))], widens=True)
    assert merged == labelled("cat", "dog")
    merged = merge_schemas([("a", labelled("cat", "dog")), ("b", labelled("dog", "cat"))], widens=True)
    with pytest.raises(CorruptShardError, match="'label' have other names"):
        merged.check(["label"])


def test_a_catalog_keeps_what_columns_are(tmp_path: Path) -> None:
    path = str(tmp_path / "s.parquet")
    metadata = {"huggingface": json.dumps({"info": {"features": {"raw": IMAGE}}})}
    schema = pa.schema({"image": MEDIA, "raw": pa.binary(), "images": pa.list_(pa.binary())}, metadata)
    pq.write_table(schema.empty_table().from_pylist([{"raw": b"x", "images": [b"a", b"b"]}], schema), path)
    catalog = build_catalog([path], ParquetFormat())
    assert schema_from_json(json.loads(json.dumps(schema_to_json(catalog.schema)))) == catalog.schema
    facts = schema_to_json({"x": ColumnSpec("bytes")})
    for name in ("feature", "is_part", "items"):
        facts["x"].pop(name)
    assert schema_from_json(facts) == {"x": ColumnSpec("bytes")}
    for wrong in ({"feature": 3}, {"feature": "["}, {"feature": "{}"}, {"is_part": 1}, {"items": -1}):
        with pytest.raises((KeyError, TypeError, ValueError)):
            schema_from_json({"x": {**facts["x"], **wrong}})
