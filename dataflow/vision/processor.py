"""`Processor`: a transform that calls a model's own processor, for the families that `VisionChat` lacks."""

from __future__ import annotations

import json
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dataflow.text.chat import from_json, overlapping
from dataflow.text.chat_template import ChatText
from dataflow.text.tokenizer import checked_dtype, hash_of, short_hash
from dataflow.vision.messages import messages_with_pictures, shifted
from dataflow.vision.pictures import Picture, picture_members, pictures_of, pillow, pixels_of

Sample = dict[str, Any]
_CHECKED = 16
"""Samples of each copy whose lengths are compared with what was measured."""
_TRIED = ([(48, 64)], [(192, 256), (320, 64)])
"""Sizes of blank pictures, of two samples, that tell which columns a processor makes."""
_PLACEHOLDERS = ("image_token", "video_token")
_OF_TEXT = ("attention_mask", "offset_mapping", "text_replacement_offsets")


class ProcessorColumn(NamedTuple):
    """One column that a processor makes of pictures, as its answers to blank ones have it."""

    dtype: torch.dtype
    trailing: tuple[int, ...]
    """The shape behind the first dimension, of the first answer."""
    is_batched: bool
    """True where the first dimension is of samples: it is dropped."""
    is_ragged: bool
    """True where all samples have the same trailing shape."""
    counts_pictures: bool
    """True where the first dimension is of pictures."""

    def empty(self) -> Tensor:
        """The column of a sample without a picture."""
        if self.is_batched:
            return torch.zeros((0, *self.trailing[1:]) if self.trailing else (), dtype=self.dtype)
        return torch.zeros((0, *self.trailing), dtype=self.dtype)


