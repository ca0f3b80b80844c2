"""Values as a page shows them: pictures, clips, sound, tokens, text and numbers.

Text is escaped. Bytes are shown as a picture, sound or video where they begin as such a file does: they lie
in the page, coded in base 64, and no address, tag or name is taken from them.
"""

from __future__ import annotations

import base64
import io
import struct
import wave
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from html import escape
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from dataflow.batch.packed import PackedRows
from dataflow.ragged import Ragged
from sharding.printable import printable

MOST_TEXT, MOST_NUMBERS, MOST_FRAMES, MOST_SIDE = 2000, 512, 6, 1024
"""Characters of a text, numbers of an array, pictures of a clip or list, pixels of a side of a picture."""
MOST_FILE, MOST_FILES = 4 << 20, 48 << 20
"""Bytes of a file, and of all files, pictures and sounds of a page."""
_KINDS = (
    (b"\xff\xd8\xff", 0, "image/jpeg"),
    (b"\x89PNG\r\n\x1a\n", 0, "image/png"),
    (b"GIF8", 0, "image/gif"),
    (b"WEBP", 8, "image/webp"),
    (b"WAVE", 8, "audio/wav"),
    (b"fLaC", 0, "audio/flac"),
    (b"OggS", 0, "audio/ogg"),
    (b"ID3", 0, "audio/mpeg"),
    (b"\xff\xfb", 0, "audio/mpeg"),
    (b"\xff\xf3", 0, "audio/mpeg"),
    (b"ftyp", 4, "video/mp4"),
    (b"\x1aE\xdf\xa3", 0, "video/webm"),
)
"""The bytes that files have at a place, and the kind that a browser calls them."""


class PageRoom:
    """The bytes that a page still has room for, of what is no text."""

    def __init__(self, num_bytes: int = MOST_FILES) -> None:
        self.left = num_bytes

    def shown(self, data: bytes, kind: str, note: str = "") -> str:
        """A picture or player of a file that lies in the page; a sentence, where it is too large for that."""
        if len(data) > MOST_FILE or len(data) > self.left:
            most, whose = (MOST_FILE, "a file") if len(data) > MOST_FILE else (MOST_FILES, "all files")
            return (
                f"<p class=dim>{len(data):,} bytes of {kind} are not shown: a page holds {most:,} of "
                f"{whose}</p>"
            )
        self.left -= len(data)
        address = f"data:{kind};base64,{base64.b64encode(data).decode()}"
        caption = f"<p class=dim>{text_of(note)}</p>" if note else ""
        tag = kind.partition("/")[0]
        if tag == "image":
            return f'<img alt="" src="{address}">{caption}'
        return f'<{tag} controls preload="metadata" src="{address}"></{tag}>{caption}'


def text_of(value: object) -> str:
    """Text that is shown as it is, whatever it holds."""
    return escape(printable(str(value)[:MOST_TEXT]))


def kind_of(data: bytes) -> str:
    """The kind of file that bytes begin as, such as "audio/wav"; "": none that is shown."""
    return next((kind for mark, offset, kind in _KINDS if data[offset : offset + len(mark)] == mark), "")


def values_of(
    batch: Any, row: int, words: TokenWords, room: PageRoom, rates: Mapping[str, int]
) -> Iterator[str]:
    """Yield what a batch holds in a row, column by column; `rates`: of columns of sound, samples a second."""
    columns = batch if isinstance(batch, Mapping) else {"batch": batch}
    for name, column in columns.items():
        try:
            if name == words.column or isinstance(column, PackedRows):
                mask = columns.get(words.mask) if name == words.column else None
                shown = _tokens(column, row, mask, words.decode if name == words.column else numbers_text)
            else:
                shown = _value(value_at(column, row), room, rates.get(name, 0))
        except (IndexError, KeyError, TypeError):
            continue  # a column that has no such row, as what a batch_transform adds
        yield f"<p class=dim>{text_of(name)}</p>{shown}"


def value_at(column: Any, row: int) -> Any:
    """The value of a column in a row of its batch."""
    return next(islice(column.rows(), row, None)) if isinstance(column, Ragged) else column[row]


