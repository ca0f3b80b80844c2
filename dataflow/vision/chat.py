"""`VisionChat`: a transform from chats with pictures to tokens and patches, measured without pixels."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dataflow.ragged import Ragged
from dataflow.text.chat import from_json, overlapping
from dataflow.text.chat_template import ChatText, template_of
from dataflow.text.tokenizer import TokenizerFile, checked_dtype, tokenizer_fingerprint
from dataflow.vision.families import NormalizedLevels, family_of
from dataflow.vision.family import PicturePlan
from dataflow.vision.messages import messages_with_pictures, shifted
from dataflow.vision.pictures import Picture, picture_members, pictures_of, pixels_of
from dataflow.vision.positions import image_positions
from dataflow.vision.qwen import VisionFamily

Sample = dict[str, Any]
Levels = TypeVar("Levels", Tensor, Ragged)
LEFT_OUT = "messages_left_out"


class VisionTokens(NamedTuple):
    """The text of one chat, with a token for each that its pictures become."""

    ids: NDArray[np.int64]
    mask: NDArray[np.bool_]


class VisionChat:
    """Replaces messages and encoded pictures by what a vision-language model takes.

    A sample gets these columns in place of its messages and pictures:

    - `input_ids` [tokens] and `loss_mask` [tokens], bool: as `ChatTemplate` makes them. A picture is as many
      image tokens as the model makes of it; they are never to be learned.
    - `pixel_values`: uint8 levels, or float32 as of the processor. Of Qwen's families [patches, values], with
      3 * patch * patch levels each; of the others [tiles, 3, side, side], of all pictures of the sample.
    - `mrope` [tokens, 3] and `image_grid_thw` [pictures, 3], int64, of Qwen's: positions in time, height and
      width, and patches in time, down and across.
    - `image_sizes` [pictures, 2], int64, of "llava_onevision": heights and widths.
    - `pixel_attention_mask` [tiles, side, side], int64, of "idefics3" and "smolvlm": ones.
    - `messages_left_out`: a number, with `max_length` alone.

    Messages are those of `ChatTemplate`. A picture is a part {"type": "image"} of a message's content; an
    address that the part has is not looked at. The pictures themselves are the files' bytes (JPEG, PNG, WebP
    and what OpenCV reads), as many and in the order of the parts: a list in the column `images`
    (of a tar by `columns={"images": "*.jpg"}`, of Parquet as Hugging Face writes it), with
    `decode={"images": None}`, or members `0.jpg`, `1.jpg` ... of the sample.

    Where decoding is equal (JPEG, 8-bit PNG, WebP), float32 patches are to the last bit the processor's.
    Of animations the first frame counts, transparency is dropped, and nothing is fetched.

    Args:
        tokenizer: a `tokenizer.json`, or the folder of a model that has one. Where a
            `preprocessor_config.json` is beside it, sizes, patches, mean and deviation come from there.
        family: "qwen2_5_vl", "qwen3_vl", "qwen3_5", "llava", "llava_onevision", "idefics3", "smolvlm" or
            "gemma3".
        min_pixels: smaller pictures are made larger, of Qwen's families; None: as the model.
        max_pixels: larger pictures are made smaller, of Qwen's families; None: as the model.
        patches: "uint8": levels, each once; `normalized` makes the model's of them, on the device.
            "float32": normalised, four times as many bytes; eight times of Qwen's, repeated in time.
        max_length: most tokens of a chat; None: any number.
        overlong: of longer chats messages are left out from the end, with their pictures, so that a chat ends
            with a turn of the assistant ("turns"); or they are bad samples ("error").
        template: as in `ChatTemplate`.
        column: the messages.
        images: the pictures.
        tools: as in `ChatTemplate`.
        variables: as in `ChatTemplate`.
        upright: whether pictures are turned as their EXIF orientation says, as `transformers` does that loads
            them by itself. False: as a processor that is given a Pillow image.
        dtype: of ids and positions, "int32" or "int64".

    Raises:
        OSError: the tokenizer's or template's file cannot be read.
        ValueError: a setting is out of range, the family is not supported, or the tokenizer lacks its
            image token.
        MissingTextSupportError: the extra `text` is not installed.

    Examples:
        >>> chats = VisionChat("model", family="qwen3_vl", max_length=8192)  # doctest: +SKIP
        >>> dataset = ShardedDataset("chats.parquet", transform=chats)  # doctest: +SKIP
        >>> dataset[0]["pixel_values"].shape  # doctest: +SKIP
        torch.Size([1564, 768])
    """

    releases_gil = True

    def __init__(
        self,
        tokenizer: str | os.PathLike[str],
        *,
        family: str,
        min_pixels: int | None = None,
        max_pixels: int | None = None,
        patches: Literal["uint8", "float32"] = "uint8",
        max_length: int | None = None,
        overlong: Literal["turns", "error"] = "turns",
        template: str | os.PathLike[str] | None = None,
        column: str = "messages",
        images: str = "images",
        tools: str = "",
        variables: Mapping[str, Any] | None = None,
        upright: bool = True,
        dtype: str = "int32",
    ) -> None:
        self.file = TokenizerFile(tokenizer)
        self.family_name = family
        self.family = family_of(family, self.file.path.parent, min_pixels, max_pixels)
        self.text = ChatText(*template_of(self.file.path.parent, template, variables))
        if patches not in ("uint8", "float32"):
            raise ValueError(f'patches must be "uint8" or "float32", got {patches!r}')
        if overlong not in ("turns", "error"):
            raise ValueError(f'overlong must be "turns" or "error", got {overlong!r}')
        if max_length is not None and (type(max_length) is not int or max_length < 1):
            raise ValueError(f"max_length must be an integer > 0, got {max_length!r}")
        for token in (self.family.image_token, self.family.run_token):
            if self.file.tokenizer.token_to_id(token) is None:
                raise ValueError(f"{self.file.path} lacks the token {token!r}, which family={family!r} wants")
        self._image_id: int = self.file.tokenizer.token_to_id(self.family.run_token)
        self.patches, self.max_length, self.overlong = patches, max_length, overlong
        self.column, self.images, self.tools, self.upright = column, images, tools, upright
        self._dtype = checked_dtype(dtype)
        self._has_warned = False

    @property
    def lists(self) -> tuple[str, ...]:
        """See `BatchTransform`."""
        return (*self._of_tokens, "pixel_values", *self.family.columns)

    @property
    def _of_tokens(self) -> tuple[str, ...]:
        return ("input_ids", "loss_mask", *(["mrope"] if self.family.has_positions else []))

    @property
    def targets(self) -> tuple[str, ...]:
        """See `BatchTransform`."""
        return ("loss_mask",)

    @property
    def fingerprint(self) -> str:
        """See `BatchTransform`."""
        text = (self.text.source, self.text.variables, self.column, self.images, self.tools, self.max_length)
        return tokenizer_fingerprint(
            self.file, *text, self.overlong, self.family.settings, self.patches, self.upright
        )

    def __call__(self, sample: Sample) -> Sample:
        """One sample: tokens and patches in place of messages and pictures. `ValueError` for a bad one."""
        result = self.deferred(sample)
        if isinstance(levels := result["pixel_values"], NormalizedLevels):
            result["pixel_values"] = self.family.normalized(levels.levels)
        return result

    def deferred(self, sample: Sample) -> Sample:
        """See `BatchTransform`: levels become float32 where the batch lies."""
        pictures = pictures_of(sample, self.images, self.upright)
        tokens, plans, left_out = self._planned(sample, pictures)
        members = () if self.images in sample else picture_members(sample)
        sources = {*members, self.column, self.images, self.tools}
        rest = {name: value for name, value in sample.items() if name not in sources}
        beside = self.family.beside(plans)
        rest["input_ids"] = torch.from_numpy(tokens.ids.astype(self._dtype))
        rest["loss_mask"] = torch.from_numpy(tokens.mask)
        if isinstance(self.family, VisionFamily):
            is_image, length = torch.from_numpy(tokens.ids == self._image_id), torch.tensor([len(tokens.ids)])
            positions = image_positions(is_image, length, beside["image_grid_thw"], self.family.merge).T
            rest["mrope"] = positions.to(rest["input_ids"].dtype).contiguous()
        levels = self._levels(pictures, plans)
        rest["pixel_values"] = levels if self.patches == "uint8" else NormalizedLevels(levels, self.family)
        rest |= beside
        if self.max_length is not None:
            rest[LEFT_OUT] = left_out
        if left_out and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"max_length={self.max_length:,}: the last {left_out} messages of a chat are left out; "
                f"the column {LEFT_OUT!r} has their number for each sample. Said once",
                stacklevel=2,
            )
        return rest

    def measure(self, sample: Sample) -> dict[str, int]:
        """The lengths of what `__call__` makes of a sample, from its text and the headers of its pictures."""
        tokens, plans, _ = self._planned(sample, pictures_of(sample, self.images, self.upright))
        lengths = dict.fromkeys(self._of_tokens, len(tokens.ids))
        return {**lengths, "pixel_values": sum(plan.rows for plan in plans), **self.family.lengths(plans)}

    def normalized(self, pixel_values: Levels) -> Levels:
        """Return levels as the model takes them: float32, normalised, of Qwen's families repeated in time.

        Args:
            pixel_values: uint8 [rows, ...], on any device; or the column of a batch.

        Returns:
            float32 [rows, ...], on that device: to the last bit what the processor makes on a CPU.
        """
        if isinstance(pixel_values, Ragged):
            return Ragged(self.family.normalized(pixel_values.values), pixel_values.offsets)
        return self.family.normalized(pixel_values)

    def _planned(
        self, sample: Sample, pictures: Sequence[Picture]
    ) -> tuple[VisionTokens, list[PicturePlan], int]:
        """Tokens, plans of the pictures that are kept, and how many messages are left out."""
        family = self.family
        tokens = (family.image_token, family.run_token, family.video_token)
        messages, counts = messages_with_pictures(sample[self.column], len(pictures), tokens, self.images)
        sizes = [picture.size for picture in pictures]
        plans = self.family.planned(sizes)
        tools = from_json(sample[self.tools]) if self.tools else None
        whole = self._tokens(messages, plans, tools)
        if self.max_length is None or len(whole.ids) <= self.max_length:
            return whole, plans, 0
        if self.overlong == "error":
            raise ValueError(f"{len(whole.ids):,} tokens, and max_length={self.max_length:,}")
        ends = [n for n in range(1, len(messages)) if messages[n - 1]["role"] == "assistant"]
        pictures_until = [0, *accumulate(counts)]
        longest: tuple[VisionTokens, list[PicturePlan], int] | None = None
        while ends:  # the longest part that fits, by halving
            middle = len(ends) // 2
            end = ends[middle]
            some = self.family.planned(sizes[: pictures_until[end]])
            part = self._tokens(messages[:end], some, tools)
            if len(part.ids) <= self.max_length:
                longest, ends = (part, some, len(messages) - end), ends[middle + 1 :]
            else:
                ends = ends[:middle]
        if longest is None:
            raise ValueError(
                f"{len(whole.ids):,} tokens, and not even its first turn has room in "
                f"max_length={self.max_length:,}: give a smaller max_pixels=, or a larger max_length="
            )
        return longest

    def _tokens(
        self, messages: Sequence[Mapping[str, Any]], plans: Sequence[PicturePlan], tools: Any
    ) -> VisionTokens:
        chat, placeholder = self.text.rendered(messages, tools), self.family.image_token
        pieces = chat.text.split(placeholder)
        if len(pieces) - 1 != len(plans):
            raise ValueError(
                f"the chat's text has {len(pieces) - 1} tokens {placeholder}, for {len(plans)} pictures: the "
                "template must write one for each part of type image"
            )
        text, spans = chat.text, chat.spans
        if any(plan.text != placeholder for plan in plans):
            text = pieces[0] + "".join(
                plan.text + piece for plan, piece in zip(plans, pieces[1:], strict=True)
            )
            gains = [0, *accumulate(len(plan.text) - len(placeholder) for plan in plans)]
            lengths = (len(piece) + len(placeholder) for piece in pieces[:-1])
            ends = [*accumulate(lengths)]
            spans = [(shifted(begin, ends, gains), shifted(end, ends, gains)) for begin, end in spans]
        encoding = self.file.tokenizer.encode(text, add_special_tokens=False)
        ids = np.array(encoding.ids, np.int64)
        places, runs = np.flatnonzero(ids == self._image_id), [run for plan in plans for run in plan.runs]
        if len(places) != len(runs):
            raise ValueError(
                f"the tokenizer makes {len(places)} tokens {self.family.run_token} of {len(runs)} in the "
                "text: it must have it among its special tokens"
            )
        learned = overlapping(encoding.offsets, spans)
        learned[places] = False
        times = np.ones(len(ids), np.int64)
        times[places] = runs
        return VisionTokens(np.repeat(ids, times), np.repeat(learned, times))

    def _levels(self, pictures: Sequence[Picture], plans: Sequence[PicturePlan]) -> Tensor:
        sizes = [plan.rows for plan in plans]
        out = torch.empty((sum(sizes), *self.family.row), dtype=torch.uint8)
        pixels = pixels_of(pictures[: len(plans)])
        for levels, part, plan in zip(pixels, out.split(sizes), plans, strict=True):
            self.family.fill(levels, plan, part)
        return out

    def __repr__(self) -> str:
        return f"VisionChat({self.file!r}, {self.family_name}, {self.column}, {self.images})"
