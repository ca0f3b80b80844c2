"""Flat token files: one long array of integers, cut into windows by arithmetic alone.

Sample i of a shard is tokens [i*L, i*L + L] (both ends included): L inputs and, shifted by one, L targets,
so neighbouring samples share one token and a shard of T tokens has (T-1) // L samples. The tokens after
the last whole window (fewer than L + 1) are not used. Blocks hold whole samples and therefore overlap by
one token, too. Nothing is read but the header of a `.npy` file.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Sequence
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from sharding.blocks import Block, Columns, ColumnSpec, Format, Shard, ShardScan, Spans

_NPY_MAGIC = b"\x93NUMPY"
_NPY_LINE = re.compile(
    rb"\{'descr': '([^'\\]+)', 'fortran_order': (False|True), "
    rb"'shape': \(((?:\d+,(?: \d+(?:, \d+)*)?)?)\), \}\s*"
)
"""The header that `numpy.save` writes of a plain array."""
_HEADER_BYTES = 4096
"""More than the header of any plain array."""
_SIDECAR_BYTES = 1 << 16
SIDECAR_SUFFIX = ".json"
"""The suffix of the file beside a `.bin` that describes it: {"dtype": name, "length": number or null,
...}."""
_HEADER = 1024
"""Bytes of llm.c's header: magic, version, number of tokens, and what is not used, as int32."""
_MAGICS = {20240520: (1, "uint16"), 20240801: (7, "uint32")}
"""By magic, the version that is known and the dtype of tokens: GPT-2's, as in speed runs, and Llama 3's."""
COLUMN = "tokens"
"""Name of the only column."""


