"""The frames of an MP4 file, and clips of it: where each frame lies, when it is shown, and what it needs.

A file's `moov` box lists every frame of a track: its bytes, its time, whether decoding may begin at it. So a
few frames of a long file need its `moov` and the groups of frames around them, and no other byte, wherever
the file lies. `cut` makes of these a whole MP4 of its own, with a `moov` of its own, which any decoder reads
from its first frame to its last: what is decoded are the frames that were asked for, not those near them.
Boxes: ISO/IEC 14496-12. Nothing here decodes, or does I/O.

What has a layout that is not understood here (fragments, several edits, encryption) is `None`: its bytes must
be read whole. What contradicts itself raises `ValueError`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dataflow.decode.rules import ReadBytes
from sharding.spans import Bytes, Ints

_HEAD_BYTES = 64 << 10
"""Bytes read at a time until `moov` is found; many a file has it there."""
_GAP_BYTES = 64 << 10
"""Bytes between two spans that are read as one: sound lies between the frames of most files."""
_TRAILING = 16
"""Frames that H.264 may keep back."""
CLIP_TICKS = 25
"""A second: a clip's frames are a tick apart, whatever their times were."""
_BRANDS = (b"ftyp", b"moov", b"mdat", b"free", b"skip", b"wide", b"pnot", b"styp", b"uuid", b"moof", b"sidx")


@dataclass(frozen=True, kw_only=True)
class FrameIndex:
    """The frames of a video track, in the order in which they are decoded, [n] each."""

    offsets: Ints
    """First byte in the file."""
    sizes: Ints
    """The bytes of each frame."""
    times: Ints
    """The time when each is shown, in ticks."""
    keys: Ints
    """[k] frames at which decoding may begin, ascending."""
    shown: Ints
    """[m] those that are shown, in this order: all but what an edit leaves out."""
    end: int
    """The time when the last is no longer shown, in ticks."""
    trailing: int
    """Frames after one that are decoded, too: FFmpeg keeps back the last ones of an open group in H.264."""
    ticks_per_s: int
    boxes: dict[bytes, bytes]
    """Boxes of the track, as they are stored: a clip takes them over."""

    @property
    def nbytes(self) -> int:
        """Bytes it takes in memory."""
        arrays = (self.offsets, self.sizes, self.times, self.keys, self.shown)
        return sum(array.nbytes for array in arrays) + sum(map(len, self.boxes.values()))

    def at(self, seconds: NDArray[np.float64]) -> Ints:
        """Return which of the frames shown is seen at each time, to half a tick; the first before all."""
        ticks = np.floor(seconds * self.ticks_per_s + 0.5).astype(np.int64)
        index = np.searchsorted(self.times[self.shown], ticks, side="right") - 1
        return np.maximum(index, 0)


def read_index(read: ReadBytes, length: int) -> FrameIndex | None:
    """The frames of the first video track of a file of so many bytes; None where it must be read whole.

    Raises `ValueError` for a file that ends too early or contradicts itself.
    """
    moov = _find_moov(_ahead(read, length), length)
    try:
        return None if moov is None else _index_of(moov, length)
    except (struct.error, IndexError) as error:
        raise ValueError(f"a box of its list of frames (moov) is too short: {error}") from error


def cut(index: FrameIndex, frames: Ints, read: ReadBytes, length: int) -> tuple[Bytes, Ints, Ints]:
    """An MP4 that has what is needed to decode some of the frames shown, in any order, and no more.

    Gives its bytes, and of each of `frames` its number in the clip, in the order in which they are shown, and
    its time, in ticks of `CLIP_TICKS` a second. Raises `ValueError` where the file ends before them.
    """
    numbers = index.shown[frames]
    chosen = needed_frames(index, numbers)
    starts, sizes = _ranges(index, chosen, length)
    head, ranks, shown_at = _clip_head(index, chosen)
    out = np.empty(len(head) + int(sizes.sum()), np.uint8)
    out[: len(head)] = np.frombuffer(head, np.uint8)
    offsets = len(head) + np.cumsum(sizes) - sizes
    for first, end in _spans(starts, sizes):
        low = int(starts[first])
        data = read(low, int(starts[end - 1] + sizes[end - 1]) - low)
        for i in range(first, end):
            begin = int(starts[i]) - low
            out[offsets[i] : offsets[i] + sizes[i]] = data[begin : begin + int(sizes[i])]
    positions = np.searchsorted(chosen, numbers)
    return out, ranks[positions], shown_at[positions]


# ---- reading ----------------------------------------------------------------------------------------------


