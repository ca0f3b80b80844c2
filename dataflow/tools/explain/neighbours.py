"""Measures of steps side by side, so that what is unusual of one beside its neighbours shows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dataflow.batch.packed import IGNORE, PackedRows
from dataflow.outputs.fixed import MASK_SUFFIX
from dataflow.ragged import Ragged
from dataflow.tools.explain.values import TokenWords, numbers_text, text_of
from sharding.spans import Ints

GRAM, MOST_TOKENS = 8, 1 << 20
"""Tokens or words in a row that are looked for again, and those of a column and batch that are looked at."""
_FACTORS = np.uint64(0x9E3779B97F4A7C15) ** np.arange(GRAM, dtype=np.uint64)
_LEAST_STEPS, _FAR, _LEAST, _LEAST_SHARE = 3, 3.0, 0.05, 0.02
"""Steps from which on one is marked; how many times their usual distance from their median it is away then;
the least such distance, as a part of the median, and of shares."""


class StepMeasures:
    """The measures of one step: of its rows, and of the batches that were made again.

    Args:
        name: of the step.
        rows: those of its samples, of all ranks.
        num_sources: datasets of the mixture; 1: there is none.
    """

    def __init__(self, name: str, rows: Sequence[Mapping[str, Any]], num_sources: int) -> None:
        self.name = name
        self._sums = dict[str, tuple[float, float]]()
        """Numerator and denominator of each mean or share."""
        self._most = dict[str, tuple[int, str]]()
        """Times that the words of a column come that come most often, and these."""
        self.is_cut = False
        """True if repeats were counted among the first tokens of a batch alone."""
        if rows:
            lengths = [row["length"] for row in rows]
            self._add("bytes of a sample or its block", sum(lengths), len(lengths))
            self._add("bytes of the largest", max(lengths), 1)
        for source in range(num_sources) if num_sources > 1 else ():
            self._add(f"share of source {source}", sum(row["source"] == source for row in rows), len(rows))

    @property
    def values(self) -> dict[str, float]:
        """Each measure by its name, which begins with "share" for a share."""
        return {name: have / of for name, (have, of) in self._sums.items() if of}

    def repeated(self) -> Iterator[str]:
        """Yield a line on each column in which the same words come again and again."""
        for name, (times, text) in self._most.items():
            if times > 2:
                yield f"{self.name}: the same {GRAM} tokens or words of {name} come {times:,} times: {text}"

    def add(self, batch: Any, words: TokenWords) -> None:
        """Measure all rows of a batch."""
        columns = batch if isinstance(batch, Mapping) else {"batch": batch}
        for name, column in columns.items():
            self._add(f"share of {name} missing", *_missing(column, columns.get(name + MASK_SUFFIX)))
            if name in (words.mask, "loss_mask", "labels"):
                trained = _flat(column) != (IGNORE if name == "labels" else 0)
                self._add(f"share of {name} trained", int(trained.sum()), len(trained))
            elif name == words.column or isinstance(column, PackedRows):
                rows = _token_rows(column)
                self._add(f"tokens of {name} in a piece", sum(map(len, rows)), len(rows))
                self._add_repeats(name, rows, words.decode if name == words.column else numbers_text)
            elif isinstance(column, list) and (texts := [text for text in column if isinstance(text, str)]):
                self._add(f"characters of {name}", sum(map(len, texts)), len(texts))
                self._add_repeats(name, *_word_rows(texts))
            elif isinstance(column, Ragged):
                self._add(f"length of {name}", len(column.values), len(column.offsets) - 1)

    def _add(self, name: str, have: float, of: float) -> None:
        before = self._sums.get(name, (0.0, 0.0))
        self._sums[name] = before[0] + have, before[1] + of

    def _add_repeats(self, name: str, rows: Sequence[Ints], decode: Callable[[Sequence[Any]], str]) -> None:
        """Count the n-grams of rows of tokens that came before in the batch, up to some many tokens."""
        ends = np.cumsum([len(row) for row in rows])
        self.is_cut |= bool(len(ends) and ends[-1] > MOST_TOKENS)
        rows = [row[:MOST_TOKENS] for row in rows[: 1 + int(np.searchsorted(ends, MOST_TOKENS))]]
        grams = [np.lib.stride_tricks.sliding_window_view(row, GRAM) for row in rows if len(row) >= GRAM]
        if not grams:
            return
        windows = np.concatenate(grams)
        keys = (windows.astype(np.uint64) * _FACTORS).sum(axis=1)
        _, first, counts = np.unique(keys, return_index=True, return_counts=True)
        self._add(f"share of {name} repeated", len(keys) - len(first), len(keys))
        most = int(counts.argmax())
        repeat = int(counts[most]), decode(windows[first[most]].tolist())
        self._most[name] = max(repeat, self._most.get(name, repeat), key=lambda pair: pair[0])


def compared(steps: Sequence[StepMeasures]) -> Iterator[str]:
    """Yield a table of the measures of steps, with what is unusual marked, and what comes again and again."""
    names = dict.fromkeys(name for step in steps for name in step.values)
    lines = []
    for name in names:
        values = [step.values.get(name) for step in steps]
        usual = {"missing": 0.0, "trained": 1.0}.get(name.rpartition(" ")[2])
        if all(value in (None, usual) for value in values):
            continue
        odd = unusual(values, _LEAST_SHARE if name.startswith("share") else 0.0)
        cells = (_cell(name, *pair) for pair in zip(values, odd, strict=True))
        lines.append(f"<tr><th>{text_of(name)}</th>{''.join(cells)}</tr>")
    if lines:
        heads = "".join(f"<th>{text_of(step.name)}</th>" for step in steps)
        yield f"<div class=scroll><table><tr><th></th>{heads}</tr>{''.join(lines)}</table></div>"
        marked = (
            f"; marked is what lies more than {_FAR:g} times as far from the median as half of the steps do"
            if len(steps) >= _LEAST_STEPS
            else ""
        )
        cut = f"; of repeats the first {MOST_TOKENS:,} tokens" if any(step.is_cut for step in steps) else ""
        note = f"Bytes and sources are of all samples, the rest of the batches shown{cut}{marked}."
        yield f"<p class=dim>{note}</p>"
    yield from (f"<p class=dim>{text_of(line)}</p>" for step in steps for line in step.repeated())


def unusual(values: Sequence[float | None], least: float = 0.0) -> list[bool]:
    """Return which of the values of some steps are far from their median; none of fewer than three.

    `least`: a distance from the median that is never far.
    """
    known = np.array([value for value in values if value is not None])
    if len(known) < _LEAST_STEPS:
        return [False] * len(values)
    median = float(np.median(known))
    usual = max(float(np.median(np.abs(known - median))), _LEAST * abs(median), least)
    return [value is not None and abs(value - median) > _FAR * usual for value in values]


def _cell(name: str, value: float | None, is_odd: bool) -> str:
    text = "" if value is None else f"{value:.1%}" if name.startswith("share") else f"{value:,.0f}"
    return f"<td{' class=odd' if is_odd else ''}>{text}</td>"


def _missing(column: Any, mask: Any) -> tuple[int, int]:
    """The number of missing values of a column, and of all."""
    if isinstance(mask, torch.Tensor) and mask.dtype == torch.bool:
        return int((~mask).sum()), mask.numel()
    if isinstance(column, list):
        return sum(value is None for value in column), len(column)
    if isinstance(column, torch.Tensor) and column.is_floating_point():
        return int(column.isnan().sum()), column.numel()
    return 0, 0


def _flat(column: Any) -> NDArray[Any]:
    """All elements of a column of numbers, without padding of packed rows; of others none."""
    if isinstance(column, PackedRows):
        column = column.tokens[column.segment_ids > 0]
    column = column.values if isinstance(column, Ragged) else column
    parts = column if isinstance(column, list) else [column]
    tensors = [part.reshape(-1).cpu() for part in parts if isinstance(part, torch.Tensor)]
    return torch.cat(tensors).float().numpy() if tensors else np.empty(0)


def _token_rows(column: Any) -> list[Ints]:
    """The tokens of each row, or piece of a packed one, without padding; none where they are no integers."""
    if not isinstance(column, PackedRows):
        rows = column.rows() if isinstance(column, Ragged) else column
        tensors = [row.reshape(-1).cpu() for row in rows if isinstance(row, torch.Tensor)]
        return [row.numpy().astype(np.int64) for row in tensors if not row.is_floating_point()]
    tokens, ids = column.tokens.cpu(), column.segment_ids.cpu().numpy()
    if tokens.shape != ids.shape or tokens.is_floating_point():  # arrays, which are no tokens
        return []
    changes = np.flatnonzero(np.diff(ids.reshape(-1))) + 1
    cuts = np.union1d(changes, np.arange(1, len(ids)) * ids.shape[1])
    pieces = zip(np.split(tokens.numpy().reshape(-1), cuts), np.split(ids.reshape(-1), cuts), strict=True)
    return [piece.astype(np.int64) for piece, number in pieces if len(number) and number[0]]


def _word_rows(texts: Sequence[str]) -> tuple[list[Ints], Callable[[Sequence[Any]], str]]:
    """The words of texts as numbers, and what makes text of these."""
    known = dict[str, int]()
    rows = [
        np.array([known.setdefault(word, len(known)) for word in text.split()], np.int64) for text in texts
    ]
    words = [*known]
    return rows, lambda numbers: " ".join(words[number] for number in numbers)