def _value(value: Any, room: PageRoom, rate: int) -> str:
    """One value: a picture, sound, text or numbers."""
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        value = (value.float() if value.dtype == torch.bfloat16 else value).numpy()
    if isinstance(value, np.ndarray):
        if rate and value.ndim == 2 and value.dtype.kind == "f" and 1 <= len(value) <= 8:
            return _sound(value, rate, room)
        if value.ndim == 1 and value.dtype == np.uint8 and (kind := kind_of(value[:16].tobytes())):
            return room.shown(value.tobytes(), kind)
        frames = [value] if value.ndim < 4 else [*value[:: -(-len(value) // MOST_FRAMES) or 1]]
        if frames and _pixels(frames[0]) is not None:
            caption = "" if value.ndim < 4 else f"<p class=dim>{len(frames)} of {len(value)} frames</p>"
            return "".join(_picture(pixels, room) for pixels in map(_pixels, frames)) + caption
        flat = value.reshape(-1)
        more = f" ... {flat.size:,} in all" if flat.size > MOST_NUMBERS else ""
        kind = f"{value.dtype}{list(value.shape)}"
        return f"<pre>{text_of(kind)} {text_of(' '.join(map(str, flat[:MOST_NUMBERS].tolist())))}{more}</pre>"
    if isinstance(value, bytes):
        if kind := kind_of(value):
            return room.shown(value, kind)
        return f"<pre>{len(value):,} bytes {text_of(value[:64].hex(' '))}</pre>"
    if isinstance(value, list) and value and all(isinstance(item, torch.Tensor | bytes) for item in value):
        caption = f"<p class=dim>{min(len(value), MOST_FRAMES)} of {len(value)} items</p>"
        return "".join(_value(item, room, rate) for item in value[:MOST_FRAMES]) + caption
    return f"<pre>{text_of(value)}</pre>"


def _sound(samples: NDArray[Any], rate: int, room: PageRoom) -> str:
    """A player of sound, [channels, samples] in [-1, 1]."""
    loud = int((~(np.abs(samples) <= 1)).sum())
    note = f"{samples.shape[1] / rate:.3f} s at {rate:,} a second, played in 16 bits"
    note += f"; {loud:,} samples beyond -1 to 1 are cut off for it" if loud else ""
    return room.shown(wav_of(samples, rate), "audio/wav", note)


def wav_of(samples: NDArray[Any], rate: int) -> bytes:
    """A WAV file of 16 bits of sound, [channels, samples] in [-1, 1]; what is beyond is cut off."""
    levels = np.rint(np.clip(np.nan_to_num(samples), -1, 1) * 32767).astype("<i2")
    with io.BytesIO() as file:
        with wave.open(file, "wb") as sound:
            sound.setnchannels(len(samples))
            sound.setsampwidth(2)
            sound.setframerate(rate)
            sound.writeframes(np.ascontiguousarray(levels.T).tobytes())
        return file.getvalue()


def _picture(pixels: NDArray[Any] | None, room: PageRoom) -> str:
    """A picture of pixels; of one that is large every so many-th."""
    if pixels is None:
        return ""
    each = -(-max(pixels.shape[:2]) // MOST_SIDE)
    height, width, _ = pixels.shape
    note = f"{height} x {width}: one pixel in {each} of each row and column" if each > 1 else ""
    return room.shown(png_of(pixels[::each, ::each]), "image/png", note)


def _pixels(value: np.ndarray[Any, Any]) -> np.ndarray[Any, Any] | None:
    """The uint8 pixels [height, width, 3] of what looks like a picture; None: it does not."""
    if value.ndim != 3 or min(value.shape) < 1 or max(value.shape) > 4096:
        return None
    if value.shape[0] in (1, 3) and min(value.shape[1:]) >= 4:
        value = value.transpose(1, 2, 0)
    if value.shape[2] not in (1, 3) or min(value.shape[:2]) < 4:
        return None
    if value.dtype != np.uint8:  # normalised: from its least to its largest
        if value.dtype.kind != "f" or not np.isfinite(value).all():
            return None
        low, high = float(value.min()), float(value.max())
        value = ((value - low) * (255 / max(high - low, 1e-12))).astype(np.uint8)
    return np.repeat(value, 3, axis=2) if value.shape[2] == 1 else value


def png_of(pixels: np.ndarray[Any, Any]) -> bytes:
    """A PNG of pixels, uint8 [height, width, 3]."""
    height, width, _ = pixels.shape
    lines = np.zeros((height, 1 + 3 * width), np.uint8)  # each begins with its filter: none
    lines[:, 1:] = pixels.reshape(height, -1)
    parts = [
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)),
        (b"IDAT", zlib.compress(lines.tobytes(), 6)),
        (b"IEND", b""),
    ]
    chunks = (
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in parts
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def numbers_text(ids: Sequence[Any]) -> str:
    """Numbers as text, such as tokens without their tokenizer."""
    return " ".join(map(str, ids))


class TokenWords(NamedTuple):
    """The column of tokens, the one of those that are learned, and what makes text of them."""

    column: str = ""
    """The column of tokens; "": none is known."""
    mask: str = ""
    """The column that says which of them are trained."""
    decode: Callable[[Sequence[Any]], str] = numbers_text
    """Text of tokens, where the transform has their tokenizer."""


def words_of(transform: Any) -> TokenWords:
    """Return how to tell tokens that a transform makes, as `Tokenize` and `ChatTemplate` do."""
    tokenizer: Any = getattr(getattr(transform, "file", None), "tokenizer", None)
    if not callable(getattr(tokenizer, "decode", None)):
        return TokenWords()
    decode = partial(tokenizer.decode, skip_special_tokens=False)
    return TokenWords(str(transform.into), str(getattr(transform, "mask", "")), decode)


def _tokens(column: Any, row: int, mask: Any, decode: Callable[[Sequence[Any]], str]) -> str:
    """The tokens of a row: pieces in two colours, padding and what is not trained dim."""
    values = column.tokens[row] if isinstance(column, PackedRows) else value_at(column, row)
    tokens = values.tolist()
    ids = column.segment_ids[row].tolist() if isinstance(column, PackedRows) else [1] * len(tokens)
    trained = [True] * len(tokens) if mask is None else [bool(flag) for flag in value_at(mask, row).tolist()]
    kinds = [(number, is_trained) for number, is_trained in zip(ids, trained, strict=True)]
    parts, begin = [], 0
    for end in range(1, len(tokens) + 1):
        if end == len(tokens) or kinds[end] != kinds[begin]:
            number, is_trained = kinds[begin]
            some = tokens[begin : min(end, begin + MOST_NUMBERS)]
            text = text_of(decode(some) if number else numbers_text(some))
            kind = f"{f'p{number % 2}' if number else 'p2'}{'' if is_trained else ' m'}"
            parts.append(f'<span class="{kind}">{text}</span>')
            begin = end
    share = f"<p class=dim>{sum(trained) / max(1, len(trained)):.0%} trained</p>" if mask is not None else ""
    return f"<pre>{' '.join(parts)}</pre>{share}"
