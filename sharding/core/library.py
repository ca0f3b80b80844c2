"""Load `libcore.so` by ctypes, with the types of its functions."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from sharding.core.compile import LIBRARY

VERSION = 16
"""The version of the contract in core.h."""
_CURE = (
    "Compile it with `python -m sharding.core.compile`, where there is a C compiler: gcc, clang or that of "
    "`pip install ziglang`"
)

_FUNCTIONS = {
    "core_version": ":i",
    "core_run": "piiip:i",
    "core_interleave": "piiip:",
    "core_resize": "pp:i",
    "core_patches": "p:i",
    "core_bring": "pip:i",
    "core_read": "pi:i",
    "core_seeded_permutations": "ppip:i",
    "core_token_draws": "pppppipi:i",
    "core_sum_samples": "pi:",
    "core_numbers": "pippippi:i",
    "core_parse": "p:i",
    "core_records": "pippipp:i",
    "core_crc32c": "pippipi:i",
    "core_tfrecords": "pippi:i",
    "core_json_lines": "pipip:i",
    "core_queue_bytes": ":i",
    "core_open": "pii:i",
    "core_submit": "pp:",
    "core_give": "ppii:i",
    "core_take_back": "p:p",
    "core_take": "ppp:i",
    "core_work": "ppip:i",
    "core_drain": "p:",
    "core_count": "pp:",
    "core_stop": "p:",
    "core_close": "p:",
    "core_shield": "pii:i",
    "core_unshield": "pi:",
    "core_end_with_parent": "ii:i",
    "core_tell_frames": "ii:i",
}
"""Arguments and result: pointers and int64."""
_TYPES = {"p": ctypes.c_void_p, "i": ctypes.c_int64, "": None}


def loaded(load: Callable[[str], Any], path: Path) -> Any:
    """The library with its functions' types, if it is of this version."""
    try:
        library = load(str(path))
        version = library.core_version()
    except (OSError, AttributeError) as error:
        raise ImportError(f"the compiled core cannot be loaded: {error}. {_CURE}") from error
    if version != VERSION:
        raise ImportError(f"the compiled core {path} is of version {version}, not {VERSION}. {_CURE}")
    for name, types in _FUNCTIONS.items():
        arguments, result = types.split(":")
        function = getattr(library, name)
        function.argtypes, function.restype = [_TYPES[kind] for kind in arguments], _TYPES[result]
    return library


@cache
def library() -> Any:
    """The library of this installation; its calls let go of the interpreter lock."""
    return loaded(ctypes.CDLL, LIBRARY)


def address_of(array: NDArray[Any]) -> int:
    """Return the address at which an array begins."""
    return array.__array_interface__["data"][0]  # type: ignore[no-any-return]