def _ahead(read: ReadBytes, length: int) -> ReadBytes:
    """Reads a little more than what is asked for: headers lie side by side."""
    first, held = 0, np.empty(0, np.uint8)

    def ahead(offset: int, nbytes: int) -> Bytes:
        nonlocal first, held
        if offset + nbytes > length:
            raise ValueError(f"a box of {nbytes:,} bytes at byte {offset:,} of {length:,}: it is truncated")
        if not first <= offset <= offset + nbytes <= first + len(held):
            first, held = offset, read(offset, min(length - offset, max(nbytes, _HEAD_BYTES)))
        return held[offset - first : offset - first + nbytes]

    return ahead


def _find_moov(read: ReadBytes, length: int) -> bytes | None:
    """The body of the `moov` box. None: this is no MP4, or one in fragments."""
    offset, has_data = 0, False
    while offset + 8 <= length:
        size, kind = struct.unpack(">I4s", read(offset, 8).tobytes())
        head = 8
        if offset == 0 and kind not in _BRANDS:
            return None
        if size == 1:
            size, head = struct.unpack(">Q", read(offset + 8, 8).tobytes())[0], 16
        elif size == 0:
            size = length - offset
        if size < head:
            raise ValueError(f"a box of {size} bytes at byte {offset:,}")
        if kind == b"moof":
            return None
        if kind == b"moov":
            return read(offset + head, size - head).tobytes()
        has_data = has_data or kind == b"mdat"
        offset += size
    if not has_data:
        return None
    raise ValueError(f"no list of its frames (moov) in its {length:,} bytes: it is truncated")


def _boxes(data: bytes, start: int = 0) -> Iterator[tuple[bytes, bytes]]:
    """Kind and body of each box."""
    while start + 8 <= len(data):
        size, kind = struct.unpack_from(">I4s", data, start)
        head = 8
        if size == 1 and start + 16 <= len(data):
            size, head = struct.unpack_from(">Q", data, start + 8)[0], 16
        elif size == 0:
            size = len(data) - start
        if size < head or start + size > len(data):
            raise ValueError(f"a box {kind!r} of {size} bytes does not fit the one around it")
        yield kind, data[start + head : start + size]
        start += size


def _table(body: bytes, dtype: str, *, offset: int = 4) -> Ints:
    """The entries of a table as int64, [n], or [n, fields]; their number stands at `offset`."""
    count, entry = struct.unpack_from(">I", body, offset)[0], np.dtype(dtype)
    if offset + 4 + count * entry.itemsize > len(body):
        raise ValueError(f"a table of {count:,} entries in a box of {len(body):,} bytes")
    rows = np.frombuffer(body, entry, count, offset + 4)
    if entry.names is None:
        return rows.astype(np.int64)
    return np.stack([rows[name].astype(np.int64) for name in entry.names], axis=1)


def _index_of(moov: bytes, length: int) -> FrameIndex | None:
    movie, tracks = b"", list[dict[bytes, bytes]]()
    for kind, body in _boxes(moov):
        if kind == b"mvex":
            return None
        if kind == b"mvhd":
            movie = body
        if kind == b"trak":
            tracks.append(_track_boxes(body))
    tracks = [track for track in tracks if track.get(b"hdlr", b"")[8:12] == b"vide"]
    if len(tracks) != 1 or not movie:
        return None  # which of several is meant, the decoder decides
    return _track_index({**tracks[0], b"mvhd": movie}, length)


_NESTED = (b"mdia", b"minf", b"stbl", b"edts", b"dinf")


def _track_boxes(body: bytes) -> dict[bytes, bytes]:
    """All boxes of a track by kind, whatever they lie in."""
    boxes: dict[bytes, bytes] = {}
    for kind, inner in _boxes(body):
        if kind in _NESTED:
            boxes.update(_track_boxes(inner))
        else:
            boxes.setdefault(kind, inner)
    return boxes


_KEPT = (b"mvhd", b"tkhd", b"mdhd", b"hdlr", b"vmhd", b"dref", b"stsd")


