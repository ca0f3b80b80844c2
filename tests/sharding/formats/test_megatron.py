from __future__ import annotations

import io
import struct

import numpy as np
import pytest
from formats_kit import blocks_of, decoded_blocks, scan_of, shard_of
from hypothesis import given, strategies as st

from sharding.errors import CorruptShardError
from sharding.formats.megatron import MegatronFormat

CODES = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "uint16": 8}
URL = "corpus_text_document.bin"

Documents = list[list[list[int]]]
"""Documents of sequences of tokens."""


def written(documents: Documents, dtype: str = "uint16", modes: bool = False) -> tuple[bytes, bytes]:
    """(.bin, .idx) as Megatron's builder writes them: field by field."""
    sequences = [sequence for document in documents for sequence in document]
    tokens = [np.array(sequence, dtype).tobytes() for sequence in sequences]
    idx = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, CODES[dtype], len(sequences), len(documents) + 1)
    idx += b"".join(struct.pack("<i", len(sequence)) for sequence in sequences)
    at = 0
    for piece in tokens:
        idx += struct.pack("<q", at)
        at += len(piece)
    bound = 0
    idx += struct.pack("<q", 0)
    for document in documents:
        bound += len(document)
        idx += struct.pack("<q", bound)
    return b"".join(tokens), idx + (bytes(len(sequences)) if modes else b"")


def flat(document: list[list[int]]) -> list[int]:
    return [token for sequence in document for token in sequence]


def decoded_documents(documents: Documents, block_bytes: int, **options) -> list[list[int]]:
    content, idx = written(documents, **options)
    more = {"block_bytes": block_bytes, "sibling": io.BytesIO(idx)}
    blocks = decoded_blocks(MegatronFormat(), content, URL, **more)
    return [block["tokens"].value(i).tolist() for block in blocks for i in range(len(block["tokens"]))]


DOCUMENTS = st.lists(st.lists(st.lists(st.integers(0, 99), max_size=5), max_size=4), max_size=8)


@given(DOCUMENTS, st.sampled_from(list(CODES)), st.integers(1, 60), st.booleans())
def test_all_documents_come_back(documents, dtype, block_bytes, modes):
    got = decoded_documents(documents, block_bytes, dtype=dtype, modes=modes)
    assert got == [flat(document) for document in documents]


@given(DOCUMENTS, st.integers(1, 60))
def test_located_bytes_are_the_documents(documents, block_bytes):
    content, idx = written(documents, "int32")
    fmt = MegatronFormat()
    got = []
    scan = scan_of(fmt, content, URL, block_bytes, sibling=io.BytesIO(idx))
    for block in blocks_of(scan, shard_of(content, URL)):
        spans = fmt.locate(block, None)["tokens"]
        for start, size in zip(spans.starts + block.offset, spans.lengths, strict=True):
            got.append(np.frombuffer(content[start : start + size], np.int32).tolist())
    assert got == [flat(document) for document in documents]


@given(DOCUMENTS, st.integers(1, 9), st.integers(1, 60))
def test_windows_run_over_all_documents(documents, length, block_bytes):
    content, idx = written(documents, "int32")
    fmt = MegatronFormat(length=length)
    blocks = decoded_blocks(fmt, content, URL, block_bytes=block_bytes, sibling=io.BytesIO(idx))
    tokens = [token for document in documents for token in flat(document)]
    want = [tokens[i : i + length + 1] for i in range(0, len(tokens) - length, length)]
    assert [row for block in blocks for row in block["tokens"].tolist()] == want


@given(st.lists(st.integers(0, 40), min_size=1, max_size=30), st.integers(1, 60))
def test_blocks_cover_the_tokens_and_none_is_empty(sizes, block_bytes):
    content, idx = written([[[1] * size] for size in sizes], "uint8")
    scan = scan_of(MegatronFormat(), content, URL, block_bytes, sibling=io.BytesIO(idx))
    assert scan.num_samples.sum() == len(sizes)
    assert scan.length.sum() == len(content)
    assert (scan.length > 0).all() or not content
    assert ((scan.length <= block_bytes) | (scan.length <= max(sizes))).all()


