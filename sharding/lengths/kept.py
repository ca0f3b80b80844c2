"""Lengths that were found, kept in a file: who has them all need not find them again.

The file of a dataset lies in the user's cache folder, under a name made of what decides about lengths, and
has one number a sample. It is written beside its place and renamed, and what several runs have found of the
same samples comes together in it. One that cannot be read or written costs only that they are found again.
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
_PARTS = 16
"""The file is written as often in an epoch, and at its end."""


class KeptLengths:
    """The lengths of samples, as far as they are known. For one thread.

    Args:
        sources: of each dataset that samples come from, how many it has, and what decides about lengths:
            what identifies them, and how they are made. Each has a file of its own.
    """

    def __init__(self, sources: Sequence[tuple[int, Sequence[str]]]) -> None:
        self._files = [(path_of(marks), num_samples) for num_samples, marks in sources]
        self.lengths = self._read()
        """int32 [num_samples] in file order, source after source; `LEFT_OUT` where none is known."""
        self._num_missing = int(np.count_nonzero(self.lengths == LEFT_OUT))
        self._num_unsaved = 0

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
        self._num_unsaved += num_new

    def forget(self) -> None:
        """Know none: other ranks know others."""
        self.lengths = np.full(len(self.lengths), LEFT_OUT, np.int32)
        self._num_missing, self._num_unsaved = len(self.lengths), 0

    def save_much(self) -> None:
        """Write what is known, if so much is new that it should not be lost with this process."""
        if self._num_unsaved * _PARTS >= len(self.lengths):
            self.save()

    def save(self) -> None:
        """Write what is known, with what others have written since, if there is something new."""
        if not self._num_unsaved:
            return
        self._num_unsaved = 0
        whole = np.where(self.lengths == LEFT_OUT, self._read(), self.lengths)
        ends = np.cumsum([num_samples for _, num_samples in self._files])
        with suppress(OSError):
            private_folder(user_folder("lengths"))
            for (path, _), own in zip(self._files, np.split(whole, ends[:-1]), strict=True):
                data = io.BytesIO()
                np.save(data, own, allow_pickle=False)
                file = NewFile(path, overwrite=True)
                file.write(data.getbuffer())
                file.commit()

    def _read(self) -> NDArray[np.int32]:
        return np.concatenate([_read(path, num_samples) for path, num_samples in self._files])


def path_of(marks: Sequence[str]) -> str:
    """The file of lengths that these decide about."""
    name = hashlib.blake2b(json.dumps([_VERSION, *marks]).encode(), digest_size=16).hexdigest()
    return os.path.join(user_folder("lengths"), f"{name}.npy")


def _read(path: str, num_samples: int) -> NDArray[np.int32]:
    """What a file holds; nothing is known where it cannot be read, or is damaged."""
    with suppress(OSError, ValueError, EOFError):
        lengths = np.load(path, allow_pickle=False)
        if lengths.shape == (num_samples,) and lengths.dtype == np.int32 and (lengths >= LEFT_OUT).all():
            return np.array(lengths)
    return np.full(num_samples, LEFT_OUT, np.int32)
