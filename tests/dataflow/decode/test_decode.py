"""From stored bytes to batches: types, shapes, values, `columns=`, `decode=`, collate functions."""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from datasets_kit import (
    NUM_SAMPLES,
    Made,
    delivered,
    make_megatron,
    make_parquet,
    make_tar,
    make_tokens_bin,
    npy,
    plain_sample,
    rows_of,
    tar_sample,
    write_tar,
)
from hypothesis import given, strategies as st

from dataflow import DataflowError, DataLoader, Image, Optional, Pad, Ragged, ShardedDataset, Shuffle
from dataflow.decode.image import decode_image
from dataflow.decode.values import CONVERTERS, parse_floats, parse_ints
from sharding.blocks import Spans
from sharding.errors import SampleError

from_npy = CONVERTERS["npy"]


@pytest.fixture(scope="module")
def tar(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return make_tar(tmp_path_factory.mktemp("tar"))


@pytest.fixture(scope="module")
def parquet(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return make_parquet(tmp_path_factory.mktemp("parquet"))


def in_order(dataset: ShardedDataset, batch_size: int = 5, **options: Any) -> list[Any]:
    with DataLoader(dataset, batch_size, shuffle=False, **options) as loader:
        return list(loader)


def tar_dataset(folder: Path, samples: Sequence[dict[str, bytes]], **options: Any) -> ShardedDataset:
    """Samples named 0, 1, 2, ...; a sample is its columns' bytes."""
    members = [(f"{i}.{name}", data) for i, sample in enumerate(samples) for name, data in sample.items()]
    write_tar(folder / "a.tar", members)
    return ShardedDataset(str(folder / "a.tar"), catalog=str(folder / "a.catalog"), **options)


def first(dataset: ShardedDataset, batch_size: int = 100) -> Any:
    return in_order(dataset, batch_size)[0]


# ---- what each kind of content becomes ------------------------------------------------------------------


def test_tar_columns_are_decoded_by_their_endings(tar: Made) -> None:
    batch = in_order(tar.open())[1]
    assert batch["cls"].dtype == torch.int64
    assert batch["cls"].tolist() == [5, 6, 7, 8, 9]
    assert batch["txt"] == [tar_sample(i)["txt"] for i in range(5, 10)]
    assert batch["json"][1] == {"i": 6, "even": True}
    assert batch["npy"].dtype == torch.float32
    assert batch["npy"].shape == (5, 3)
    assert isinstance(batch["bin"], Ragged)
    assert batch["bin"].values.dtype == torch.uint8
    assert batch["bin"].offsets.tolist() == [0, 1, 3, 6, 6, 7]
    assert batch["key"].shape == (5, 8)
    assert bytes(batch["key"][0].tolist()) == b"00000005"


def test_everything_stays_bytes_with_decode_none(tar: Made) -> None:
    batch = in_order(tar.open(decode=None))[0]
    assert all(isinstance(v, Ragged) or v.dtype == torch.uint8 for v in batch.values())
    assert [bytes(row.tolist()) for row in batch["cls"].rows()] == [b"0", b"1", b"2", b"3", b"4"]
    assert json.loads(bytes(batch["json"].row(3).tolist())) == {"i": 3, "even": False}


def test_one_rule_may_serve_all_columns(tmp_path: Path) -> None:
    dataset = tar_dataset(tmp_path, [{"a": b"1", "b": b"2"}, {"a": b"3", "b": b"4"}], decode="int")
    batch = first(dataset)
    assert (batch["a"].tolist(), batch["b"].tolist()) == ([1, 3], [2, 4])


def test_arrays_of_one_size_in_bytes_are_stacked_and_others_listed(tmp_path: Path) -> None:
    same = [npy(np.full((2, 3), i, np.int16)) for i in range(4)]
    other = [npy(np.arange(i)) for i in range(4)]
    samples = [{"same.npy": a, "other.npy": b} for a, b in zip(same, other, strict=True)]
    batch = first(tar_dataset(tmp_path, samples))
    assert batch["same.npy"].shape == (4, 2, 3)
    assert batch["same.npy"].dtype == torch.int16
    assert [tensor.tolist() for tensor in batch["other.npy"]] == [[], [0], [0, 1], [0, 1, 2]]


def test_arrays_without_dimensions_are_stacked_to_one(tmp_path: Path) -> None:
    batch = first(tar_dataset(tmp_path, [{"npy": npy(np.float32(i))} for i in range(3)]))
    assert batch["npy"].tolist() == [0.0, 1.0, 2.0]


def test_arrays_of_foreign_byte_order_keep_their_values(tmp_path: Path) -> None:
    values = np.arange(6, dtype=">i4").reshape(2, 3)
    batch = first(tar_dataset(tmp_path, [{"npy": npy(values)}] * 2))
    assert batch["npy"].dtype == torch.int32
    assert batch["npy"].tolist() == [values.tolist()] * 2


@pytest.mark.parametrize("kind", ["U5", "S5", "datetime64[s]", "longdouble", [("a", "i4")]], ids=str)
def test_arrays_of_types_that_torch_lacks_stay_arrays(tmp_path: Path, kind: Any) -> None:
    values = np.zeros(2, kind)
    dataset = tar_dataset(tmp_path, [{"npy": npy(values)}] * 2)
    for array in (*first(dataset)["npy"], dataset[0]["npy"]):
        np.testing.assert_array_equal(array, values)


def test_arrays_of_as_many_bytes_and_other_shapes_are_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    samples = [{"npy": npy(np.zeros(shape))} for shape in ((2, 3), (3, 2))]
    with pytest.raises(
        SampleError, match=r"'npy'.*\[3, 2\], but another sample has .*\[2, 3\]: .*Optional\('npy'\)"
    ):
        first(tar_dataset(tmp_path, samples))
    source, catalog = str(tmp_path / "a.tar"), str(tmp_path / "a.catalog")
    batch = first(ShardedDataset(source, catalog=catalog, decode={"npy": Optional("npy")}))
    assert [value.shape for value in batch["npy"]] == [(2, 3), (3, 2)]


def test_what_a_function_returns_is_listed_and_arrays_are_tensors(tmp_path: Path) -> None:
    """Also those that cannot be written to."""
    dataset = tar_dataset(tmp_path, [{"x": b"ab"}] * 2, decode={"x": lambda b: np.frombuffer(b, np.uint8)})
    assert [value.tolist() for value in first(dataset)["x"]] == [[97, 98]] * 2


def test_pil_gives_pictures_of_three_channels(tmp_path: Path) -> None:
    """As `.decode("pil")` of webdataset does, which many bring along."""
    grey, data = PIL.Image.new("L", (6, 4), 7), io.BytesIO()
    grey.save(data, "PNG")
    dataset = tar_dataset(tmp_path, [{"png": data.getvalue()}], decode={"png": "pil"})
    (image,) = first(dataset)["png"]
    assert (image.mode, image.size, image.getpixel((5, 3))) == ("RGB", (6, 4), (7, 7, 7))


@pytest.mark.parametrize(("name", "text", "value"), [("float", b" 2.5\n", 2.5), ("x.flt", b"-1e3", -1000.0)])
def test_floats_are_parsed_to_double(tmp_path: Path, name: str, text: bytes, value: float) -> None:
    batch = first(tar_dataset(tmp_path, [{name: text}] * 3))
    assert batch[name].dtype == torch.float64
    assert batch[name].tolist() == [value] * 3


def test_text_is_utf8_and_a_broken_one_names_its_sample(tmp_path: Path) -> None:
    samples = [{"txt": "ä€😀".encode()}, {"txt": b""}, {"txt": b"\xff\xfe"}]
    dataset = tar_dataset(tmp_path, samples)
    with pytest.raises(SampleError, match="UnicodeDecodeError") as caught:
        first(dataset)
    assert caught.value.key == "2"
    assert caught.value.shard.endswith("a.tar")
    assert isinstance(caught.value.__cause__, UnicodeDecodeError)


def test_text_of_any_script_and_of_no_length_is_text(tmp_path: Path) -> None:
    assert first(tar_dataset(tmp_path, [{"txt": "ä€😀".encode()}, {"txt": b""}]))["txt"] == ["ä€😀", ""]


@pytest.mark.parametrize("size", [0, 1, 7, 512, 1000])
def test_byte_strings_of_one_length_are_one_tensor(tmp_path: Path, size: int) -> None:
    values = [np.random.default_rng(i).bytes(size) for i in range(9)]
    batches = in_order(tar_dataset(tmp_path, [{"bin": v} for v in values]), 4)
    assert [tuple(b["bin"].shape) for b in batches] == [(4, size), (4, size), (1, size)]
    assert [bytes(row.tolist()) for b in batches for row in b["bin"]] == values


@pytest.mark.parametrize("shuffle", [Shuffle("window", 2), Shuffle("full")], ids=str)
def test_byte_strings_of_any_length_are_ragged_and_may_be_empty(tmp_path: Path, shuffle: Shuffle) -> None:
    values = [np.random.default_rng(i).bytes(i * 37 % 1500 * (i % 3)) for i in range(40)]
    dataset = tar_dataset(
        tmp_path, [{"bin": v, "cls": str(i).encode()} for i, v in enumerate(values)], block_bytes=3000
    )
    with DataLoader(dataset, 7, shuffle) as loader:
        for batch in loader:
            assert batch["bin"].offsets.dtype == torch.int64
            got = [bytes(row.tolist()) for row in batch["bin"].rows()]
            assert got == [values[i] for i in batch["cls"].tolist()]


def test_byte_strings_that_are_all_empty_are_delivered(tmp_path: Path) -> None:
    samples = [{"bin": b"", "cls": str(i).encode()} for i in range(5)]
    batch = first(tar_dataset(tmp_path, samples))
    assert batch["bin"].shape == (5, 0)


@pytest.mark.parametrize("member", ["npy", "jpg", "json", "cls"])
def test_pad_does_not_fill_up_files_in_place_of_their_values(tmp_path: Path, member: str) -> None:
    with pytest.raises(ValueError, match=f"column '{member}' holds .* files: .* pad in collate_fn="):
        tar_dataset(tmp_path, [{member: b"1"}, {member: b"23"}], decode={member: Pad()})


def test_pad_fills_or_cuts_to_one_tensor(parquet: Made, tmp_path: Path) -> None:
    batch = in_order(parquet.open(columns=["lst"], decode={"lst": Pad(-1)}))[0]
    assert batch["lst"].tolist() == [[-1, -1, -1], [1, -1, -1], [2, 3, -1], [3, 4, 5], [-1, -1, -1]]
    assert batch["lst"].dtype == torch.int32
    batch = in_order(parquet.open(columns=["lst"], decode={"lst": Pad(9, length=2)}))[0]
    assert batch["lst"].tolist() == [[9, 9], [1, 9], [2, 3], [3, 4], [9, 9]]
    batch = in_order(parquet.open(columns=["txt"], decode={"txt": Pad(0, length=6)}))[0]
    assert bytes(batch["txt"][1].tolist()) == b"text 1"


def test_windows_of_tokens_come_as_int64_and_documents_as_stored(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    batch = in_order(make_tokens_bin(tmp_path / "a").open())[0]
    assert batch["tokens"].dtype == torch.int64
    assert batch["tokens"].shape == (5, 5)
    (tmp_path / "b").mkdir()
    documents = in_order(make_megatron(tmp_path / "b").open())[0]["tokens"]
    assert documents.values.dtype == torch.uint16
    assert documents.row(3).tolist() == [3, 4, 5, 6]


@pytest.mark.parametrize("dtype", ["uint8", "int8", "int16", "uint16", "int32", "uint32", "int64"])
def test_tokens_of_every_type_keep_their_values(tmp_path: Path, dtype: str) -> None:
    info = np.iinfo(dtype)
    tokens = np.array([info.min, info.max, 0, 1, 2, 3, 4], dtype)
    tokens.tofile(tmp_path / "t.bin")
    dataset = ShardedDataset(
        str(tmp_path / "t.bin"), format="tokens", dtype=dtype, length=2, catalog=str(tmp_path / "c")
    )
    assert first(dataset)["tokens"].tolist() == [
        [info.min, info.max, 0],
        [0, 1, 2],
        [2, 3, 4],
    ]


@pytest.mark.parametrize(
    "kind", ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float", "double"]
)
def test_parquet_numbers_keep_type_and_value(tmp_path: Path, kind: str) -> None:
    column = pa.array(
        range(100), type=getattr(pa, kind.replace("float", "float32").replace("double", "float64"))()
    )
    pq.write_table(pa.table({"v": column, "b": [i % 3 == 0 for i in range(100)]}), tmp_path / "a.parquet")
    dataset = ShardedDataset(str(tmp_path / "a.parquet"), catalog=str(tmp_path / "c"))
    with DataLoader(dataset, 7, shuffle=True) as loader:
        batches = list(loader)
    assert batches[0]["v"].numpy().dtype == column.to_numpy().dtype
    assert sorted(chain(*(b["v"].tolist() for b in batches))) == list(range(100))
    assert batches[0]["b"].dtype == torch.bool
    assert all((b["b"] == (b["v"].to(torch.int64) % 3 == 0)).all() for b in batches)


# ---- images ---------------------------------------------------------------------------------------------


def jpeg(i: int, height: int = 40, width: int = 60) -> bytes:
    cv2 = pytest.importorskip("cv2")
    y, x = np.mgrid[0:height, 0:width]
    pixels = np.stack([y * 4 + i, x * 3 + i, (x + y) * 2], -1).astype(np.uint8)
    return bytes(cv2.imencode(".jpg", pixels, [cv2.IMWRITE_JPEG_QUALITY, 95])[1].tobytes())


def images(folder: Path, num: int = 23, suffix: str = "tar", **options: Any) -> ShardedDataset:
    members = [m for i in range(num) for m in ((f"{i:03d}.cls", str(i).encode()), (f"{i:03d}.jpg", jpeg(i)))]
    write_tar(folder / f"a.{suffix}", members)
    source, catalog = str(folder / f"a.{suffix}"), str(folder / "c")
    return ShardedDataset(source, catalog=catalog, block_bytes=9000, **options)


def pixels_of(i: int, image: Image) -> Any:
    from dataflow.decode.image import decode_image

    return torch.from_numpy(decode_image(image, memoryview(jpeg(i)), None))


@pytest.mark.parametrize("suffix", ["tar", "tar.gz"])
def test_images_are_those_of_the_image_module(tmp_path: Path, suffix: str) -> None:
    pytest.importorskip("simplejpeg")
    image = Image(size=24, crop="center")
    dataset = images(tmp_path, suffix=suffix, decode={"jpg": image, "cls": "int"})
    with DataLoader(dataset, 10, shuffle=True) as loader:
        for batch in loader:
            assert batch["jpg"].shape == (len(batch["cls"]), 3, 24, 24)
            for pixels, i in zip(batch["jpg"], batch["cls"].tolist(), strict=True):
                assert torch.equal(pixels, pixels_of(i, image))


def test_images_without_a_size_keep_their_own(tmp_path: Path) -> None:
    pytest.importorskip("simplejpeg")
    write_tar(tmp_path / "a.tar", [("0.jpg", jpeg(0)), ("1.jpg", jpeg(1, 30, 20)), ("2.jpg", jpeg(2))])
    dataset = ShardedDataset(str(tmp_path / "a.tar"), catalog=str(tmp_path / "c"))
    batch = first(dataset)
    assert [tuple(t.shape) for t in batch["jpg"]] == [(3, 40, 60), (3, 30, 20), (3, 40, 60)]
    assert all(torch.equal(batch["jpg"][i], pixels_of(i, Image())) for i in (0, 2))
    with DataLoader(dataset, 1, shuffle=False) as loader:  # a list, though all of a batch have one size
        assert [tuple(t.shape) for t in next(iter(loader))["jpg"]] == [(3, 40, 60)]


# ---- columns --------------------------------------------------------------------------------------------


def test_a_kept_catalog_of_another_length_is_not_believed(tmp_path: Path) -> None:
    np.arange(100, dtype=np.uint16).tofile(tmp_path / "t.bin")
    for length in (4, 2, 4):
        options = {"format": "tokens", "dtype": "uint16", "length": length}
        dataset = ShardedDataset(str(tmp_path / "t.bin"), catalog=str(tmp_path / "c"), **options)
        assert len(dataset) == 99 // length
        assert first(dataset)["tokens"].shape[1] == length + 1


def test_columns_choose_rename_and_stack(tmp_path: Path) -> None:
    rows = 50
    table = pa.table({f"f{j}": np.arange(rows, dtype=np.float32) * (j + 1) for j in range(4)})
    table = table.append_column("y", pa.array(range(rows)))
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=8)
    source, options = str(tmp_path / "a.parquet"), {"catalog": str(tmp_path / "c")}
    dataset = ShardedDataset(
        source, columns={"x": ["f0", "f1", "f2", "f3"], "label": "y", "again": ["f2"]}, **options
    )
    with DataLoader(dataset, 7, Shuffle("window", 2)) as loader:
        for batch in loader:
            assert list(batch) == ["x", "label", "again"]
            want = batch["label"][:, None] * torch.arange(1, 5)
            assert torch.equal(batch["x"], want.float())
            assert torch.equal(batch["again"], want[:, 2].float())
    only = in_order(ShardedDataset(source, columns=["y"], **options), 4)[0]
    assert {k: v.tolist() for k, v in only.items()} == {"y": [0, 1, 2, 3]}


def test_one_column_may_be_delivered_twice_decoded_differently(tmp_path: Path) -> None:
    samples = [{"cls": str(i).encode()} for i in range(12)]
    dataset = tar_dataset(
        tmp_path, samples, columns={"n": "cls", "raw": "cls"}, decode={"n": "int", "raw": None}
    )
    batch = first(dataset)
    assert [int(bytes(row.tolist())) for row in batch["raw"].rows()] == batch["n"].tolist()


def test_keys_and_urls_are_columns_on_demand(tar: Made) -> None:
    dataset = tar.open(columns=["__key__", "cls", "__url__"])
    with DataLoader(dataset, 6, shuffle=True) as loader:
        for batch in loader:
            assert batch["__key__"] == [f"{i:05d}" for i in batch["cls"].tolist()]
            assert all(url.endswith(".tar") and "shard-" in url for url in batch["__url__"])
    assert in_order(tar.open(columns=["__url__"]))[0]["__url__"][0].endswith("shard-0.tar")


# ---- pickles and functions --------------------------------------------------------------------------------


def test_pickles_are_refused_unless_asked_for(tmp_path: Path) -> None:
    value = {"a": [1, 2]}
    write_tar(tmp_path / "a.tar", [("0.pkl", pickle.dumps(value)), ("0.cls", b"1")])
    source, options = str(tmp_path / "a.tar"), {"catalog": str(tmp_path / "c")}
    with pytest.raises(ValueError, match="unpickling runs code"):
        ShardedDataset(source, **options)
    assert first(ShardedDataset(source, decode={"pkl": "pickle"}, **options))["pkl"] == [value]
    assert list(first(ShardedDataset(source, columns=["cls"], **options))) == ["cls"]
    assert first(ShardedDataset(source, decode=None, **options))["pkl"].dtype == torch.uint8


def test_torch_files_are_loaded_without_pickles(tmp_path: Path) -> None:
    out = io.BytesIO()
    torch.save({"w": torch.arange(3)}, out)
    dataset = tar_dataset(tmp_path, [{"pth": out.getvalue()}], decode={"pth": "torch"})
    assert first(dataset)["pth"][0]["w"].tolist() == [0, 1, 2]


def test_an_object_array_in_npy_is_a_bad_sample(tmp_path: Path) -> None:
    out = io.BytesIO()
    np.save(out, np.array([{"a": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(SampleError, match="allow_pickle"):
        first(tar_dataset(tmp_path, [{"npy": out.getvalue()}]))


def test_a_function_of_bytes_decodes_a_column(tar: Made) -> None:
    dataset = tar.open(columns=["txt"], decode={"txt": lambda data: len(data)})
    assert in_order(dataset)[0]["txt"] == [len(tar_sample(i)["txt"].encode()) for i in range(5)]


# ---- collate, transforms ----------------------------------------------------------------------------------


def test_collate_gets_plain_samples_in_batch_order(tar: Made) -> None:
    def collate(samples: list[dict[str, Any]]) -> Any:
        return [(s["cls"], s["txt"], s["json"]["i"], s["npy"].shape, len(s["bin"])) for s in samples]

    batches = in_order(tar.open(), 4, collate_fn=collate)
    assert list(chain(*batches)) == [
        (i, tar_sample(i)["txt"], i, (3,), len(tar_sample(i)["bin"])) for i in range(NUM_SAMPLES)
    ]


def test_transformed_samples_are_collated_as_torch_does(parquet: Made) -> None:
    def transform(sample: dict[str, Any]) -> Any:
        return sample["label"], {"vec": sample["vec"] * 2}

    label, rest = in_order(parquet.open(transform=transform))[1]
    assert label.tolist() == [5, 6, 7, 8, 9]
    assert rest["vec"].tolist() == [[2 * v for v in plain_sample(i)["vec"]] for i in range(5, 10)]


def test_batch_transforms_run_last_and_may_return_anything(parquet: Made) -> None:
    dataset = parquet.open(columns=["label"], batch_transform=lambda batch: int(batch["label"].sum()))
    assert in_order(dataset) == [sum(range(i, min(i + 5, NUM_SAMPLES))) for i in range(0, NUM_SAMPLES, 5)]
    dataset = parquet.open(columns=["label"], batch_transform=lambda total: total + 1)
    assert in_order(dataset, collate_fn=lambda s: sum(x["label"] for x in s))[0] == 11


def test_samples_are_scalars_text_and_tensors(parquet: Made) -> None:
    seen: list[dict[str, Any]] = []
    in_order(parquet.open(), 50, collate_fn=seen.extend, workers="thread")
    sample = seen[3]
    assert type(sample["label"]) is int
    assert type(sample["x"]) is float
    assert type(sample["txt"]) is str
    assert sample["lst"].tolist() == [3, 4, 5]
    assert sample["vec"].dtype == torch.float32


# ---- arrays in .npy, against numpy ------------------------------------------------------------------------


@given(
    st.sampled_from(["<f4", ">f8", "|u1", "<i8", "|b1", "<c8", "<U3", "|S5", "<M8[ns]", "<f2"]),
    st.lists(st.integers(0, 3), max_size=4),
    st.sampled_from("CF"),
)
def test_npy_values_are_those_of_numpy(dtype: str, shape: list[int], order: Any) -> None:
    out = io.BytesIO()
    bits = np.random.default_rng(0).integers(0, 2, 4 * 81 * 20, dtype=np.uint8)
    values = (
        np.frombuffer(bits.tobytes(), dtype)[: int(np.prod(shape))]
        if dtype[1] != "U"
        else np.full(shape, "ab")
    )
    np.save(out, np.asarray(values.reshape(shape), order=order))
    want, got = np.load(io.BytesIO(out.getvalue())), from_npy(out.getvalue())
    assert (got.dtype, got.shape) == (want.dtype, want.shape)
    assert got.tobytes() == want.tobytes()
    assert got.flags.writeable
    assert got.flags.f_contiguous == want.flags.f_contiguous


@pytest.mark.parametrize("cut", [0, 5, 9, 11, 60, 127, 130])
def test_npy_values_that_are_cut_off_are_errors(cut: int) -> None:
    with pytest.raises((ValueError, EOFError)):
        from_npy(npy(np.arange(3.0))[:cut])


def test_structured_arrays_and_other_writers_headers_are_left_to_numpy() -> None:
    values = np.zeros(3, [("a", "<i4"), ("b", "<f8")])
    assert from_npy(npy(values)).dtype == values.dtype
    text = b"{'fortran_order': False, 'shape': (2,), 'descr': '<i2'}"
    header = text + b" " * (118 - len(text) - 1) + b"\n"
    data = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + b"\x01\x00\x02\x00"
    assert from_npy(data).tolist() == [1, 2]


# ---- numbers in text, against Python ----------------------------------------------------------------------


def spans_of(values: Sequence[bytes], gap: bytes = b"9") -> Spans:
    """Values in one buffer with digits between them, which must not be taken for theirs."""
    joined = gap + b"".join(value + gap for value in values)
    lengths = np.array([len(value) for value in values], np.int64)
    starts = 1 + np.cumsum(lengths + 1) - (lengths + 1)
    return Spans(np.frombuffer(joined, np.uint8), starts.astype(np.int64), lengths)


def parsed(parse: Callable[[Spans], Any], values: Sequence[bytes]) -> list[Any]:
    numbers, bad = parse(spans_of(values))
    wrong = {row for row, _ in bad}
    return [None if i in wrong else number for i, number in enumerate(numbers.tolist())]


def by_python(parse: Callable[[bytes], Any], value: bytes) -> Any:
    try:
        number = parse(value.strip())
    except ValueError:
        return None
    return number if parse is float or -(2**63) <= number < 2**63 else None


NUMBERS = st.one_of(
    st.integers(-(2**70), 2**70).map(lambda n: str(n).encode()),
    st.integers(0, 10**18).map(lambda n: str(n).encode()),
    st.integers(-(2**63) - 2, -(2**63) + 2).map(lambda n: str(n).encode()),
    st.integers(2**63 - 3, 2**63 + 3).map(lambda n: str(n).encode()),
    st.text("0123456789+-_ \n\t.eE\x00/:", max_size=22).map(str.encode),
    st.binary(max_size=6),
)


@given(st.lists(NUMBERS, max_size=8))
def test_integers_are_those_of_python(values: list[bytes]) -> None:
    assert parsed(parse_ints, values) == [by_python(int, value) for value in values]


@given(st.lists(st.integers(0, 10**18 - 1).map(lambda n: str(n).encode()), min_size=1, max_size=40))
def test_plain_digits_take_the_fast_way_to_the_same_integers(values: list[bytes]) -> None:
    assert parsed(parse_ints, values) == [int(value) for value in values]


@given(st.lists(st.integers(0, 10**30).map(lambda n: f"{n:0{n % 25}d}".encode()), min_size=1, max_size=9))
def test_leading_zeros_and_too_many_digits_are_read_right(values: list[bytes]) -> None:
    assert parsed(parse_ints, values) == [by_python(int, value) for value in values]


@given(st.lists(st.one_of(NUMBERS, st.floats(allow_nan=False).map(lambda x: repr(x).encode())), max_size=8))
def test_floats_are_those_of_python(values: list[bytes]) -> None:
    got, want = parsed(parse_floats, values), [by_python(float, value) for value in values]
    assert str(got) == str(want)  # NaN is NaN


def test_a_missing_value_is_bad_and_an_empty_one_too() -> None:
    column = Spans(np.frombuffer(b"12", np.uint8), np.array([0, 0, 1]), np.array([1, -1, 0]))
    numbers, bad = parse_ints(column)
    assert numbers.tolist() == [1, 0, 0]
    assert [row for row, _ in bad] == [1, 2]


@pytest.mark.parametrize("text", [b"", b"x", b"1.0", b"99999999999999999999", b"--1"])
def test_a_label_that_is_no_integer_names_its_sample(tmp_path: Path, text: bytes) -> None:
    dataset = tar_dataset(tmp_path, [{"cls": b"1"}, {"cls": text}])
    with pytest.raises(SampleError, match="not a number of type int64") as caught:
        first(dataset)
    assert caught.value.key == "1"
    assert isinstance(caught.value, DataflowError)


def test_delivered_rows_match_the_kit_for_every_batch_size(tar: Made) -> None:
    for batch_size in (1, 2, 46, 47, 48):
        with DataLoader(tar.open(), batch_size, shuffle=False) as loader:
            assert list(chain(*delivered(loader))) == tar.samples
    assert rows_of({"a": torch.tensor([1, 2])}) == [{"a": 1}, {"a": 2}]


@pytest.mark.parametrize("size", [32, None])
def test_normalised_images_are_float32_whatever_their_size(tmp_path: Path, size: int | None) -> None:
    simplejpeg = pytest.importorskip("simplejpeg")
    rng = np.random.default_rng(0)
    pixels = [rng.integers(0, 256, (40 + 9 * (i % 2), 50, 3), np.uint8) for i in range(6)]
    encoded = [simplejpeg.encode_jpeg(image) for image in pixels]
    spec = Image(size=size, mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.4), antialias=True)
    dataset = tar_dataset(tmp_path, [{"jpg": data} for data in encoded], decode={"jpg": spec})
    images = [image for batch in in_order(dataset, 4) for image in batch["jpg"]]
    assert {image.dtype for image in images} == {torch.float32}
    for image, data in zip(images, encoded, strict=True):
        assert torch.equal(image, torch.from_numpy(decode_image(spec, data)))
    assert torch.equal(dataset[3]["jpg"], images[3])