class TokensFormat(Format):
    """Windows of `length` + 1 tokens over `.bin` (raw, native byte order) and 1-D `.npy` files.

    Args:
        dtype: numpy integer dtype of a token; None: `.npy` files tell it themselves, of `.bin` files the
            `.json` beside them does that `ShardWriter` writes.
        length: tokens a sample is trained on; a sample holds one more. None: the `.json` tells.
        header: bytes before the tokens of `.bin`, which are skipped. None: those of llm.c's header, if the
            file begins with its magic; 0: the file is raw.

    Thread-safe, stateless: blocks carry dtype and length, so a saved catalog decodes as it was indexed.
    """

    name = "tokens"
    token_column = COLUMN
    has_empty_samples = False
    may_lack_sibling = True
    header: int | None = None

    def __init__(
        self, *, dtype: str | None = None, length: int | None = None, header: int | None = None
    ) -> None:
        if header is not None and (not isinstance(header, int) or header < 0):
            raise ValueError(f"header must be >= 0 (bytes before the tokens), got {header!r}")
        if length is not None and (not isinstance(length, int | np.integer) or length < 1):
            raise ValueError(f"length must be >= 1 (tokens a sample), got {length!r}")
        if dtype is not None and (np.dtype(dtype).kind not in "iu" or not np.dtype(dtype).isnative):
            raise ValueError(f"dtype must be an integer type in native byte order, got {dtype!r}")
        self.dtype = None if dtype is None else np.dtype(dtype).name
        self.length: int | None = None if length is None else int(length)
        self.header = header
        if self.dtype is None or length is None:
            self.sibling_suffix = SIDECAR_SUFFIX

    def options(self) -> dict[str, str | int]:
        """Return the options that shape the blocks; see `Format.options`."""
        options = {"dtype": self.dtype, "length": self.length, "header": self.header}
        return {name: value for name, value in options.items() if value is not None}

    def scan(
        self, file: BinaryIO, shard: Shard, *, block_bytes: int, sibling: BinaryIO | None = None
    ) -> ShardScan:
        """Cut the file into blocks of whole samples; reads at most a header, and the `.json` beside it.

        Raises:
            CorruptShardError: a size that is no multiple of the dtype's, a `.npy` header that is broken or
                tells another array than 1-D integers of `dtype`, a `.json` that does not fit the file, or
                nothing that tells dtype or length.
        """
        size = file.seek(0, io.SEEK_END)
        file.seek(0)
        described = {} if sibling is None else _sidecar(sibling, shard, size)
        length = self.length or described.get("length")
        if length is None:
            reason = f"format {self.name!r} needs length= (tokens a sample, >= 1): nothing beside it tells"
            raise shard.corrupt(reason)
        if file.read(6) == _NPY_MAGIC:
            dtype, start, num_tokens = self._npy(file, shard, size)
        else:
            file.seek(0)
            header = 0 if described else self.header
            dtype, start, num_tokens = self._raw(
                file, shard, size, self.dtype or described.get("dtype"), header
            )
        return self.windows(start, num_tokens, dtype, length, block_bytes)

    def windows(
        self, start: int, num_tokens: int, dtype: np.dtype[Any], length: int, block_bytes: int
    ) -> ShardScan:
        """Blocks of windows over `num_tokens` tokens that begin at byte `start`."""
        num_samples = max(0, num_tokens - 1) // length
        per_block = max(1, block_bytes // (length * dtype.itemsize))
        first = np.arange(0, num_samples, per_block, dtype=np.int64)
        samples = np.minimum(per_block, num_samples - first)
        nbytes = (samples * length + 1) * dtype.itemsize
        return ShardScan(
            offset=start + first * length * dtype.itemsize,
            length=nbytes,
            nbytes=nbytes.copy(),
            num_samples=samples,
            schema={COLUMN: ColumnSpec("fixed", dtype.name, (length + 1,))},
            footer=f"{dtype.name} {length}".encode(),
        )

    def check(self, block: Block) -> None:
        """Raise `ValueError` where the block has other bytes than its windows take."""
        dtype, length = _geometry(block)
        if dtype.kind not in "iu" or length < 1:
            raise ValueError(f"windows of {length} {dtype} tokens")
        check_tokens(block, dtype, block.num_samples * length + 1)

    def locate(self, block: Block, columns: Sequence[str] | None) -> dict[str, Spans] | None:
        """Sample i of the block: `length` + 1 tokens from token i * `length`."""
        if not wants_tokens(block, columns):
            return {}
        dtype, length = _geometry(block)
        starts = np.arange(block.num_samples, dtype=np.int64) * (length * dtype.itemsize)
        sizes = np.full(block.num_samples, (length + 1) * dtype.itemsize, np.int64)
        return {COLUMN: Spans(np.empty(0, np.uint8), starts, sizes)}

    def decode(self, block: Block, data: memoryview, columns: Sequence[str] | None) -> Columns:
        """{"tokens": [n, length + 1]}, a read-only strided view of `data`.

        Raises:
            CorruptShardError: a column other than "tokens", or too few bytes.
        """
        if not wants_tokens(block, columns):
            return {}
        dtype, length = _geometry(block)
        flat = tokens_in(block, data, dtype, block.num_samples * length + 1)
        shape, strides = (block.num_samples, length + 1), (length * dtype.itemsize, dtype.itemsize)
        return {COLUMN: np.lib.stride_tricks.as_strided(flat, shape, strides, writeable=False)}

    def _raw(
        self, file: BinaryIO, shard: Shard, size: int, name: str | None, start: int | None
    ) -> tuple[np.dtype[Any], int, int]:
        if start is None:
            name, start = _header(file.read(12), shard, size, name)
        if name is None:
            reason = "a raw token file does not tell its dtype; pass dtype=, for example dtype='uint16'"
            raise shard.corrupt(reason)
        dtype = np.dtype(name)
        nbytes = max(0, size - start)
        if nbytes % dtype.itemsize:
            reason = f"{nbytes} bytes are no whole number of {dtype.name} tokens of {dtype.itemsize} bytes"
            raise shard.corrupt(reason, size - nbytes % dtype.itemsize)
        return dtype, start, nbytes // dtype.itemsize

    def _npy(self, file: BinaryIO, shard: Shard, size: int) -> tuple[np.dtype[Any], int, int]:
        shape, dtype = _npy_header(file, shard)
        start = file.tell()
        if len(shape) != 1 or dtype.kind not in "iu" or not dtype.isnative:
            reason = f"tokens must be a 1-D array of integers in native byte order, got {dtype.str}{shape}"
            raise shard.corrupt(reason, 0)
        if self.dtype not in (None, dtype.name):
            raise shard.corrupt(f"tokens are {dtype.name}, not dtype={self.dtype!r}", 0)
        if start + shape[0] * dtype.itemsize != size:
            reason = f"{size - start} bytes where the header tells {shape[0]} {dtype.name} tokens"
            raise shard.corrupt(reason, start)
        return dtype, start, shape[0]


def _header(head: bytes, shard: Shard, size: int, name: str | None) -> tuple[str | None, int]:
    """The dtype of a raw file's tokens, and where they begin: behind llm.c's header, if it has one."""
    magic, version, count = np.frombuffer(head.ljust(12, b"\0"), "<i4").tolist()
    if magic not in _MAGICS:
        return name, 0
    known, dtype = _MAGICS[magic][0], name or _MAGICS[magic][1]
    if version != known or _HEADER + count * np.dtype(dtype).itemsize != size:
        raise shard.corrupt(
            f"it begins as llm.c's header does (magic {magic}), with version {version}, of which {known} is "
            f"known, and {count} tokens, which should be {dtype} and take the rest of its {size} bytes: "
            "header=1024 skips it, header=0 reads it as tokens",
            0,
        )
    return dtype, _HEADER


def _sidecar(file: BinaryIO, shard: Shard, size: int) -> dict[str, Any]:
    """Read the `.json` beside a token file: {} where it is about something else."""
    raw = file.read(_SIDECAR_BYTES)
    try:
        described = json.loads(raw)
    except ValueError as error:
        reason = f"the {SIDECAR_SUFFIX} beside it is no JSON, or longer than {_SIDECAR_BYTES} bytes"
        raise shard.corrupt(reason) from error
    if not isinstance(described, dict) or described.get("format") != "tokens":
        return {}
    name, length, count = described.get("dtype"), described.get("length"), described.get("num_tokens")
    try:
        width = np.dtype(name).itemsize if isinstance(name, str) and np.dtype(name).kind in "iu" else 0
    except TypeError:
        width = 0
    fits = type(count) is int and width and count * width == size
    if not fits or not (length is None or (type(length) is int and length >= 1)):
        reason = (
            f"the {SIDECAR_SUFFIX} beside it tells {count!r} tokens of {name!r}, length {length!r}, "
            f"which do not fit its {size} bytes"
        )
        raise shard.corrupt(reason)
    return described


def check_tokens(block: Block, dtype: np.dtype[Any], count: int) -> None:
    """Raise `ValueError` where the block has other bytes than that many tokens."""
    if not block.length == block.nbytes == count * dtype.itemsize:
        raise ValueError(f"{block.length} bytes where {count} {dtype.name} tokens are indexed")


def tokens_in(block: Block, data: memoryview, dtype: np.dtype[Any], count: int) -> NDArray[Any]:
    """The block's bytes as that many tokens, a view."""
    if len(data) != count * dtype.itemsize:
        raise block.corrupt(f"{len(data)} bytes where {count} {dtype.name} tokens were indexed")
    return np.frombuffer(data, dtype)


def wants_tokens(block: Block, columns: Sequence[str] | None) -> bool:
    """Return whether the only column is wanted; any other name raises `CorruptShardError`."""
    if columns is None:
        return True
    for name in columns:
        if name != COLUMN:
            raise block.corrupt(f"no column {name!r}; the shard has {COLUMN}")
    return len(columns) > 0


def _geometry(block: Block) -> tuple[np.dtype[Any], int]:
    dtype, length = bytes(block.footer).decode().split()
    return np.dtype(dtype), int(length)


def _npy_header(file: BinaryIO, shard: Shard) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Shape and dtype; leaves the file at the first token. 1-D arrays are in C and Fortran order alike."""
    file.seek(0)
    plain = plain_header(file.read(_HEADER_BYTES))
    if plain is not None:
        dtype, _, shape, start = plain
        file.seek(start)
        return shape, dtype
    file.seek(0)
    try:
        version = np.lib.format.read_magic(file)
        read = (
            np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        )
        shape, _, dtype = read(file)
    except ValueError as error:
        raise shard.corrupt(f"broken .npy header: {error}", 0) from error
    return shape, dtype


def plain_header(data: bytes | memoryview) -> tuple[np.dtype[Any], bool, tuple[int, ...], int] | None:
    """dtype, Fortran order, shape and first data byte, from the first bytes of a `.npy` value.

    numpy evaluates the header with `ast.literal_eval`, which takes the GIL for 20 us and now and then fails
    where several threads do it at once (gh-106905, seen with CPython 3.11.7: "SystemError: AST constructor
    recursion depth mismatch"). The one fixed line that it writes of a plain array is matched here; anything
    else is None, and for numpy to read.
    """
    head = bytes(data[:12])
    if head[:6] != _NPY_MAGIC or len(head) < 12 or head[6] not in (1, 2, 3):
        return None
    start = 10 if head[6] == 1 else 12
    end = start + int.from_bytes(head[8:start], "little")
    match = _NPY_LINE.fullmatch(bytes(data[start:end])) if end <= len(data) else None
    if match is None:
        return None
    descr, fortran, shape = match.groups()
    dtype = np.dtype(descr.decode())
    if dtype.hasobject:
        return None
    return dtype, fortran == b"True", tuple(int(n) for n in shape.replace(b" ", b"").split(b",") if n), end