def _track_index(boxes: dict[bytes, bytes], length: int) -> FrameIndex | None:
    lacking = [kind for kind in (*_KEPT, b"stts", b"stsc") if kind not in boxes]
    if lacking or b"stsz" not in boxes or not {b"stco", b"co64"} & set(boxes):
        return None
    if struct.unpack_from(">I", boxes[b"stsd"], 4)[0] != 1 or boxes[b"stsd"][12:16] == b"encv":
        return None
    sizes = _sizes(boxes[b"stsz"], length)
    offsets = _offsets(boxes, sizes)
    durations = _runs(_table(boxes[b"stts"], ">u4,>u4"), len(sizes))
    times = np.cumsum(durations) - durations
    if b"ctts" in boxes:
        times += _runs(_table(boxes[b"ctts"], ">u4,>i4"), len(sizes))
    keys = np.arange(len(sizes))
    if b"stss" in boxes:
        keys = _table(boxes[b"stss"], ">u4") - 1
        if len(keys) and not 0 <= keys.min() <= keys.max() < len(sizes):
            raise ValueError(f"its key frames lie beyond its {len(sizes):,} frames")
        keys = np.union1d(keys, 0)
    ticks_per_s = _ticks(boxes[b"mdhd"])
    edit = _edit(boxes.get(b"elst", b""), ticks_per_s, _ticks(boxes[b"mvhd"]))
    if edit is None or not len(sizes) or not ticks_per_s:
        return None
    begin, delay, duration = edit
    end = int((times + durations).max())
    is_shown = times >= begin
    if duration:
        is_shown &= times < begin + duration
        end = min(end, begin + duration)
    shown = np.flatnonzero(is_shown)
    if not len(shown):
        return None
    shown = shown[np.argsort(times[shown], kind="stable")]
    groups = np.searchsorted(keys, np.arange(len(sizes)), side="right") - 1
    is_open = bool((times < times[keys[groups]]).any())
    return FrameIndex(
        offsets=offsets,
        sizes=sizes,
        times=times - begin + delay,
        keys=keys,
        shown=shown,
        end=end - begin + delay,
        trailing=_TRAILING if is_open else 0,
        ticks_per_s=ticks_per_s,
        boxes={kind: boxes[kind] for kind in _KEPT},
    )


def _ticks(header: bytes) -> int:
    """Ticks a second, of `mvhd` or `mdhd`."""
    return int(struct.unpack_from(">I", header, 20 if header[:1] == b"\1" else 12)[0])


def _sizes(body: bytes, length: int) -> Ints:
    same, count = struct.unpack_from(">II", body, 4)
    if not same:
        return _table(body, ">u4", offset=8)
    if same * count > length:
        raise ValueError(f"{count:,} frames of {same:,} bytes in {length:,} bytes")
    return np.full(count, same, np.int64)


def _runs(table: Ints, count: int) -> Ints:
    """The value of each of `count` frames, of a table of (frames, value)."""
    if int(table[:, 0].sum()) != count:
        raise ValueError(f"times of {int(table[:, 0].sum()):,} frames, and {count:,} frames")
    return np.repeat(table[:, 1], table[:, 0])


def _offsets(boxes: dict[bytes, bytes], sizes: Ints) -> Ints:
    """First byte of each frame: frames lie one behind the other in chunks, of which the offsets are known."""
    chunks = _table(boxes[b"stco"], ">u4") if b"stco" in boxes else _table(boxes[b"co64"], ">i8")
    runs = _table(boxes[b"stsc"], ">u4,>u4,>u4")
    firsts = np.append(runs[:, 0] - 1, len(chunks))
    if not len(runs) or firsts[0] != 0 or (np.diff(firsts) < 0).any() or (runs[:, 1] > len(sizes)).any():
        raise ValueError("its chunks are out of order")
    counts = np.repeat(runs[:, 1], np.diff(firsts))
    if int(counts.sum()) != len(sizes):
        raise ValueError(f"chunks of {int(counts.sum()):,} frames, and {len(sizes):,} frames")
    before = np.cumsum(sizes) - sizes
    first_frames = np.cumsum(counts) - counts
    shifts: Ints = np.repeat(chunks - before[np.minimum(first_frames, len(sizes) - 1)], counts)
    return before + shifts


