"""Lengths that were found, kept in a file: who has them all need not find them again.

The file lies in the user's cache folder, under a name made of what decides about the lengths, and holds one
number a sample. It is written beside its place and renamed, and what several runs have found of the same
samples comes together in it. One that cannot be read or written costs only that lengths are found again.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections.abc import Sequence
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

from sharding.lengths.found_plan import LEFT_OUT
from sharding.write.file import NewFile, private_folder, user_folder

_VERSION = 1
_MOST = np.iinfo(np.int32).max


class KeptLengths:
    """The lengths of a dataset's samples, as far as they are known. For one thread.

    Args:
        num_samples: of the dataset.
        marks: what decides about the lengths: what identifies the samples, and how they are made.
    """

    def __init__(self, num_samples: int, marks: Sequence[str]) -> None:
        name = hashlib.blake2b(json.dumps([_VERSION, *marks]).encode(), digest_size=16).hexdigest()
        self.path = os.path.join(user_folder("lengths"), f"{name}.npy")
        self._num_samples = num_samples
        self.lengths = self._read()
        """int32 [num_samples] in file order; `LEFT_OUT` where none is known."""
        self._num_missing = int(np.count_nonzero(self.lengths == LEFT_OUT))
        self._is_saved = True

    @property
    def is_complete(self) -> bool:
        """Whether all are known."""
        return not self._num_missing

    @property
    def digest(self) -> str:
        """What tells these lengths from others."""
        return hashlib.blake2b(self.lengths.tobytes(), digest_size=16).hexdigest()

    def note(self, samples: NDArray[np.int64], lengths: NDArray[np.int64]) -> None:
        """Note the lengths of some samples, each listed once."""
        known = (lengths != LEFT_OUT) & (lengths <= _MOST)
        samples = samples[known]
        num_new = int(np.count_nonzero(self.lengths[samples] == LEFT_OUT))
        self.lengths[samples] = lengths[known]
        self._num_missing -= num_new
        self._is_saved &= not num_new

    def forget(self) -> None:
        """Know none: other ranks know others."""
        self.lengths = np.full(self._num_samples, LEFT_OUT, np.int32)
        self._num_missing, self._is_saved = self._num_samples, True

    def save(self) -> None:
        """Write what is known, with what others have written since, if there is something new."""
        if self._is_saved:
            return
        self._is_saved = True
        written = self._read()
        whole, data = np.where(self.lengths == LEFT_OUT, written, self.lengths), io.BytesIO()
        np.save(data, whole, allow_pickle=False)
        with suppress(OSError):
            private_folder(os.path.dirname(self.path))
            file = NewFile(self.path, overwrite=True)
            file.write(data.getbuffer())
            file.commit()

    def _read(self) -> NDArray[np.int32]:
        with suppress(OSError, ValueError, EOFError):
            lengths = np.load(self.path, allow_pickle=False)
            if (
                lengths.shape == (self._num_samples,)
                and lengths.dtype == np.int32
                and (lengths >= LEFT_OUT).all()
            ):
                return np.array(lengths)
        return np.full(self._num_samples, LEFT_OUT, np.int32)
