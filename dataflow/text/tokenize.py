"""`Tokenize`: a transform from text to token ids, many documents at once and without the interpreter lock."""

from __future__ import annotations

import os
from typing import Any

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


class Tokenize:
    """Replaces a column of text by its token ids: `ShardedDataset("*.jsonl", transform=Tokenize(...))`.

    A document stays one sample, however long it is: `Packed` splits what is longer than a row. An empty one
    is its `bos` and `eos`, or an empty list. `Tokenize` pickles as a path and a hash, and its `fingerprint`
    is in the loader's state: a run does not go on with another tokenizer.

    Args:
        tokenizer: a `tokenizer.json`, or the folder of a model that has one.
        column: text as `str`, or as bytes in UTF-8 (`decode={"text": None}`).
        into: the column of token ids, a 1-D tensor a sample; a `Ragged` a batch.
        bos: a token (text or id) before each document; None: none.
        eos: a token (text or id) after each document; None: none.
        add_special_tokens: whether the tokenizer puts its own around the document besides.
        max_length: most tokens of a document, `bos` and `eos` included; None: any number.
        overlong: longer ones are cut before `eos` ("truncate"), or bad samples ("error").
        errors: what becomes of bytes that are no UTF-8: "strict" makes the sample a bad one; or as
            `bytes.decode` has it, "replace" for one.
        dtype: "int32" or "int64".

    Raises:
        OSError: the tokenizer's file cannot be read.
        ValueError: a setting is out of range, or the tokenizer has no such token.
        MissingTextSupportError: the extra `text` is not installed.

    Examples:
        >>> dataset = ShardedDataset("text.jsonl", transform=Tokenize("tokenizer.json", eos="<|end|>"))
        >>> dataset[0]["input_ids"].dtype
        torch.int32
    """

    releases_gil = True

    def __init__(
        self,
        tokenizer: str | os.PathLike[str],
        *,
        column: str = "text",
        into: str = "input_ids",
        bos: str | int | None = None,
        eos: str | int | None = None,
        add_special_tokens: bool = False,
        max_length: int | None = None,
        overlong: Overlong = "truncate",
        errors: str = "strict",
        dtype: str = "int32",
    ) -> None:
        self.file = TokenizerFile(tokenizer)
        self.column, self.into, self.errors = column, into, errors
        self._bos, self._eos = self.file.token_ids("bos", bos), self.file.token_ids("eos", eos)
        self._dtype = checked_dtype(dtype)
        checked_length(max_length, overlong, len(self._bos) + len(self._eos))
        self.add_special_tokens, self.max_length, self.overlong = add_special_tokens, max_length, overlong

    @property
    def lists(self) -> tuple[str, ...]:
        """See `BatchTransform`."""
        return (self.into,)

    @property
    def fingerprint(self) -> str:
        """See `BatchTransform`."""
        options = (self.column, self._bos, self._eos, self.add_special_tokens, self.max_length, self.errors)
        return tokenizer_fingerprint(self.file, *options)

    def __call__(self, sample: Sample) -> Sample:
        """One sample: `into` in place of `column`."""
        return self.batch([sample])[0]

    def batch(self, samples: list[Sample]) -> list[Sample]:
        """Many samples, in one call of the tokenizer, which lets go of the interpreter lock."""
        texts = [text_of(sample[self.column], self.errors) for sample in samples]
        encodings = self.file.tokenizer.encode_batch_fast(texts, add_special_tokens=self.add_special_tokens)
        return [self._with_ids(sample, each.ids) for sample, each in zip(samples, encodings, strict=True)]

    def _with_ids(self, sample: Sample, ids: list[int]) -> Sample:
        num_special = len(self._bos) + len(self._eos)
        length = kept_length(len(ids) + num_special, self.max_length, self.overlong) - num_special
        rest = {name: value for name, value in sample.items() if name != self.column}
        ids = [*self._bos, *(ids[:length] if length < len(ids) else ids), *self._eos]
        return {**rest, self.into: ids_tensor(ids, self._dtype)}

    def __repr__(self) -> str:
        return f"Tokenize({self.file!r}, {self.column} -> {self.into})"
