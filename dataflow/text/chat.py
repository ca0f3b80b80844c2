"""`ChatTemplate`: a transform from chats to token ids, and a mask that is true where the assistant speaks."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from itertools import chain
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dataflow.text.chat_template import ChatText, RenderedChat, template_of
from dataflow.text.tokenizer import (
    Overlong,
    TokenizerFile,
    checked_dtype,
    checked_length,
    ids_tensor,
    kept_length,
    text_of,
    tokenizer_fingerprint,
)

Sample = dict[str, Any]


class ChatTemplate:
    """Replaces a column of messages by token ids and a loss mask of the assistant's turns.

    Messages are a list of dicts with "role" and "content", as JSON Lines and lists of structs deliver them,
    or JSON text of one. Keys that are None are left out, as if they were not there. Like `Tokenize` it
    pickles cheaply and puts its `fingerprint` into the loader's state.

    Args:
        tokenizer: a `tokenizer.json`, or the folder of a model that has one.
        template: Jinja, or the path (`pathlib.Path`) of a file with it; None: the model's own,
            `chat_template.jinja` or in `tokenizer_config.json` beside the tokenizer. With marks
            `{% generation %}` ... `{% endgeneration %}` the mask is what lies between them; without, all of
            each turn of the assistant.
        column: the messages.
        into: the column of token ids, a 1-D tensor a sample; a `Ragged` a batch.
        mask: the column of the mask, bool, as long as the ids: true at tokens that the model shall learn to
            say. All false where the assistant says nothing. "": none.
        tools: the column of the tools that the template lists; "": there is none.
        variables: what else the template gets, as JSON values; those of `tokenizer_config.json`
            (`bos_token`, `eos_token` ...) unless named here.
        max_length: most tokens of a chat; None: any number.
        overlong: longer ones are cut at the end ("truncate"), or bad samples ("error").
        dtype: of the ids, "int32" or "int64".

    Raises:
        OSError: the tokenizer's or template's file cannot be read.
        ValueError: a setting is out of range, or there is no template.
        MissingTextSupportError: the extra `text` is not installed.

    Examples:
        >>> chats = ChatTemplate("tokenizer.json", template=Path("chat_template.jinja"))
        >>> sample = ShardedDataset("chats.jsonl", transform=chats)[0]
        >>> len(sample["input_ids"]) == len(sample["loss_mask"])
        True
    """

    def __init__(
        self,
        tokenizer: str | os.PathLike[str],
        *,
        template: str | os.PathLike[str] | None = None,
        column: str = "messages",
        into: str = "input_ids",
        mask: str = "loss_mask",
        tools: str = "",
        variables: Mapping[str, Any] | None = None,
        max_length: int | None = None,
        overlong: Overlong = "truncate",
        dtype: str = "int32",
    ) -> None:
        self.file = TokenizerFile(tokenizer)
        self.text = ChatText(*template_of(self.file.path.parent, template, variables))
        self.column, self.into, self.mask, self.tools = column, into, mask, tools
        self._dtype = checked_dtype(dtype)
        checked_length(max_length, overlong)
        self.max_length, self.overlong = max_length, overlong

    @property
    def lists(self) -> tuple[str, ...]:
        """See `BatchTransform`."""
        return (self.into, self.mask) if self.mask else (self.into,)

    @property
    def targets(self) -> tuple[str, ...]:
        """See `BatchTransform`."""
        return (self.mask,) if self.mask else ()

    @property
    def fingerprint(self) -> str:
        """See `BatchTransform`."""
        text = (self.text.source, self.text.variables)
        return tokenizer_fingerprint(self.file, *text, self.column, self.tools, self.max_length)

    def __call__(self, sample: Sample) -> Sample:
        """One sample: `into` and `mask` in place of `column`."""
        return self.batch([sample])[0]

    def batch(self, samples: list[Sample]) -> list[Sample]:
        """Many samples, in one call of the tokenizer."""
        chats = [self._rendered(sample) for sample in samples]
        encodings = self.file.tokenizer.encode_batch([chat.text for chat in chats], add_special_tokens=False)
        together = zip(samples, chats, encodings, strict=True)
        return [self._with_ids(sample, chat, encoding) for sample, chat, encoding in together]

    def _rendered(self, sample: Sample) -> RenderedChat:
        tools = from_json(sample[self.tools]) if self.tools else None
        return self.text.rendered(messages_of(sample[self.column]), tools)

    def _with_ids(self, sample: Sample, chat: RenderedChat, encoding: Any) -> Sample:
        ids = encoding.ids
        length = kept_length(len(ids), self.max_length, self.overlong)
        rest = {name: value for name, value in sample.items() if name not in (self.column, self.tools)}
        rest[self.into] = ids_tensor(ids[:length], self._dtype)
        if self.mask:
            rest[self.mask] = torch.from_numpy(overlapping(encoding.offsets, chat.spans)[:length])
        return rest

    def __repr__(self) -> str:
        return f"ChatTemplate({self.file!r}, {self.column} -> {', '.join(self.lists)})"


def messages_of(value: object) -> list[dict[str, Any]]:
    """The messages of a chat, as plain values. `ValueError` for what is none."""
    messages = from_json(value)
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"a chat is a list of messages, got {messages!r:.80}")
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ValueError(f'message {number} is no dict with a "role": {message!r:.80}')
    return [{key: value for key, value in message.items() if value is not None} for message in messages]


def from_json(value: object) -> Any:
    """Return what JSON text says; anything else is that already."""
    if value is None or isinstance(value, list | Mapping):
        return value
    return json.loads(text_of(value))


def overlapping(offsets: list[tuple[int, int]], spans: list[tuple[int, int]]) -> NDArray[np.bool_]:
    """Return which tokens have a character in a span.

    Args:
        offsets: [n], where each token begins and ends.
        spans: ascending, none within another.
    """
    bounds = np.fromiter(chain.from_iterable(spans), np.int64).reshape(-1, 2)
    token_spans = np.fromiter(chain.from_iterable(offsets), np.int64).reshape(-1, 2)
    span = np.searchsorted(
        bounds[:, 1], token_spans[:, 0], side="right"
    )  # the first that ends behind its begin
    inside = span < len(bounds)
    inside[inside] = token_spans[inside, 1] > bounds[span[inside], 0]
    return inside
