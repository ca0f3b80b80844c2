"""What a conversion writes is delivered as the source delivers it: raw pictures, and all else."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conversion_kit import make_source, mds_of, picture, pil_value

from dataflow import ConversionError, SampleError, ShardedDataset, convert
from dataflow.conversion import verify
from sharding.formats.streaming.stored_values import png_of

PIXELS = np.random.default_rng(0).integers(0, 256, (4, 5, 7, 3), np.uint8)


@pytest.mark.parametrize("to", ["tar", "parquet", "mds"])
@pytest.mark.parametrize("mode", ["1", "L", "RGB", "RGBA"])
def test_raw_pixels_become_png_and_are_delivered_as_they_were(tmp_path: Path, mode: str, to: str) -> None:
    rows = [{"image": pil_value(pixels, mode)} for pixels in PIXELS]
    source = ShardedDataset(mds_of(tmp_path / "mds", {"image": "pil"}, rows))
    made = convert(source, tmp_path / "out", to=to, workers=1, verify=True)
    written = ShardedDataset(made.catalog)
    for i in range(4):
        (image,) = (value for name, value in written[i].items() if name.startswith("image"))
        assert image.shape == (3, 5, 7)
        assert (image == source[i]["image"]).all()
    (stored,) = (
        value for name, value in ShardedDataset(made.catalog, decode=None)[0].items() if name[0] == "i"
    )
    assert bytes(stored)[:4] == b"\x89PNG"


def test_lists_of_raw_pixels_become_lists_of_png(tmp_path: Path) -> None:
    pils = [pil_value(pixels, "RGB") for pixels in PIXELS]
    value = struct.pack("<II", 0, 4) + struct.pack("<4I", *map(len, pils)) + b"".join(pils)
    source = mds_of(tmp_path / "mds", {"images": "list[pil]"}, [{"images": value}])
    made = convert(source, tmp_path / "out", to="parquet", workers=1, verify=True)
    images = ShardedDataset(made.catalog)[0]["images"]
    assert [image.tolist() for image in images] == [pixels.transpose(2, 0, 1).tolist() for pixels in PIXELS]


@pytest.mark.filterwarnings("ignore:dicts in .* become JSON text")
def test_pictures_in_parquet_are_delivered_as_pictures(tmp_path: Path) -> None:
    made = convert(make_source(tmp_path), tmp_path / "out", to="parquet", workers=1, verify=True)
    written = ShardedDataset(made.catalog)
    assert (written.schema["jpg"].feature_type, tuple(written[3]["jpg"].shape)) == ("Image", (3, 8, 8))


@pytest.mark.parametrize("data", [b"P6\n2 1\n255\n" + bytes(6), b"P5\n2 1\n255\n12", b"P4\n9 1\n\xff\x00"])
def test_pixels_are_png_of_any_kind(data: bytes) -> None:
    assert png_of(data)[:8] == b"\x89PNG\r\n\x1a\n"
    assert png_of(data) == png_of(bytes(data))


@pytest.mark.parametrize(
    "data",
    [b"", picture(1), b"P6\n2 1\n65535\n" + bytes(12), b"P6 2 1 255\n" + bytes(6), b"P5\n2 1\n255\n123"],
)
def test_other_bytes_stay_as_they_are(data: bytes) -> None:
    assert png_of(data) == data


@pytest.mark.filterwarnings("ignore:dicts in .* become JSON text")
def test_verify_compares_what_is_delivered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the feature of pictures, Parquet has the bytes that were stored, and delivers no image."""
    monkeypatch.setattr("dataflow.conversion.target._PICTURES", ())
    with pytest.raises(
        ConversionError, match=r"shard-000000.parquet, sample 0, column 'jpg': .* is delivered, and"
    ):
        convert(make_source(tmp_path), tmp_path / "out", to="parquet", workers=1, verify=True)


