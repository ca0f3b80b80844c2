from __future__ import annotations

import io

import numpy as np
import pytest
from formats_kit import blocks_of, decoded_blocks, scan_of, shard_of
from hypothesis import given, strategies as st

from sharding.errors import CorruptShardError
from sharding.formats.tokens import TokensFormat

DTYPES = st.sampled_from(["uint8", "uint16", "int32", "uint32", "int64"])


def tokens_of(count: int, dtype: str) -> np.ndarray:
    return np.random.default_rng(count).integers(0, 100, count).astype(dtype)


def windows(tokens: np.ndarray, length: int) -> np.ndarray:
    """The oracle: one slice a sample."""
    rows = [tokens[i : i + length + 1] for i in range(0, len(tokens) - length, length)]
    return np.array(rows, tokens.dtype).reshape(-1, length + 1)


def npy(array: np.ndarray, version: tuple[int, int] | None = None) -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array(file, array, version=version)
    return file.getvalue()


@given(st.integers(0, 300), st.integers(1, 40), st.integers(1, 500), DTYPES, st.booleans())
def test_all_windows_equal_slicing(count, length, block_bytes, dtype, as_npy):
    tokens = tokens_of(count, dtype)
    fmt = TokensFormat(dtype=dtype, length=length)
    content = npy(tokens) if as_npy else tokens.tobytes()
    blocks = decoded_blocks(fmt, content, "t.npy" if as_npy else "t.bin", block_bytes=block_bytes)
    got = [block["tokens"] for block in blocks] or [np.empty((0, length + 1), dtype)]
    assert all(part.dtype == dtype for part in got)
    np.testing.assert_array_equal(np.concatenate(got), windows(tokens, length))
    assert sum(map(len, got)) == max(0, count - 1) // length


def test_blocks_are_near_the_asked_size_and_share_one_token():
    scan = scan_of(TokensFormat(dtype="uint16", length=16), bytes(100_000), "t.bin", 4096)
    assert (scan.length[:-1] == 4096 + 2).all()
    assert (scan.offset[1:] == (scan.offset + scan.length - 2)[:-1]).all()
    assert scan.nbytes.tolist() == scan.length.tolist()
    assert scan.schema["tokens"].shape == (17,)


def test_a_sample_larger_than_a_block_is_a_block():
    scan = scan_of(TokensFormat(dtype="uint16", length=1000), bytes(2 * 3001), "t.bin", 64)
    assert scan.num_samples.tolist() == [1, 1, 1]


def with_header(tokens: np.ndarray, magic: int, version: int, count: int | None = None) -> bytes:
    """A file of llm.c."""
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, len(tokens) if count is None else count
    return header.tobytes() + tokens.tobytes()


HEADERS = st.sampled_from([(20240520, 1, "uint16"), (20240801, 7, "uint32")])


