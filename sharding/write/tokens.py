"""Token shards in progress: documents in, flat tokens out, as `TokensFormat` reads them.

Beside each `.bin` lies a `.json` that says what the file itself cannot: dtype, length, end of documents,
tokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from sharding.errors import SampleError
from sharding.formats.tokens import COLUMN, SIDECAR_SUFFIX
from sharding.write.file import NewFile
from sharding.write.shard import NewShard
from sharding.write.values import check_rows


@dataclass(frozen=True, kw_only=True)
class TokenOptions:
    """The rule by which documents become tokens of a file. Raises `ValueError` where that is none."""

    dtype: str
    """numpy integer type of a token."""
    length: int | None = None
    """Tokens a sample has where the reader gives no `length=`; None: the reader has to."""
    end_token: int | None = None
    """Token appended to each document; None: documents follow one another."""
    tokenizer: str | None = None
    """The identity of the tokenizer, such as the hash of its file."""

    def __post_init__(self) -> None:
        try:
            kind = np.dtype(self.dtype)
        except TypeError as error:
            raise ValueError(f"dtype must be an integer type, got {self.dtype!r}") from error
        if kind.kind not in "iu" or not kind.isnative:
            raise ValueError(f"dtype must be an integer type in native byte order, got {self.dtype!r}")
        if self.length is not None and self.length < 1:
            raise ValueError(f"length must be >= 1, got {self.length}")
        limits = np.iinfo(kind)
        if self.end_token is not None and not limits.min <= self.end_token <= limits.max:
            raise ValueError(f"end_token {self.end_token} does not fit dtype {self.dtype}")


class NewTokenShard(NewShard):
    """Documents as one run of tokens."""

    format: ClassVar[str] = "tokens"

    def __init__(self, file: NewFile, *, options: TokenOptions) -> None:
        super().__init__(file)
        self._options = options
        self._dtype = np.dtype(options.dtype)
        self._sizes: list[int] = []
        self._end: NDArray[Any] = np.array(
            [] if options.end_token is None else [options.end_token], self._dtype
        )

    def add(self, sample: Mapping[str, Any]) -> None:
        """Append a document: {"tokens": integers [n]}."""
        check_rows(self._file.url, [sample], len(self._sizes))
        tokens = self._tokens(sample)
        self._file.write(tokens.tobytes())
        self._file.write(self._end.tobytes())
        self._sizes.append(len(tokens) + len(self._end))

    def _tokens(self, sample: Mapping[str, Any]) -> NDArray[Any]:
        names = [name for name in sample if not name.startswith("_")]
        key = sample.get("__key__")
        if names != [COLUMN]:
            reason = (
                f"a sample of token shards has the field {COLUMN!r} alone, got {', '.join(names) or 'none'}"
            )
            raise self._refused(key, reason)
        tokens = np.asarray(sample[COLUMN])
        if not tokens.size:
            return np.zeros(0, self._dtype)
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
            raise self._refused(key, f"tokens must be integers [n], got {tokens.dtype} {list(tokens.shape)}")
        limits, low, high = np.iinfo(self._dtype), int(tokens.min()), int(tokens.max())
        if low < limits.min or high > limits.max:
            reason = f"token {low if low < limits.min else high} does not fit dtype {self._dtype.name}"
            raise self._refused(key, reason)
        return tokens.astype(self._dtype, copy=False)

    def _refused(self, key: Any, reason: str) -> SampleError:
        if key is None:
            reason = f"document {len(self._sizes)} of the shard: {reason}"
        return self.refused(reason, None if key is None else str(key))

    def finish(self) -> Mapping[str, bytes]:
        """The description."""
        described = {"format": self.format, **asdict(self._options)}
        described |= {"num_tokens": sum(self._sizes), "num_documents": len(self._sizes)}
        return {SIDECAR_SUFFIX: (json.dumps(described, indent=1) + "\n").encode()}
