"""What is kept of errors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from prefetch.errors import forget_frames


@dataclass
class EqualError(Exception):
    """An error that equals others, and so has no hash."""

    number: int


def raised(call: Callable[[], object]) -> BaseException:
    try:
        call()
    except BaseException as error:
        return error
    raise AssertionError


def one_from_another() -> None:
    try:
        raise EqualError(1)
    except EqualError as error:
        raise EqualError(1) from error


def one_after_another() -> None:
    try:
        one_from_another()
    except EqualError:
        raise KeyError("later")  # noqa: B904 - of which the first is no cause


def a_group() -> None:
    raise BaseExceptionGroup("all", [raised(one_after_another), raised(one_from_another)])


def a_circle() -> None:
    first, second = raised(one_from_another), raised(one_after_another)
    first.__cause__, second.__cause__ = second, first
    raise first


@pytest.mark.parametrize("call", [one_from_another, one_after_another, a_group, a_circle])
def test_no_error_of_a_chain_keeps_frames(call: Callable[[], object]) -> None:
    errors = [error := raised(call)]
    for one in errors:
        inner = one.exceptions if isinstance(one, BaseExceptionGroup) else ()
        linked = [other for other in (one.__cause__, one.__context__, *inner) if other is not None]
        errors += [other for other in linked if not any(other is known for known in errors)]
    assert len(errors) > 1
    assert all(one.__traceback__ for one in errors)
    forget_frames(error)
    assert not any(one.__traceback__ for one in errors)
