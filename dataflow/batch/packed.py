"""Packed and padded tensors from ragged values: what length-aware batches deliver.

A plan (`sharding.lengths.unit_plan`) says which segments of which samples form each row; here their values
become tensors, without a loop over rows or samples. Values arrive as `Ragged` rows in the order of the
segments, so a packed row is a run of them, followed by padding: segment ids and positions are counted out by
repeating numbers, and the values are laid in through one mask.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dataflow.ragged import Ragged
from dataflow.tables import described, one_line
from sharding.lengths.batching import Batching, Packed
from sharding.lengths.units import BatchSegments, Segments
from sharding.order.windows import ranges
from sharding.spans import Bytes, Ints

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
Allocate = Callable[[int], Bytes]
"""Bytes -> memory that is aligned to 16 bytes, of any content."""


IGNORE = -100
"""The target that `torch.nn.functional.cross_entropy` ignores."""


def _new(nbytes: int) -> Bytes:
    return np.empty(nbytes, np.uint8)


class PackedSegments(NamedTuple):
    """The part of its document that each segment is, all int64 [segments].

    In the order of the segments, and of the columns that come once a segment.
    """

    row: Tensor
    """The row that it lies in."""
    start: Tensor
    """Its first element's place in the row."""
    begin: Tensor
    """Its first element's place in the document: 0 unless the document was split."""
    length: Tensor
    """Number of elements of the segment."""


