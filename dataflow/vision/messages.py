"""Messages of chats with pictures: their parts as templates take them, and how many pictures each has."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any

from dataflow.text.chat import messages_of


def messages_with_pictures(
    value: object, num_pictures: int, tokens: Sequence[str], images: str
) -> tuple[list[dict[str, Any]], list[int]]:
    """The messages of a chat, with plain parts, and how many pictures each has.

    Args:
        value: what the column of messages has.
        num_pictures: the pictures of the sample.
        tokens: those that stand for pixels, which no text may have.
        images: the column of the pictures, for messages.

    Raises `ValueError` where messages and pictures do not agree.
    """
    messages = [plain_message(message) for message in messages_of(value)]
    counts = [_num_pictures(number, message, tokens) for number, message in enumerate(messages)]
    if sum(counts) != num_pictures:
        raise ValueError(
            f"its messages have {sum(counts)} pictures, and column {images!r} has {num_pictures}"
        )
    return messages, counts


def _num_pictures(number: int, message: Mapping[str, Any], tokens: Sequence[str]) -> int:
    content = message.get("content")
    parts: list[Any] = content if isinstance(content, list) else [content]
    for part in parts:
        text = part.get("text", "") if isinstance(part, Mapping) else part
        for token in tokens:
            if isinstance(text, str) and token in text:
                raise ValueError(
                    f"the text of message {number} has the token {token}, which stands for pixels"
                )
    return sum(isinstance(part, Mapping) and part.get("type") == "image" for part in parts)


def plain_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message whose parts have what says something: no None, and no address or pixels of a picture.

    `ValueError` for a part that is video or sound.
    """
    content = message.get("content")
    if not isinstance(content, list):
        return dict(message)
    parts: list[Any] = []
    for part in content:
        if not isinstance(part, Mapping):
            parts.append(part)
            continue
        fields = {key: value for key, value in part.items() if value is not None}
        kind = fields.get("type")
        if kind in ("image", "image_url") or (kind is None and ("image" in fields or "image_url" in fields)):
            parts.append({"type": "image"})
        elif kind in ("video", "audio") or "video" in fields or "audio" in fields:
            raise ValueError(
                f"a part of a message is {kind or 'video or audio'!r}: only text and images are taken"
            )
        else:
            parts.append({key: value for key, value in fields.items() if key not in ("image", "image_url")})
    return {**message, "content": parts}


def shifted(place: int, ends: Sequence[int], gained: Sequence[int]) -> int:
    """Return where a character lies once the placeholders before it stand for longer text.

    Args:
        place: of the character, before.
        ends: [n], where each placeholder ends, ascending.
        gained: [n + 1], the characters gained until there.
    """
    return place + gained[bisect_right(ends, place)]
