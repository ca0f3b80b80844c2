"""The three global generators of random numbers: of `random`, numpy and torch.

Their state, whether anything was drawn from them, and how a process that builds seeds them.
"""

from __future__ import annotations

import _random
import ctypes
import random
import sys
from typing import Any

import numpy as np
import torch
from torch.utils.data._utils import worker as torch_worker

_STATE_BYTES = 625 * 4
"""MT19937: 624 words and the position in them."""


def seed_all(base_seed: int, number: int) -> None:
    """Seed the global generators as PyTorch seeds worker `number`."""
    random.seed(base_seed + number)
    torch.manual_seed(base_seed + number)
    np.random.seed(torch_worker._generate_state(base_seed, number))


def seed_by_key(key: int) -> None:
    """Let the global generators draw what one sample of an epoch draws, whoever builds it."""
    random.seed(key)
    np.random.seed(key & 0xFFFFFFFF)
    torch.default_generator.manual_seed(key & (1 << 63) - 1)


def random_state() -> Any:
    """The state of the three global generators."""
    return random.getstate(), torch.get_rng_state(), np.random.get_state()


def set_random_state(state: Any) -> None:
    """Set the three global generators."""
    random.setstate(state[0])
    torch.set_rng_state(state[1])
    np.random.set_state(state[2])


def _address_of_python_state() -> int | None:
    """Return where CPython keeps the state of `random`, behind the head of the object; None if not there."""
    address = id(random._inst) + object.__basicsize__
    if (
        sys.implementation.name != "cpython"
        or _random.Random.__basicsize__ < object.__basicsize__ + _STATE_BYTES
    ):
        return None
    position, *words = np.frombuffer(ctypes.string_at(address, _STATE_BYTES), np.uint32).tolist()
    return address if (*words, position) == random.getstate()[1] else None


class Draws:
    """Notices whether anything was drawn from the three global generators.

    The states of numpy and of `random` are looked at where they lie: asking for them takes as long as
    handing over a small batch. `by_address=False`: that of `random` is asked for all the same.
    """

    def __init__(self, *, by_address: bool = True) -> None:
        generator = np.random.mtrand._rand._bit_generator
        self._numpy_at: int = generator.ctypes.state_address
        self._python_at = _address_of_python_state() if by_address else None
        self._words, self._pair = b"", False
        self._last = self._look()

    def _look(self) -> Any:
        words = ctypes.string_at(self._numpy_at, _STATE_BYTES)
        # Normal numbers are made in pairs, and handing out the second changes no word.
        if words != self._words or self._pair:
            self._pair = bool(np.random.get_state(legacy=False)["has_gauss"])
        self._words = words
        return words, self._pair, torch.get_rng_state().numpy().tobytes(), self._look_at_python()

    def _look_at_python(self) -> Any:
        if self._python_at is None:
            return random.getstate()
        return ctypes.string_at(self._python_at, _STATE_BYTES), random._inst.gauss_next  # type: ignore[attr-defined]

    def since(self) -> Any:
        """The state of the generators if anything was drawn since the last call, else None."""
        before, self._last = self._last, self._look()
        return None if self._last == before else random_state()