def _edit(body: bytes, ticks: int, movie_ticks: int) -> tuple[int, int, int] | None:
    """Return which part of the track is shown: its first tick, ticks before it, ticks (0: all).

    None: several.
    """
    if not body:
        return 0, 0, 0
    edits = _table(body, ">u8,>i8,>i4" if body[:1] == b"\1" else ">u4,>i4,>i4")
    delay = 0
    while len(edits) and edits[0, 1] == -1:
        delay += int(edits[0, 0]) * ticks // max(1, movie_ticks)
        edits = edits[1:]
    if len(edits) != 1 or edits[0, 2] != 1 << 16:
        return None
    # Rounded up: an edit's length counts in ticks of the movie, which are longer.
    return int(edits[0, 1]), delay, -(-int(edits[0, 0]) * ticks // max(1, movie_ticks))


# ---- cutting ----------------------------------------------------------------------------------------------


def needed_frames(index: FrameIndex, frames: Ints) -> Ints:
    """The frames that must be decoded for some, ascending: each one's, from a key frame before it on."""
    groups = np.searchsorted(index.keys, frames, side="right") - 1
    # Shown before the key frame that it follows, a frame may need the group before.
    leads = index.times[frames] < index.times[index.keys[groups]]
    groups = np.maximum(groups - leads, 0)
    depth = np.zeros(len(index.sizes) + 1, np.int64)
    np.add.at(depth, index.keys[groups], 1)
    np.add.at(depth, np.minimum(frames + 1 + index.trailing, len(index.sizes)), -1)
    needed: Ints = np.flatnonzero(np.cumsum(depth)[:-1] > 0)
    return needed


def spans_of(index: FrameIndex, frames: Ints, length: int) -> list[tuple[int, int]]:
    """First byte and end of what is read of a file for some frames; those that it lacks are left out."""
    frames = frames[(index.offsets + index.sizes)[frames] <= length]
    starts, sizes = _ranges(index, frames[np.argsort(index.offsets[frames], kind="stable")], length)
    cuts = _spans(starts, sizes) if len(frames) else ()
    return [(int(starts[first]), int(starts[end - 1] + sizes[end - 1])) for first, end in cuts]


def _ranges(index: FrameIndex, frames: Ints, length: int) -> tuple[Ints, Ints]:
    """First byte and bytes of frames. Raises `ValueError` where the file ends before them."""
    starts, sizes = index.offsets[frames], index.sizes[frames]
    if len(frames) and (int((starts + sizes).max()) > length or int(starts.min()) < 0):
        raise ValueError(f"its frames lie beyond its end: it has {length:,} bytes and is truncated")
    return starts, sizes


def _spans(starts: Ints, sizes: Ints) -> Iterator[tuple[int, int]]:
    """Frames that are read at once: those that follow each other in the file, but for small gaps."""
    gaps = starts[1:] - (starts + sizes)[:-1]
    cuts = np.flatnonzero((gaps < 0) | (gaps > _GAP_BYTES)) + 1
    return zip([0, *cuts.tolist()], [*cuts.tolist(), len(starts)], strict=True)


def _box(kind: bytes, *bodies: bytes) -> bytes:
    body = b"".join(bodies)
    return struct.pack(">I4s", 8 + len(body), kind) + body


def _listed(kind: bytes, values: Ints, dtype: str) -> bytes:
    """A box that is a table, [n] or [n, fields]."""
    return _box(kind, struct.pack(">II", 0, len(values)), values.astype(dtype).tobytes())


def _clip_head(index: FrameIndex, chosen: Ints) -> tuple[bytes, Ints, Ints]:
    """All of the clip's file before its frames; each one's number in the order shown, and its time in ticks.

    Its frames have times of their own, a tick apart. Where frames were left out, decoding must begin anew:
    only there is a key frame, whatever others there are, and only after all before it have been shown. So a
    decoder jumps there, and nowhere else.
    """
    n, old = len(chosen), index.boxes
    firsts = np.append(0, np.flatnonzero(np.diff(chosen) > 1) + 1)
    run = np.searchsorted(firsts, np.arange(n), side="right") - 1
    order = np.lexsort((index.times[chosen], run))
    ranks = np.empty(n, np.int64)
    ranks[order] = np.arange(n)
    wait = max(0, int((np.arange(n) - ranks).max()))  # nothing is shown before it is decoded
    decoded = np.arange(n) + (wait + 1) * run
    durations = np.diff(decoded, append=decoded[-1] + 1)
    delays = ranks + wait - np.arange(n)
    each = np.ones(n, np.int64)
    sizes = index.sizes[chosen]

    def moov(first: int) -> bytes:
        stbl = _box(
            b"stbl",
            _box(b"stsd", old[b"stsd"]),
            _listed(b"stts", np.stack([each, durations], axis=1), ">u4"),
            _listed(b"ctts", np.stack([each, delays], axis=1), ">u4"),
            _listed(b"stss", firsts + 1, ">u4"),
            _box(b"stsc", struct.pack(">IIIII", 0, 1, 1, n, 1)),
            _box(b"stsz", struct.pack(">III", 0, 0, n), sizes.astype(">u4").tobytes()),
            _box(b"co64", struct.pack(">IIQ", 0, 1, first)),
        )
        minf = _box(b"minf", _box(b"vmhd", old[b"vmhd"]), _box(b"dinf", _box(b"dref", old[b"dref"])), stbl)
        mdhd = struct.pack(">IIIIIHH", 0, 0, 0, CLIP_TICKS, int(decoded[-1]) + 1, 0x55C4, 0)  # no language
        mdia = _box(b"mdia", _box(b"mdhd", mdhd), _box(b"hdlr", old[b"hdlr"]), minf)
        return _box(b"moov", _box(b"mvhd", old[b"mvhd"]), _box(b"trak", _box(b"tkhd", old[b"tkhd"]), mdia))

    before = _box(b"ftyp", b"isom\0\0\2\0isommp42")
    data = struct.pack(">I4sQ", 1, b"mdat", 16 + int(sizes.sum()))
    return before + moov(len(before) + len(moov(0)) + len(data)) + data, ranks, decoded + delays
