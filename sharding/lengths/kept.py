"""Lengths that were measured, kept in a file: who has them all need not measure them again.

The file of a dataset lies in the user's cache folder, under a name made of what decides about lengths, and
has one number a sample. It is written beside its path and renamed, and what several runs have measured of
the same samples comes together in it. One that cannot be read or written costs only measuring again.
`dataflow index` puts files beside a saved catalog, where all who open that catalog read them, too.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from sharding.lengths.unit_plan import LEFT_OUT
from sharding.lengths.units import lengths_in
from sharding.write.file import NewFile, private_folder, user_folder, warn_not_kept

_VERSION = 2
_MOST = np.iinfo(np.int32).max
_PARTS = 16
"""The file is written as often in an epoch, and at its end."""


@dataclass(frozen=True, kw_only=True)
class LengthsFile:
    """The file of one dataset's lengths."""

    num_samples: int
    catalog: str
    """The identity of the catalog that the samples are of."""
    facts: Sequence[str]
    """The facts that decide about lengths: which samples of the catalog, and how they are made."""
    catalog_path: str | None = None
    """The path of the saved catalog; None: in the cache folder."""

    @property
    def name(self) -> str:
        """The same for the same lengths."""
        data = json.dumps([_VERSION, self.catalog, *self.facts]).encode()
        return f"{self.catalog}-{hashlib.blake2b(data, digest_size=16).hexdigest()}.npy"

    @property
    def path(self) -> str:
        """The file in the user's cache folder."""
        return os.path.join(user_folder("lengths"), self.name)

    def read(self) -> NDArray[np.int32]:
        """Return the lengths that are known, int32 [num_samples]."""
        lengths = _read(self.path, self.num_samples)
        if self.catalog_path is not None and (lengths == LEFT_OUT).any():
            beside = os.path.join(folder_beside(self.catalog_path), self.name)
            lengths = np.where(lengths == LEFT_OUT, _read(beside, self.num_samples), lengths)
        return lengths


def folder_beside(catalog_path: str) -> str:
    """The folder for lengths beside a saved catalog."""
    return os.path.splitext(catalog_path)[0] + ".lengths"


class KeptLengths:
    """The lengths of samples, as far as they are known. For one thread.

    Args:
        files: of each dataset that samples come from; then, for each column of costs, as many.
    """

    def __init__(self, *files: Sequence[LengthsFile]) -> None:
        self._files = files
        self.lengths = self._read()
        """int32 [num_samples] in file order, source after source; `LEFT_OUT` where none is known. With costs,
        [num_samples, 1 + costs]."""
        self._num_missing = int(np.count_nonzero(self.lengths == LEFT_OUT))
        self._num_unsaved = 0

    @property
    def is_complete(self) -> bool:
        """Return whether all are known."""
        return not self._num_missing

    @property
    def digest(self) -> str:
        """Return a hash that tells these lengths from others."""
        return hashlib.blake2b(self.lengths.tobytes(), digest_size=16).hexdigest()

    def note(self, samples: NDArray[np.int64], lengths: NDArray[np.int64]) -> None:
        """Note the lengths of some samples."""
        known = (lengths_in(lengths) != LEFT_OUT) & (np.atleast_2d(lengths.T) <= _MOST).all(axis=0)
        samples, index = np.unique(samples[known], return_index=True)  # a balanced one comes again
        num_new = int(np.count_nonzero(self.lengths[samples] == LEFT_OUT))
        self.lengths[samples] = lengths[known][index]
        self._num_missing -= num_new
        self._num_unsaved += num_new

    def forget(self) -> None:
        """Know none: other ranks know others."""
        self.lengths = np.full(self.lengths.shape, LEFT_OUT, np.int32)
        self._num_missing, self._num_unsaved = self.lengths.size, 0

    def save_much(self) -> None:
        """Write what is known, if so much is new that it should not be lost with this process."""
        if self._num_unsaved * _PARTS >= self.lengths.size:
            self.save()

    def save(self) -> None:
        """Write what is known, with what others have written since, if there is something new."""
        if not self._num_unsaved:
            return
        self._num_unsaved = 0
        whole = np.where(self.lengths == LEFT_OUT, self._read(), self.lengths)
        ends = np.cumsum([file.num_samples for file in self._files[0]])
        parts = [part for column in np.atleast_2d(whole.T) for part in np.split(column, ends[:-1])]
        try:
            private_folder(user_folder("lengths"))
            for of, numbers in zip(chain(*self._files), parts, strict=True):
                data = io.BytesIO()
                np.save(data, numbers, allow_pickle=False)
                file = NewFile(of.path, overwrite=True)
                file.write(data.getvalue())
                file.commit()
        except OSError as error:
            so = "they are measured again by the next start. See that this user may write there"
            warn_not_kept("lengths of samples", self._files[0][0].path, error, so=so)

    def _read(self) -> NDArray[np.int32]:
        columns = [np.concatenate([file.read() for file in files]) for files in self._files]
        return columns[0] if len(columns) == 1 else np.stack(columns, axis=1)


def _read(path: str, num_samples: int) -> NDArray[np.int32]:
    """Read a file; nothing is known where it cannot be read, or is damaged."""
    with suppress(OSError, ValueError, EOFError):
        lengths = np.load(path, allow_pickle=False)
        if lengths.shape == (num_samples,) and lengths.dtype == np.int32 and (lengths >= LEFT_OUT).all():
            return np.array(lengths)
    return np.full(num_samples, LEFT_OUT, np.int32)
