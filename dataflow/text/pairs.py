"""Pairs of answers, of which one is preferred: one sample, one list of tokens, so that nothing parts them.

Both answers lie one after the other in the columns of a sample, and its length is that of both: rows are
packed, budgets kept and buckets chosen for whole pairs, on one rank, by the planner that knows nothing of
them. When the batch is there, `split_pairs` makes two documents of each.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from dataflow.batch.packed import PackedRows, PackedSegments, PaddedRows
from dataflow.text.chat import ChatTemplate, messages_of
from dataflow.text.tokenizer import short_hash, text_of

Sample = dict[str, Any]
CHOSEN_LENGTH = "chosen_length"


class TextStage(Protocol):
    """The part of a transform that pairs need: `Tokenize` and `ChatTemplate` have it."""

    column: str
    lists: tuple[str, ...]
    fingerprint: str

    def batch(self, samples: list[Sample], /) -> list[Sample]:
        """See `BatchTransform`."""


class PreferencePairs:
    """Turns a preferred and a rejected answer into one sample that stays whole.

    The columns that `stage` makes hold the preferred answer, then the rejected one; `chosen_length` is the
    number of tokens of the former. Give `split_pairs` as `batch_transform`, and `overlong="error"` to
    `Packed`: a pair longer than a row cannot lie in it, `max_length=n // 2` of the stage sees to it.

    Args:
        stage: what tokenizes one answer: `Tokenize(...)` or `ChatTemplate(...)`. Its own column need not be
            there.
        chosen: the column of the preferred answers: text, or messages.
        rejected: the column of the others.
        prompt: the column of what comes before both of them; "": they have it themselves.

    Examples:
        >>> pairs = PreferencePairs(Tokenize("tokenizer.json", max_length=32), prompt="prompt")
        >>> dataset = ShardedDataset("pairs.jsonl", transform=pairs, batch_transform=split_pairs)
        >>> with DataLoader(dataset, 2, batching=Packed(64, "input_ids", overlong="error")) as loader:
        ...     rows = next(iter(loader))["input_ids"]  # segments 1, 3, 5 ... are the preferred answers
    """

    def __init__(
        self, stage: TextStage, *, chosen: str = "chosen", rejected: str = "rejected", prompt: str = ""
    ) -> None:
        self.stage, self.chosen, self.rejected, self.prompt = stage, chosen, rejected, prompt

    @property
    def targets(self) -> tuple[str, ...]:
        """See `BatchTransform`."""
        return tuple(getattr(self.stage, "targets", ()))

    @property
    def lists(self) -> tuple[str, ...]:
        """See `BatchTransform`."""
        return self.stage.lists

    @property
    def fingerprint(self) -> str:
        """See `BatchTransform`."""
        text = "/".join((self.stage.fingerprint, self.chosen, self.rejected, self.prompt))
        return f"{self.stage.fingerprint.partition('-')[0]}-{short_hash(text)}"

    def __call__(self, sample: Sample) -> Sample:
        """Turn one sample into token ids of a pair."""
        return self.batch([sample])[0]

    def batch(self, samples: list[Sample]) -> list[Sample]:
        """Many samples: both answers of all of them in one call of the stage."""
        answers = [self._answer(sample, name) for name in (self.chosen, self.rejected) for sample in samples]
        results = self.stage.batch(answers)
        pairs = zip(samples, results[: len(samples)], results[len(samples) :], strict=True)
        return [self._joined(sample, chosen, rejected) for sample, chosen, rejected in pairs]

    def _answer(self, sample: Sample, name: str) -> Sample:
        if not self.prompt:
            return {**sample, self.stage.column: sample[name]}
        prompt, answer = sample[self.prompt], sample[name]
        if isinstance(answer, list) or isinstance(self.stage, ChatTemplate):  # or JSON text of one
            return {**sample, self.stage.column: [*messages_of(prompt), *messages_of(answer)]}
        return {**sample, self.stage.column: text_of(prompt) + text_of(answer)}

    def _joined(self, sample: Sample, chosen: Sample, rejected: Sample) -> Sample:
        left_out = (self.chosen, self.rejected, self.prompt, *self.lists)
        rest = {name: value for name, value in chosen.items() if name not in left_out}
        lead = self.lists[0]
        for name, answer in ((self.chosen, chosen), (self.rejected, rejected)):
            if not len(answer[lead]):
                raise ValueError(f"column {name!r} has no tokens, so there is no pair")
        joined = {name: torch.cat((chosen[name], rejected[name])) for name in self.lists}
        return {**rest, **joined, CHOSEN_LENGTH: len(chosen[lead])}

    def __repr__(self) -> str:
        return f"PreferencePairs({self.stage!r}, {self.chosen}, {self.rejected})"


def split_pairs(
    batch: Mapping[str, Any],
    *,
    column: str = "input_ids",
    length: str = CHOSEN_LENGTH,
    pad: float | Mapping[str, float] = 0,
) -> dict[str, Any]:
    """A batch of pairs with two documents of each. For `batch_transform=`.

    `PackedRows` of n pairs get 2n segments, the preferred answer before the rejected one: segments
    0, 2, 4 ... and 1, 3, 5 ...; all columns stay in place. `PaddedRows` [n, longest] become [2n, longest
    answer], all preferred answers before all rejected ones, as TRL has them; so do tensors of their shape.

    Args:
        batch: the loader's.
        column: the one whose lengths count.
        length: the column of the tokens of preferred answers, one a pair.
        pad: what fills padded rows up, for all columns or each by name.

    Returns:
        The batch with two documents a pair; columns that are neither packed nor padded as they were.

    Raises:
        ValueError: a pair is not whole, or the batch is neither packed nor padded.

    Examples:
        >>> pairs = PreferencePairs(Tokenize("tokenizer.json", max_length=32), prompt="prompt")
        >>> dataset = ShardedDataset("pairs.jsonl", transform=pairs, batch_transform=split_pairs)
        >>> with DataLoader(dataset, batching=TokenBudget(256, "input_ids")) as loader:
        ...     answers = next(iter(loader))["input_ids"].tokens  # the preferred ones, then the rejected ones
    """
    rows, first = batch[column], torch.as_tensor(batch[length])
    if isinstance(rows, PackedRows):
        return {**batch, column: _two_segments(rows, first)}
    if not isinstance(rows, PaddedRows):
        raise ValueError(f"column {column!r} is neither packed nor padded, but {type(rows).__name__}")
    _check_whole(first, rows.lengths)
    lengths = torch.cat((first, rows.lengths - first))
    shape, columns = rows.tokens.shape, dict(batch)

    def split(name: str, values: Tensor) -> Tensor:
        fill = pad.get(name, 0) if isinstance(pad, Mapping) else pad
        out = values.new_full((len(lengths), int(lengths.max())), fill)
        positions = torch.arange(shape[1], device=first.device)
        chosen, inside = positions < first[:, None], positions < rows.lengths[:, None]
        out[positions[: out.shape[1]] < lengths[:, None]] = torch.cat(
            (values[chosen], values[inside & ~chosen])
        )
        return out

    for name, value in batch.items():
        if isinstance(value, Tensor) and value.shape == shape:
            columns[name] = split(name, value)
    return {**columns, column: PaddedRows(split(column, rows.tokens), lengths)}


def _two_segments(rows: PackedRows, first: Tensor) -> PackedRows:
    segments, length = rows.segments, rows.tokens.shape[1]
    _check_whole(first, segments.length)
    if bool(segments.begin.any()):
        raise ValueError("a pair was split: give Packed overlong='error'")
    # Segments lie in the order of the rows: the one of a position is the row's first and its segment id.
    row = torch.arange(len(rows.tokens), device=first.device)
    number = torch.searchsorted(segments.row, row)[:, None] + rows.segment_ids - 1
    inside = rows.segment_ids > 0
    chosen = torch.where(inside, first[number.clamp(0, len(first) - 1)], 0)
    is_second = inside & (rows.positions >= chosen)
    bounds = (
        torch.cat((rows.cu_seqlens, (segments.row * length + segments.start + first).int())).sort().values
    )

    def interleaved(chosen: Tensor, rejected: Tensor) -> Tensor:
        return torch.stack((chosen, rejected), 1).flatten()

    return rows._replace(
        segment_ids=torch.where(inside, 2 * rows.segment_ids - 1 + is_second.int(), 0).int(),
        positions=(rows.positions - torch.where(is_second, chosen, 0)).int(),
        cu_seqlens=bounds,
        max_seqlen=int(bounds.diff().max()) if len(bounds) > 1 else 0,
        segments=PackedSegments(
            row=interleaved(segments.row, segments.row),
            start=interleaved(segments.start, segments.start + first),
            begin=torch.zeros_like(first, dtype=segments.begin.dtype).repeat(2),
            length=interleaved(first, segments.length - first),
        ),
    )


def _check_whole(first: Tensor, lengths: Tensor) -> None:
    bad = (first <= 0) | (first >= lengths)
    if bool(bad.any()):
        number = int(bad.nonzero()[0])
        raise ValueError(
            f"pair {number} has {int(lengths[number])} tokens, {int(first[number])} of the preferred answer: "
            "it is not whole, so batching must not truncate"
        )