class Processor:
    """Replaces messages and encoded pictures by what a processor of `transformers` makes of them.

    For the families that `VisionChat` has, that takes less time, and plans without pixels. A sample gets
    `input_ids` [tokens] and `loss_mask` [tokens], bool, true at what the assistant says, and the columns that
    the processor makes: those of tokens [tokens], those of pictures [number, ...], with number 0 where it has
    none. All are tensors. What only says where samples are padded is left out.

    Messages and pictures are those of `VisionChat`. The template runs in the sandbox of `ChatTemplate`.

    Rows are planned without pixels where the processor has transformers' hook for the number of tokens and it
    is right for two samples of blank pictures; else a warning says so, and there is no `measure`. The first
    samples are compared with what was measured, and another length is an error.

    Args:
        processor: one with `image_processor` and a tokenizer of the `tokenizers` library.
        template: as in `ChatTemplate`; None: the processor's own.
        column: the messages.
        images: the pictures.
        tools: as in `ChatTemplate`.
        variables: as in `ChatTemplate`, above the tokenizer's special tokens.
        arguments: what else the processor is called with, as JSON values.
        upright: as in `VisionChat`.
        dtype: of ids, "int32" or "int64".

    Raises:
        TypeError: it is no such processor.
        ValueError: a setting is out of range, there is no template, or the processor makes columns that are
            no arrays.
        MissingTextSupportError: the extra `text` is not installed.

    Examples:
        >>> processor = AutoProcessor.from_pretrained("model")  # doctest: +SKIP
        >>> chats = Processor(processor)  # doctest: +SKIP
        >>> dataset = ShardedDataset("chats.parquet", transform=chats)  # doctest: +SKIP
    """

    def __init__(
        self,
        processor: Any,
        *,
        template: str | None = None,
        column: str = "messages",
        images: str = "images",
        tools: str = "",
        variables: Mapping[str, Any] | None = None,
        arguments: Mapping[str, Any] | None = None,
        upright: bool = True,
        dtype: str = "int32",
    ) -> None:
        tokenizer: Any = getattr(processor, "tokenizer", None)
        if not hasattr(processor, "image_processor") or not hasattr(tokenizer, "backend_tokenizer"):
            raise TypeError(
                f"{type(processor).__name__} is no processor of pictures and text with a tokenizer of the "
                "`tokenizers` library"
            )
        self.processor, self.arguments = processor, dict(arguments or {})
        source = template or getattr(processor, "chat_template", None) or tokenizer.chat_template
        if not isinstance(source, str):
            raise ValueError(f"{type(processor).__name__} has no chat template: pass template=")
        self.text = ChatText(source, {**tokenizer.special_tokens_map, **(variables or {})})
        self.column, self.images, self.tools, self.upright = column, images, tools, upright
        self._dtype = checked_dtype(dtype)
        self._bos = tokenizer.bos_token
        names = [getattr(each, name, None) for each in (processor, tokenizer) for name in _PLACEHOLDERS]
        self._tokens = tuple(dict.fromkeys(name for name in names if isinstance(name, str)))
        self.fingerprint = self._fingerprint()
        hook_error = self._try()
        self._left_to_check, self._lock = _CHECKED, threading.Lock()
        self.measure: Callable[[Sample], dict[str, int]] | None = None if hook_error else self._measured
        """The lengths of a sample from its text and the headers of its pictures; None: not known."""
        if hook_error:
            warnings.warn(
                f"{type(processor).__name__} does not tell lengths without pixels ({hook_error}): rows are "
                "planned from samples that are made",
                stacklevel=2,
            )

    @property
    def lists(self) -> tuple[str, ...]:
        """See `BatchTransform`."""
        ragged = (name for name, column in self._columns.items() if column.is_ragged)
        return ("input_ids", "loss_mask", *self._token_columns, *ragged)

    @property
    def targets(self) -> tuple[str, ...]:
        """See `BatchTransform`."""
        return ("loss_mask",)

    def __call__(self, sample: Sample) -> Sample:
        """One sample, with the processor's columns. `ValueError` for a bad one."""
        pictures = pictures_of(sample, self.images, self.upright)
        members = () if self.images in sample else picture_members(sample)
        gone = {*members, self.column, self.images, self.tools}
        rest = {name: value for name, value in sample.items() if name not in gone}
        columns = self._made(sample, pictures)
        self._check(sample, pictures, columns)
        return {**rest, **columns}

    def _made(self, sample: Sample, pictures: Sequence[Picture]) -> Sample:
        text, spans = self._text(sample, len(pictures))
        pixels = [pillow().fromarray(each) for each in pixels_of(pictures)]
        answer = self._answer(text, pixels)
        replaced = (answer["text_replacement_offsets"] or [[]])[0] if pixels else []
        gained = [0, *(each["new_span"][1] - each["span"][1] for each in replaced)]
        ends = [each["span"][1] for each in replaced]
        spans = [(shifted(begin, ends, gained), shifted(end, ends, gained)) for begin, end in spans]
        ids = torch.as_tensor(answer["input_ids"])[0]
        offsets = [tuple(pair) for pair in torch.as_tensor(answer["offset_mapping"])[0].tolist()]
        learned = overlapping(offsets, spans)
        for each in replaced:  # what a picture became is not said
            learned &= ~overlapping(offsets, [each["new_span"]])
        out = {"input_ids": ids.to(torch.int32 if self._dtype == np.int32 else torch.int64)}
        out["loss_mask"] = torch.from_numpy(learned)
        for name in self._token_columns:
            value = answer.get(name)
            out[name] = torch.zeros(len(ids), dtype=torch.int64) if value is None else value[0]
        for name, column in self._columns.items():
            value = answer.get(name)
            if value is None:
                value = column.empty()
            elif column.is_batched:
                value = value[0]
            out[name] = value
        return out

    def _text(self, sample: Sample, num_pictures: int) -> tuple[str, list[tuple[int, int]]]:
        """The text with one placeholder for each picture, and where the assistant speaks."""
        messages, _ = messages_with_pictures(sample[self.column], num_pictures, self._tokens, self.images)
        chat = self.text.rendered(messages, from_json(sample[self.tools]) if self.tools else None)
        return chat.text, chat.spans

    def _answer(self, text: str, pixels: Sequence[Any]) -> dict[str, Any]:
        """Return what the processor makes, as it is."""
        pictures = {"images": [[*pixels]]} if pixels else {}
        offsets = {"return_offsets_mapping": True, "return_text_replacement_offsets": True}
        options = {**self.arguments, **self._special(text), **offsets, "return_tensors": "pt"}
        return dict(self.processor(text=[text], **pictures, **options))

    def _special(self, text: str) -> dict[str, bool]:
        """An option: as in transformers, a text that begins with the first token gets no other."""
        return {"add_special_tokens": False} if self._bos and text.startswith(self._bos) else {}

    def _measured(self, sample: Sample) -> dict[str, int]:
        pictures = pictures_of(sample, self.images, self.upright)
        text, _ = self._text(sample, len(pictures))
        return self._lengths(text, [picture.size for picture in pictures])

    def _lengths(self, text: str, sizes: Sequence[tuple[int, int]]) -> dict[str, int]:
        """Lengths by the processor's own hook, as vLLM calls it."""
        number = len(self.processor.tokenizer(text, **self._special(text))["input_ids"])
        counts = self.processor._get_num_multimodal_tokens(
            image_sizes=[list(size) for size in sizes], **self.arguments
        )
        number += sum(counts.num_image_tokens) - len(sizes)
        lengths = dict.fromkeys(("input_ids", "loss_mask", *self._token_columns), number)
        counted = [name for name, column in self._columns.items() if column.counts_pictures]
        lengths |= dict.fromkeys(counted, len(sizes))
        return lengths | ({"pixel_values": sum(counts.num_image_patches)} if self._tells_patches else {})

    def _check(self, sample: Sample, pictures: Sequence[Picture], columns: Sample) -> None:
        """Compare a sample with what was measured of it, while it is one of the first."""
        with self._lock:
            if self.measure is None or not self._left_to_check:
                return
            self._left_to_check -= 1
        text, _ = self._text(sample, len(pictures))
        for name, length in self._lengths(text, [picture.size for picture in pictures]).items():
            if len(columns[name]) != length:
                raise ValueError(
                    f"{type(self.processor).__name__} makes {len(columns[name])} of {name!r}, and its hook "
                    f"_get_num_multimodal_tokens says {length}: it cannot plan rows. Set measure = None on "
                    "this transform, so that samples are made to be planned"
                )

    def _try(self) -> str:
        """Learn its columns by blank pictures; return why the hook tells no lengths, "": it does."""
        answers, texts = [], []
        for sizes in _TRIED:
            content = [*({"type": "image"} for _ in sizes), {"type": "text", "text": "a"}]
            text, _ = self._text({self.column: [{"role": "user", "content": content}]}, len(sizes))
            blank = [pillow().new("RGB", (width, height)) for height, width in sizes]
            answers.append(self._answer(text, blank))
            texts.append(text)
        first, second = answers
        if lists := [name for name in first if name not in _OF_TEXT and not isinstance(first[name], Tensor)]:
            raise ValueError(f"{type(self.processor).__name__} makes {lists[0]!r} as a list, not as an array")
        names = [name for name in first if name not in (*_OF_TEXT, "input_ids")]
        shapes = [answer["input_ids"].shape for answer in answers]
        of_tokens = tuple(name for name in names if [answer[name].shape for answer in answers] == shapes)
        self._token_columns = of_tokens
        self._columns = {
            name: _column(first[name], second[name], [len(sizes) for sizes in _TRIED])
            for name in names
            if name not in of_tokens
        }
        return self._hook_error(texts, answers)

    def _hook_error(self, texts: Sequence[str], answers: Sequence[Mapping[str, Any]]) -> str:
        if not hasattr(self.processor, "_get_num_multimodal_tokens"):
            return "it has no _get_num_multimodal_tokens"
        self._tells_patches = "pixel_values" in self._columns
        measures = [self._lengths(text, sizes) for text, sizes in zip(texts, _TRIED, strict=True)]
        for sizes, lengths, answer in zip(_TRIED, measures, answers, strict=True):
            length = answer["input_ids"].shape[1]
            if lengths["input_ids"] != length:
                return (
                    f"its hook says {lengths['input_ids']} tokens for {len(sizes)} blank pictures, and it "
                    f"makes {length}"
                )
        if self._tells_patches:
            is_batched = self._columns["pixel_values"].is_batched
            patch_counts = [answer["pixel_values"].shape[is_batched] for answer in answers]
            self._tells_patches = patch_counts == [lengths["pixel_values"] for lengths in measures]
        return ""

    def _fingerprint(self) -> str:
        """The hash of its tokenizer, "-", that of all settings."""
        tokenizer = json.loads(self.processor.tokenizer.backend_tokenizer.to_str())
        parts = {key: value for key, value in tokenizer.items() if key not in ("padding", "truncation")}
        settings = [self.processor.to_json_string(), self.text.source, self.text.variables, self.arguments]
        settings += [self.column, self.images, self.tools, self.upright, str(self._dtype)]
        return f"{hash_of(json.dumps(parts).encode())}-{short_hash(json.dumps(settings, sort_keys=True))}"

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=threading.Lock())

    def __repr__(self) -> str:
        return f"Processor({type(self.processor).__name__}, {self.column}, {self.images})"


def _column(first: Tensor, second: Tensor, pictures: Sequence[int]) -> ProcessorColumn:
    """Return what two answers, of so many pictures, say of a column."""
    shapes = [tuple(each.shape) for each in (first, second)]
    is_batched = all(shape[:1] == (1,) for shape in shapes)
    trailing = [shape[1 + is_batched :] for shape in shapes]
    return ProcessorColumn(
        dtype=first.dtype,
        trailing=shapes[0][1:],
        is_batched=is_batched,
        is_ragged=trailing[0] == trailing[1] and len(shapes[0]) > is_batched,
        counts_pictures=not is_batched and [shape[0] for shape in shapes] == [*pictures],
    )