@pytest.mark.parametrize("to", ["tar", "parquet", "mds"])
def test_all_kinds_of_columns_are_delivered_alike(
    tmp_path: Path, to: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All values of the samples that `verify=` asks for are compared."""
    compared = list[Any]()
    alike = verify._is_delivered_alike
    monkeypatch.setattr(verify, "_is_delivered_alike", lambda *two: compared.append(two) or alike(*two))
    columns: dict[str, Any] = {
        "i": pa.array([1, 2, 3], pa.int16()),
        "f": [0.1, 0.5, 2.0],
        "t": ["a", "ü", ""],
        "b": [b"a", b"bc", b"\xff"],
        "l": [[1.5], [2.0], [1, 2]],
        "n": [[{"a": 1}], [{"a": 2}], [{"a": 3}]],
    }
    pq.write_table(pa.table(columns), tmp_path / "0.parquet")
    source = ShardedDataset(f"{tmp_path}/0.parquet")
    for asked, count in ((True, 3), (2, 2)):
        made = convert(source, tmp_path / "out", to=to, shuffle=3, workers=1, verify=asked)
        assert made.verified == count
        assert len(compared) >= count * len(columns)
        compared.clear()


@pytest.mark.parametrize("to", ["tar", "parquet"])
def test_bools_stay_bools(tmp_path: Path, to: str) -> None:
    made = convert([{"x": True}, {"x": False}], tmp_path / "out", to=to, workers=1, verify=True)
    found = [next(iter(ShardedDataset(made.catalog)[i].values())) for i in range(2)]
    assert [str(np.asarray(value).dtype) for value in found] == ["bool"] * 2
    assert list(map(bool, found)) == [True, False]


def undotted(sample: dict[str, Any]) -> dict[str, Any]:
    return {**sample, "__key__": sample["__key__"].replace(".", "_")}


def test_a_key_with_a_dot_is_refused_by_a_tar_with_the_map_that_cures_it(tmp_path: Path) -> None:
    (tmp_path / "p").mkdir()
    (tmp_path / "p" / "v1.2.jpg").write_bytes(picture(1))
    with pytest.raises(
        SampleError, match=r"the key 'v1\.2' has a dot .*: map=lambda sample: \{\*\*sample, .*'_'\)\}"
    ):
        convert(str(tmp_path / "p"), tmp_path / "a", to="tar", workers=1)
    made = convert(str(tmp_path / "p"), tmp_path / "b", to="tar", map=undotted, workers=1)
    assert ShardedDataset(made.catalog, columns=["__key__"])[0] == {"__key__": "v1_2"}


def test_integers_that_no_tar_gives_back_are_refused_by_sample(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": pa.array([1, 1 << 63], pa.uint64())}), tmp_path / "x.parquet")
    with pytest.raises(SampleError, match=r"sample '1': column 'x' is 9223372036854775808, .*map= may give"):
        convert(tmp_path / "x.parquet", tmp_path / "out", to="tar", workers=1)


@pytest.mark.filterwarnings("ignore:times in .* become integers")
@pytest.mark.parametrize("fast", [True, False])
def test_types_that_python_or_parquet_has_not_are_written_and_compared(tmp_path: Path, fast: bool) -> None:
    """Of nanoseconds pyarrow makes no Python time, and of views of text no slices for Parquet."""
    times, texts = (
        pa.array([1, None, 2_000], pa.timestamp("ns")),
        pa.array(["a", None, "b" * 20], pa.string_view()),
    )
    nested = pa.StructArray.from_arrays([pa.array([1, 2, 3], pa.duration("ns")), texts], ["t", "v"])
    table = pa.table(
        {"t": times, "v": texts, "s": nested, "l": pa.array([[5], [], [6]], pa.list_(pa.time64("ns")))}
    )
    with pa.ipc.new_file(tmp_path / "a.arrow", table.schema) as writer:
        writer.write_table(table)
    names = None if fast else {name: name for name in ("s.t", "t", "v", "s.v")}
    source = ShardedDataset(tmp_path / "a.arrow", columns=names)
    made = convert(source, tmp_path / "out", to="parquet", workers=1, shard_samples=2, verify=True)
    assert (made.samples, made.verified) == (3, 3)
    written = ShardedDataset(made.catalog)
    assert [dict(written[i])["s.t"] for i in (0, 2)] == [1, 3]
    assert dict(written[2])["t"] == 2_000
    assert dict(written[2])["v"] == dict(written[2])["s.v"] == "b" * 20


@pytest.mark.parametrize("to", ["tar", "mds", "parquet"])
def test_a_stored_column_of_keys_is_kept_or_refused(tmp_path: Path, to: str) -> None:
    pq.write_table(pa.table({"__key__": ["a", "b"], "x": [1, 2]}), tmp_path / "x.parquet")

    def made(**options: Any) -> list[dict[str, Any]]:
        options |= {"to": to, "map": dict if to == "parquet" else None, "workers": 1, "verify": True}
        written = convert(tmp_path / "x.parquet", tmp_path / "out", overwrite=True, **options)
        columns = ["__key__", "x.cls"] if to == "tar" else None
        dataset = ShardedDataset(written.catalog, columns=columns)
        return [{name.removesuffix(".cls"): value for name, value in dataset[i].items()} for i in range(2)]

    if to == "tar":
        assert made() == [{"__key__": "a", "x": 1}, {"__key__": "b", "x": 2}]
        return
    with pytest.raises(ValueError, match=f"'__key__' is the key of samples, which to='{to}' does not keep"):
        made()
    rows = made(columns={"key": "__key__", "x": "x"})
    assert sorted(map(str, rows)) == ["{'key': 'a', 'x': 1}", "{'key': 'b', 'x': 2}"]


@pytest.mark.parametrize("options", [{"shuffle": 3}, {"filter": lambda sample: sample["i"] != 2}])
def test_types_of_parquet_are_kept_where_samples_are_shuffled_or_left_out(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    kinds = {"d": pa.date32(), "t": pa.timestamp("us", "UTC"), "c": pa.decimal128(9, 2), "i": pa.int8()}
    kinds |= {"m": pa.map_(pa.string(), pa.int64()), "s": pa.struct([("a", pa.list_(pa.int16()))])}
    kinds |= {"l": pa.list_(pa.struct([("r", pa.string())])), "f": pa.list_(pa.float32(), 2)}
    rows = [
        {"d": k, "t": k, "c": k, "i": k, "m": [("x", k)], "s": {"a": [k]}, "l": [{"r": str(k)}], "f": [k, k]}
        for k in range(9)
    ]
    table = pa.table({name: pa.array([row[name] for row in rows], kind) for name, kind in kinds.items()})
    for shard in range(3):
        pq.write_table(table.slice(3 * shard, 3), tmp_path / f"{shard}.parquet", row_group_size=2)
    for verified in (True, 4):
        made = convert(
            f"{tmp_path}/*.parquet", tmp_path / "out", to="parquet", shard_samples=5, workers=1,
            verify=verified, overwrite=True, **options,
        )  # fmt: skip
        assert made.verified == min(verified if verified > 1 else 9, made.samples)
    written = pa.concat_tables([pq.read_table(url) for url in made.files])
    assert written.schema.equals(table.schema)
    numbers = written.column("i").to_pylist()
    assert sorted(numbers) == [k for k in range(9) if "filter" not in options or k != 2]
    assert (numbers == sorted(numbers)) is ("filter" in options)
    assert written.equals(table.take(numbers))


def test_dicts_that_become_text_are_told_and_a_schema_keeps_them(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"m": [{"r": "x"}]}\n{"m": [{"r": "y"}]}\n')
    with pytest.warns(UserWarning, match="dicts in 'm' become JSON text in Parquet: schema= gives"):
        convert(tmp_path / "a.jsonl", tmp_path / "a", to="parquet", workers=1)
    schema = pa.schema([("m", pa.list_(pa.struct([("r", pa.string())])))])
    made = convert(tmp_path / "a.jsonl", tmp_path / "b", to="parquet", workers=1, schema=schema, verify=True)
    assert pq.read_table(made.files[0]).to_pylist() == [{"m": [{"r": "x"}]}, {"m": [{"r": "y"}]}]


def test_times_that_become_integers_are_told(tmp_path: Path) -> None:
    table = pa.table({"d": pa.array([1, 2], pa.date32()), "x": [1, 2]})
    pq.write_table(table, tmp_path / "a.parquet")
    with pytest.warns(UserWarning, match="times in 'day' become integers, .* without columns="):
        made = convert(tmp_path / "a.parquet", tmp_path / "a", to="parquet", columns={"day": "d"}, workers=1)
    assert pq.read_table(made.files[0]).to_pylist() == [{"day": 1}, {"day": 2}]
    for to in ("mds", "tar"):
        with pytest.warns(UserWarning, match="times in 'd' become integers"):
            convert(tmp_path / "a.parquet", tmp_path / to, to=to, workers=1)
