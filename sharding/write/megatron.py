"""Megatron's shards in progress: tokens, with an `.idx` beside them that has where documents begin."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from sharding.formats.megatron import index_bytes, known_dtypes
from sharding.write.file import NewFile
from sharding.write.tokens import NewTokenShard, TokenOptions


class NewMegatronShard(NewTokenShard):
    """Documents as one run of tokens, with an index beside it."""

    format: ClassVar[str] = "megatron"

    def __init__(self, file: NewFile, *, options: TokenOptions) -> None:
        super().__init__(file, options=options)
        if self._dtype.name not in known_dtypes():
            raise ValueError(f"Megatron has no dtype {options.dtype!r}; one of {', '.join(known_dtypes())}")

    def finish(self) -> Mapping[str, bytes]:
        """The description, and the index."""
        return {**super().finish(), ".idx": index_bytes(np.array(self._sizes, np.int64), self._dtype)}