class PackedRows(NamedTuple):
    """A packed column. A named tuple, so that helpers that move batches to a device walk into it.

    The methods work on any device; in a `batch_transform` they run in the loader's threads.

    Examples:
        >>> dataset = ShardedDataset("tokens/*.parquet")
        >>> with DataLoader(dataset, batch_size=1, batching=Packed(12, "tokens")) as loader:
        ...     rows = next(iter(loader))["tokens"]
        >>> rows.tokens.shape == rows.segment_ids.shape == rows.positions.shape == (1, 12)
        True
    """

    tokens: Tensor
    """[rows, length], int64 or the dtype of what is no integer; `pad` behind the last segment of a row. Of
    arrays [n, ...] it is [rows, length, ...], as they are stored."""
    segment_ids: Tensor
    """int32 [rows, length]: 1 for the first segment of a row, 2 for the second ...; 0 for padding."""
    positions: Tensor
    """int32 [rows, length]: place in the segment, from 0; 0 for padding."""
    cu_seqlens: Tensor
    """int32 [segments + 1]: where segments begin in `tokens.reshape(-1)`, for attention kernels that take
    sequences of varying length; the padding of a row counts as one more segment, so the last entry is
    rows x length."""
    max_seqlen: int
    """The longest segment, padding included."""
    segments: PackedSegments
    """The segments, padding left out."""

    def __repr__(self) -> str:
        return described(self, lambda: one_line("PackedRows", _packed_line(self)))

    def targets(
        self, values: Tensor | None = None, *, mask: Tensor | None = None, ignore: int = IGNORE
    ) -> Tensor:
        """Return what is to be predicted at each place: the next token of the same segment.

        Args:
            values: another packed column to take instead of the tokens.
            mask: a packed column that is not 0 at the tokens that are to be predicted.
            ignore: what stands at the last token of a segment, in padding, and where `mask` is 0.

        Returns:
            [rows, length].
        """
        values = self.tokens if values is None else values
        counts = self.segment_ids[:, 1:] == self.segment_ids[:, :-1]
        counts &= self.segment_ids[:, 1:] > 0
        if mask is not None:
            counts &= mask[:, 1:] != 0
        out = torch.full_like(values, ignore)
        out[:, :-1] = torch.where(counts, values[:, 1:], ignore)
        return out

    def attention_mask(self, *, causal: bool = True) -> Tensor:
        """Return which places each may attend to: bool [rows, 1, length, length], as SDPA's `attn_mask`.

        A segment sees itself, up to the place itself if `causal`. Padding sees padding: a place that sees
        nothing would be NaN.
        """
        mask = self.segment_ids[:, None, :, None] == self.segment_ids[:, None, None, :]
        return mask.tril_() if causal else mask

    def mask_mod(self, *, causal: bool = True) -> MaskMod:
        """The same as a function of (batch, head, query, key), for PyTorch's flex attention."""
        ids = self.segment_ids

        def same_segment(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return ids[row, query] == ids[row, key]

        def not_later(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return (query >= key) & (ids[row, query] == ids[row, key])

        return not_later if causal else same_segment

    def block_mask(self, *, causal: bool = True, block_size: int = 128) -> BlockMask:
        """The same as flex attention's `BlockMask`, for queries, keys and values [rows, heads, length, dim].

        It equals what `create_block_mask(rows.mask_mod(), ...)` finds by asking for every pair of places. As
        segments follow one another in a row, those at the ends of two blocks tell: [rows, blocks, blocks].
        """
        from torch.nn.attention.flex_attention import BlockMask

        length = self.segment_ids.shape[1]
        ids = self.segment_ids.masked_fill(self.segment_ids == 0, length + 1)  # padding comes last
        ends = torch.arange(block_size - 1, length + block_size - 1, block_size, device=ids.device)
        first, last = ids[:, ::block_size], ids[:, ends.clamp(max=length - 1)]
        some = (first[:, :, None] <= last[:, None, :]) & (first[:, None, :] <= last[:, :, None])
        every = (first[:, :, None] == last[:, None, :]) & (first[:, None, :] == last[:, :, None])
        if length % block_size:  # flex attention takes the rest of the last block for masked
            every[:, -1], every[:, :, -1] = False, False
        if causal:
            some, every = some.tril(), every.tril(-1)
        partial = some & ~every
        return BlockMask.from_kv_blocks(
            partial.sum(-1, dtype=torch.int32)[:, None],
            partial.int().argsort(dim=-1, descending=True, stable=True).int()[:, None],
            every.sum(-1, dtype=torch.int32)[:, None],
            every.int().argsort(dim=-1, descending=True, stable=True).int()[:, None],
            BLOCK_SIZE=block_size,
            mask_mod=self.mask_mod(causal=causal),
            seq_lengths=(length, length),
        )

    def document_ids(self) -> Tensor:
        """Return which segment each place is of, counted through the batch: int32 [rows, length].

        Where `cu_seqlens` counts them, so padding has numbers, too; for masks over all rows laid end to end.
        """
        lengths = self.cu_seqlens.diff()
        numbers = torch.arange(len(lengths), dtype=torch.int32, device=lengths.device)
        return numbers.repeat_interleave(lengths).reshape(self.segment_ids.shape)

    def varlen_arguments(self) -> dict[str, Any]:
        """Keyword arguments of `flash_attn_varlen_func`, for queries, keys and values [rows x length, ...].

        Their values, in this order, are those that `torch.nn.attention.varlen.varlen_attn` takes.
        """
        return {
            "cu_seqlens_q": self.cu_seqlens,
            "cu_seqlens_k": self.cu_seqlens,
            "max_seqlen_q": self.max_seqlen,
            "max_seqlen_k": self.max_seqlen,
        }

    def flattened(
        self,
        labels: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        ignore: int = IGNORE,
        model: Any = None,
    ) -> dict[str, Any]:
        """The segments one after the other without padding: arguments of a text model of `transformers`.

        They are those of its `DataCollatorWithFlattening`: `input_ids`, `labels` (the model shifts them),
        `position_ids` and `seq_idx`, all [1, tokens], and what flash attention takes. Models that see
        pictures need others, and are silently wrong with these: take `model_inputs` of
        `dataflow.integrations.transformers`.

        Args:
            labels: another packed column to take instead of the tokens.
            mask: a packed column that is not 0 at the tokens that are to be predicted.
            ignore: what stands at the first token of a segment, and where `mask` is 0.
            model: the model that they are for. `ValueError` if its positions have three dimensions (mRoPE).
        """
        inner = model  # of transformers, or what it wraps
        while inner is not None and not hasattr(inner, "get_rope_index"):
            inner = getattr(inner, "module", None) or getattr(inner, "model", None)
        if inner is not None:  # it makes mRoPE's positions
            raise ValueError(
                f"{type(model).__name__} has positions in three dimensions, and flattened() gives one; "
                "use dataflow.integrations.transformers.model_inputs(batch, model)"
            )
        inside, lengths = self.segment_ids > 0, self.segments.length
        ignored = self.positions == 0 if mask is None else (self.positions == 0) | (mask == 0)
        labels = (self.tokens if labels is None else labels).masked_fill(ignored, ignore)
        bounds = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
        longest = int(lengths.max()) if len(lengths) else 0
        numbers = torch.arange(len(lengths), dtype=torch.int32, device=lengths.device)
        return {
            "input_ids": self.tokens[inside][None],
            "labels": labels[inside][None],
            "position_ids": self.positions[inside][None].long(),
            "seq_idx": numbers.repeat_interleave(lengths)[None],
            "cu_seq_lens_q": bounds,
            "cu_seq_lens_k": bounds,
            "max_length_q": longest,
            "max_length_k": longest,
        }


def _rows_line(tokens: Tensor) -> Iterator[str]:
    """Yield what `repr` says of rows, without a look at their values: they may be on a GPU."""
    yield f"{len(tokens):,} rows of {tokens.shape[1]:,}"
    yield f"{str(tokens.dtype).removeprefix('torch.')} on {tokens.device}"


def _packed_line(rows: PackedRows) -> Iterator[str]:
    yield from _rows_line(rows.tokens)
    yield f"{len(rows.segments.row):,} segments"
    yield f"the longest {rows.max_seqlen:,}"


def cut(values: Ragged, begin: Ints, length: Ints) -> Ragged:
    """Take `length[i]` elements of each row i from `begin[i]` on.

    A row of just that length is the segment itself.

    Raises `ValueError` where a row is shorter than the plan says: lengths and data disagree.
    """
    have = np.diff(values.offsets.numpy())
    if len(have) == len(length):
        begin = np.where(have == length, 0, begin)
    if len(have) != len(length) or (begin + length > have).any():
        wrong = int(np.argmax(begin + length > have)) if len(have) == len(length) else len(have)
        raise ValueError(
            f"the values of segment {wrong} are shorter than the lengths that were planned with; "
            "lengths= must tell the elements of the columns that are packed"
        )
    if not begin.any() and (length == have).all():
        return values
    offsets = np.concatenate(([0], np.cumsum(length)))
    source = ranges(values.offsets.numpy()[:-1] + begin, length)
    return Ragged(torch.from_numpy(values.values.numpy()[source]), torch.from_numpy(offsets))


def delivered_dtype(stored: np.dtype[Any], ndim: int = 1) -> np.dtype[Any]:
    """int64 for integers, as token files are delivered; other numbers, and arrays, stay as they are."""
    wide = np.dtype(np.int64)
    return wide if ndim == 1 and stored.kind in "iu" and np.can_cast(stored, wide) else stored


def packed(
    values: Ragged,
    segments_of_row: Ints,
    length: int,
    pad: float = 0,
    allocate: Allocate = _new,
    begin: Ints | None = None,
) -> PackedRows:
    """Lay segments into rows.

    Args:
        values: the segments, row after row, as `cut` gives them.
        segments_of_row: int64 [rows], how many belong to each row.
        length: elements of a row.
        pad: what fills rows up.
        allocate: gives the memory of `tokens`, `segment_ids` and `positions` together.
        begin: int64 [segments], where each begins in its sample; None: at its first element.
    """
    sizes, rows = np.diff(values.offsets.numpy()), len(segments_of_row)
    after = np.cumsum(segments_of_row)
    bounds_of_rows = values.offsets.numpy()[np.concatenate(([0], after))]
    fill = np.diff(bounds_of_rows)
    if rows and int(fill.max()) > length:
        raise ValueError(f"a row of {int(fill.max())} elements exceeds length={length}")
    row = np.repeat(np.arange(rows), segments_of_row)
    start = values.offsets.numpy()[:-1] - bounds_of_rows[row]
    first = np.zeros(len(sizes), np.int64) if begin is None else begin
    segments = PackedSegments(*map(torch.from_numpy, (row, start, first, sizes)))
    # What is left of a row is one more segment, so that repeating numbers fills all rows without a mask.
    ordinal = np.arange(len(sizes)) - np.repeat(after - segments_of_row, segments_of_row) + 1
    sizes, ordinal = np.insert(sizes, after, length - fill), np.insert(ordinal, after, 0)
    sizes, ordinal = sizes[sizes > 0], ordinal[sizes > 0].astype(np.int32)
    bounds = np.concatenate(([0], np.cumsum(sizes))).astype(np.int32)
    # numpy: torch would wake its thread pool for each of these, in every one of our threads.
    stored, total = values.values.numpy(), rows * length
    dtype, shape = delivered_dtype(stored.dtype, stored.ndim), (total, *stored.shape[1:])
    memory = allocate(8 * total + math.prod(shape) * dtype.itemsize)
    numbers, tokens = memory[: 8 * total].view(np.int32), memory[8 * total :].view(dtype).reshape(shape)
    segment_ids, positions = numbers[:total], numbers[total:]
    segment_ids[:] = np.repeat(ordinal, sizes)
    inside = segment_ids > 0
    positions[:] = np.arange(total, dtype=np.int32)
    positions -= np.repeat(bounds[:-1], sizes)
    positions *= inside
    tokens[:] = pad
    tokens[inside] = stored
    return PackedRows(
        tokens=torch.from_numpy(tokens.reshape(rows, length, *shape[1:])),
        segment_ids=torch.from_numpy(segment_ids.reshape(rows, length)),
        positions=torch.from_numpy(positions.reshape(rows, length)),
        cu_seqlens=torch.from_numpy(bounds),
        max_seqlen=int(sizes.max()) if rows else 0,
        segments=segments,
    )


class PaddedRows(NamedTuple):
    """One column of a batch as a padded tensor."""

    tokens: Tensor
    """[n, longest rounded up to `multiple`], int64 or the dtype of what is no integer; [n, longest, ...] of
    arrays, as they are stored."""
    lengths: Tensor
    """int64 [n]: elements of each row that are not padding."""

    def __repr__(self) -> str:
        return described(self, lambda: one_line("PaddedRows", _rows_line(self.tokens)))


def padded(values: Ragged, multiple: int = 1, pad: float = 0, allocate: Allocate = _new) -> PaddedRows:
    """Rows side by side, filled up to the longest, rounded up to `multiple`."""
    lengths = np.diff(values.offsets.numpy())
    width = _rounded(int(lengths.max(initial=0)), multiple)
    inside = np.arange(width) < lengths[:, None]
    return PaddedRows(filled(values, inside, pad, allocate), torch.from_numpy(lengths))


def filled(values: Ragged, inside: NDArray[np.bool_], pad: float = 0, allocate: Allocate = _new) -> Tensor:
    """The values one after the other where `inside`, `pad` elsewhere."""
    stored = values.values.numpy()
    dtype, shape = delivered_dtype(stored.dtype, stored.ndim), (*inside.shape, *stored.shape[1:])
    out = allocate(math.prod(shape) * dtype.itemsize).view(dtype).reshape(shape)
    out[:] = pad
    out[inside] = stored
    return torch.from_numpy(out)


def _rounded(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple


def batch_bytes(batching: Batching, segments: BatchSegments, column: str, dtype: np.dtype[Any]) -> int:
    """Return what `batch_columns` allocates for one column of one batch alone, stored as `dtype`."""
    itemsize = delivered_dtype(dtype).itemsize
    if isinstance(batching, Packed):
        numbers = 8 if column == batching.column else 0  # segment ids and positions
        return len(segments.segments_of_row) * batching.length * (itemsize + numbers)
    longest = int(segments.segments.length.max(initial=0))
    return len(segments.segments) * _rounded(longest, batching.multiple) * itemsize


def batch_columns(
    batching: Batching, segments: BatchSegments, columns: Mapping[str, Any], allocate: Allocate = _new
) -> dict[str, Any]:
    """Give one batch its form: the batching's columns packed or padded, the others one entry a segment.

    Args:
        batching: what the plan was made with.
        segments: those of the batch.
        columns: gathered values, one entry (row of a tensor, of a `Ragged`, item of a list) a segment: whole
            samples, or, of a `Ragged`, just the segment.
        allocate: gives the memory of the new columns.

    Returns:
        `columns` with the batching's column replaced by `PackedRows` or `PaddedRows`, and those cut like it
        by tensors of the same shape as its tokens, with the trailing dimensions that their values have.
    """
    lead, *companions = (
        (name, _segments(name, columns[name], segments.segments)) for name in batching.columns
    )
    laid: PackedRows | PaddedRows
    if isinstance(batching, Packed):
        pad, begin = batching.pad_of(lead[0]), segments.segments.begin
        laid = packed(lead[1], segments.segments_of_row, batching.length, pad, allocate, begin)
    else:
        laid = padded(lead[1], batching.multiple, batching.pad_of(lead[0]), allocate)
    formed: dict[str, Any] = {lead[0]: laid}
    if companions:
        if isinstance(laid, PackedRows):
            inside = laid.segment_ids.numpy() > 0
        else:
            inside = np.arange(laid.tokens.shape[1]) < laid.lengths.numpy()[:, None]
        for name, values in companions:
            formed[name] = filled(values, inside, batching.pad_of(name), allocate)
    return {**columns, **formed}


def _segments(name: str, values: Any, segments: Segments) -> Ragged:
    """Return the segments of a batch, of a gathered column."""
    if isinstance(values, Tensor) and values.dim() == 2:  # samples of one length
        offsets = torch.from_numpy(np.arange(len(values) + 1) * values.shape[1])
        values = Ragged(values.reshape(-1), offsets)
    if not isinstance(values, Ragged):
        raise ValueError(
            f"column {name!r} must be of variable length to be batched by length, got {type(values).__name__}"
        )
    return cut(values, segments.begin, segments.length)