@given(st.integers(0, 300), st.integers(1, 40), st.integers(1, 500), HEADERS, st.booleans())
def test_a_header_of_llm_c_is_skipped_and_says_the_dtype(count, length, block_bytes, header, is_named):
    magic, version, dtype = header
    tokens = tokens_of(count, dtype)
    content = with_header(tokens, magic, version)
    for fmt in (
        TokensFormat(dtype=dtype if is_named else None, length=length),
        TokensFormat(dtype=dtype, length=length, header=1024),
    ):
        blocks = decoded_blocks(fmt, content, "t.bin", block_bytes=block_bytes)
        got = [block["tokens"] for block in blocks] or [np.empty((0, length + 1), dtype)]
        np.testing.assert_array_equal(np.concatenate(got), windows(tokens, length))
    raw = decoded_blocks(TokensFormat(dtype=dtype, length=1, header=0), content, "t.bin")
    assert raw[0]["tokens"].ravel()[: 4 // tokens.itemsize].tobytes() == np.int32(magic).tobytes()[:4]


@pytest.mark.parametrize(
    ("content", "dtype", "says"),
    [
        (with_header(tokens_of(9, "uint16"), 20240520, 2), "uint16", "version 2, of which 1 is known"),
        (
            with_header(tokens_of(9, "uint16"), 20240520, 1, 8),
            "uint16",
            "and 8 tokens, which should be uint16",
        ),
        (with_header(tokens_of(9, "uint32"), 20240801, 7), "uint16", "take the rest of its 1060 bytes"),
        (with_header(tokens_of(9, "uint16"), 20240801, 7), None, "uint32 and take the rest"),
        (np.int32(20240520).tobytes(), "uint16", "version 0"),
    ],
)
def test_a_header_that_does_not_fit_is_an_error_that_names_the_ways_on(content, dtype, says):
    with pytest.raises(CorruptShardError, match=f"magic 202.*{says}.*header=1024 skips it, header=0 reads"):
        scan_of(TokensFormat(dtype=dtype, length=2), content, "t.bin")


def test_a_header_is_an_option_that_a_catalog_keeps():
    assert TokensFormat(length=4, header=0).options() == {"length": 4, "header": 0}
    with pytest.raises(ValueError, match="header must be >= 0"):
        TokensFormat(length=4, header=-1)


def test_windows_are_read_only_views_of_the_block():
    content = tokens_of(1000, "uint16").tobytes()
    (columns,) = decoded_blocks(TokensFormat(dtype="uint16", length=9), content, "t.bin")
    values = columns["tokens"]
    assert values.strides == (18, 2)
    assert not values.flags.owndata
    assert not values.flags.writeable


@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
def test_every_npy_version_tells_its_own_dtype(version):
    tokens = tokens_of(50, "uint32")
    (columns,) = decoded_blocks(TokensFormat(length=7), npy(tokens, version), "t.npy")
    np.testing.assert_array_equal(columns["tokens"], windows(tokens, 7))


def test_blocks_decode_as_they_were_indexed():
    content = tokens_of(100, "int32").tobytes()
    scan = scan_of(TokensFormat(dtype="int32", length=10), content, "t.bin")
    (block,) = blocks_of(scan, shard_of(content, "t.bin"))
    other = TokensFormat(dtype="uint8", length=3)
    assert other.decode(block, memoryview(content)[: block.length], None)["tokens"].shape == (9, 11)


@pytest.mark.parametrize("count", [0, 1, 8])
def test_too_few_tokens_give_no_samples(count):
    content = tokens_of(count, "uint16").tobytes()
    assert len(scan_of(TokensFormat(dtype="uint16", length=8), content, "t.bin").offset) == 0


def test_too_few_bytes_are_noticed():
    content = tokens_of(20, "uint16").tobytes()
    fmt = TokensFormat(dtype="uint16", length=4)
    (block,) = blocks_of(scan_of(fmt, content, "t.bin"), shard_of(content, "t.bin"))
    with pytest.raises(CorruptShardError, match="32 bytes where 17 uint16 tokens") as caught:
        fmt.decode(block, memoryview(content)[:32], None)
    assert caught.value.stage == "decode"


def scan_error(content: bytes, url: str, **options) -> CorruptShardError:
    with pytest.raises(CorruptShardError) as caught:
        scan_of(TokensFormat(length=4, **options), content, url)
    assert (caught.value.shard, caught.value.stage) == (url, "index")
    return caught.value


def test_a_raw_file_asks_for_its_dtype():
    assert "pass dtype=" in scan_error(bytes(10), "t.bin").reason


def test_an_odd_size_names_size_and_dtype():
    error = scan_error(bytes(11), "t.bin", dtype="uint16")
    assert "11 bytes" in error.reason
    assert "uint16" in error.reason
    assert error.offset == 10


@pytest.mark.parametrize(
    "array",
    [np.zeros((3, 3), np.int32), np.zeros(9, np.float32), np.zeros(9, ">i4"), np.array(3), np.zeros(9, "U3")],
    ids=lambda a: f"{a.dtype.str}{a.shape}",
)
def test_other_arrays_than_flat_integers_are_refused(array):
    assert "1-D array of integers" in scan_error(npy(array), "t.npy").reason


def test_a_npy_file_of_another_dtype_is_refused():
    assert (
        "are int32, not dtype='uint16'"
        in scan_error(npy(np.zeros(9, np.int32)), "t.npy", dtype="uint16").reason
    )


def test_every_truncation_of_a_npy_file_is_noticed():
    content = npy(np.zeros(9, np.int32))
    for size in range(6, len(content)):
        scan_error(content[:size], "t.npy")