def test_the_schema_tells_the_range_of_document_sizes():
    content, idx = written([[[1, 2], [3]], [[4]], [[5] * 9]])
    spec = scan_of(MegatronFormat(), content, URL, sibling=io.BytesIO(idx)).schema["tokens"]
    assert (spec.kind, spec.dtype, spec.size_range) == ("list", "uint16", (1, 9))


def test_a_document_is_a_view_of_the_block():
    content, idx = written([[[1, 2], [3]], [[4]]])
    (block,) = decoded_blocks(MegatronFormat(), content, URL, sibling=io.BytesIO(idx))
    assert not block["tokens"].buffer.flags.owndata


def test_projection_knows_one_column():
    content, idx = written([[[1, 2], [3]]])
    fmt = MegatronFormat()
    (block,) = blocks_of(scan_of(fmt, content, URL, sibling=io.BytesIO(idx)), shard_of(content, URL))
    assert fmt.decode(block, memoryview(content), []) == {}
    assert fmt.locate(block, []) == {}
    with pytest.raises(CorruptShardError, match="no column 'x'; the shard has tokens"):
        fmt.decode(block, memoryview(content), ["x"])


def test_too_few_bytes_are_noticed():
    content, idx = written([[[1, 2], [3]]])
    fmt = MegatronFormat()
    (block,) = blocks_of(scan_of(fmt, content, URL, sibling=io.BytesIO(idx)), shard_of(content, URL))
    with pytest.raises(CorruptShardError, match="4 bytes where 3 uint16 tokens"):
        fmt.decode(block, memoryview(content)[:4], None)


def scan_error(content: bytes, idx: bytes) -> CorruptShardError:
    with pytest.raises(CorruptShardError) as caught:
        scan_of(MegatronFormat(), content, URL, sibling=io.BytesIO(idx))
    assert (caught.value.shard, caught.value.stage) == (URL, "index")
    return caught.value


def test_a_missing_index_is_named():
    with pytest.raises(CorruptShardError, match=r"\.idx"):
        scan_of(MegatronFormat(), b"", URL)


def test_every_truncation_of_the_index_is_noticed():
    content, idx = written([[[1, 2], [3]], [[4, 5, 6]], [[7]]])
    for size in range(len(idx)):
        scan_error(content, idx[:size])


def patched(idx: bytes, at: int, code: str, value: int) -> bytes:
    changed = bytearray(idx)
    struct.pack_into(f"<{code}", changed, at, value)
    return bytes(changed)


@pytest.mark.parametrize(
    ("at", "code", "value", "reason", "offset"),
    [
        (0, "B", 65, "not a Megatron index", 0),
        (9, "Q", 2, "version 2", 9),
        (17, "B", 9, "unknown dtype code 9", 17),
        (18, "Q", 1 << 60, "sequences", None),
        (34, "i", -1, "sequence 0 of -1 tokens", 46),
        (34, "i", 3, "sequence 1", 54),
        (54, "q", 1, "sequence 1 of 1 tokens at byte 1", 54),
        (70, "q", 1, "document bounds", 70),
        (78, "q", 5, "document bounds", 70),
        (86, "q", 2, "document bounds", 70),
    ],
)
def test_a_contradiction_in_the_index_names_its_offset(at, code, value, reason, offset):
    content, idx = written([[[1, 2], [3]], [[4, 5, 6]]])
    error = scan_error(content, patched(idx, at, code, value))
    assert reason in error.reason
    assert offset is None or error.offset == offset


def test_a_short_bin_is_noticed():
    content, idx = written([[[1, 2], [3]], [[4, 5, 6]]])
    assert "6 uint16 tokens are indexed, the .bin has 11 bytes" in scan_error(content[:-1], idx).reason


@pytest.mark.parametrize("length", [0, -3, 2.5])
def test_options_are_checked_at_construction(length):
    with pytest.raises(ValueError, match="length must be >= 1"):
        MegatronFormat(length=length)
