"""Frameworks that are missing, and versions of them that this project was tried with.

A framework's hooks may change with any of its releases. A training should neither end because of a version
number nor go wrong in silence, so a version outside the tried range is a warning that names both.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version


@contextmanager
def needed_for(module: str, *, extra: str) -> Iterator[None]:
    """Say which extra of this project a module of ours needs, where an import in the block fails."""
    try:
        yield
    except ImportError as error:
        raise ImportError(
            f"{module} needs another package ({error}): pip install 'dataflow-loader[{extra}]'"
        ) from error


def warn_if_untried(package: str, tried: tuple[str, str]) -> None:
    """Warn where the installed version of a package lies outside the range that this project was tried with.

    Args:
        package: its name on the package index, such as `"torchtitan"`. One that is not installed is passed
            over.
        tried: the lowest and the highest version that was tried. Only the numbers that are given count:
            2.6.3 lies within `("2.5", "2.6")`.

    Examples:
        >>> warn_if_untried("torchtitan", ("0.3", "0.3"))
    """
    if not is_tried(package, tried):
        span = tried[0] if tried[0] == tried[1] else f"{tried[0]} to {tried[1]}"
        warnings.warn(
            f"{package} {version(package)} is installed, and this version of dataflow-loader was tried with "
            f"{package} {span}; if the training fails, or does not go on exactly from a checkpoint, install "
            f"{package} {tried[1]}",
            stacklevel=3,
        )


def is_tried(package: str, tried: tuple[str, str]) -> bool:
    """Return whether the installed version of a package lies in a range; true if it is not installed.

    Arguments are those of `warn_if_untried`.
    """
    try:
        numbers = _numbers(version(package))
    except PackageNotFoundError:
        return True
    lowest, highest = map(_numbers, tried)
    return numbers[: len(lowest)] >= lowest and numbers[: len(highest)] <= highest


def _numbers(text: str) -> tuple[int, ...]:
    """The numbers of a release: (2, 6, 0) of 2.6.0rc1+cpu."""
    match = re.match(r"\d+(\.\d+)*", text)
    return tuple(map(int, match[0].split("."))) if match else ()
