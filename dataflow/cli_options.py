"""What the commands share: errors as one line, and options such as sizes and `name=value`."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any

import click

from sharding.errors import DataflowError

_EXPECTED = (DataflowError, ValueError, OSError, ImportError)

Command = Callable[..., None]


def plain_errors(command: Command) -> Command:
    """Add `--traceback`, and without it end expected errors as one line."""

    @click.option("--traceback", is_flag=True, help="Show Python's traceback if there is an error.")
    @functools.wraps(command)
    def run(*args: Any, traceback: bool, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except _EXPECTED as error:
            if traceback:
                raise
            raise click.ClickException(_error_text(error)) from None

    return run


def _error_text(error: BaseException) -> str:
    text = str(error) or type(error).__name__
    return "\n".join([text, *(f"  {note}" for note in getattr(error, "__notes__", ()))])


def size(_ctx: click.Context, _param: click.Parameter, value: str | None) -> int | None:
    """Bytes, from text such as "4MiB"."""
    if value is None:
        return None
    from dataflow.memory_limit import parse_bytes

    try:
        nbytes = parse_bytes(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None
    if nbytes < 1:
        raise click.BadParameter(f"must be at least 1 byte, got {value}")
    return nbytes


def settings(_ctx: click.Context, _param: click.Parameter, values: tuple[str, ...]) -> dict[str, Any]:
    """Keyword arguments from `name=value`; a value is JSON if it reads as such, else text."""
    found = {}
    for given in values:
        name, equals, text = given.partition("=")
        if not name or not equals:
            raise click.BadParameter(f"must be name=value, got {given!r}")
        found[name] = _json_or_text(text)
    return found


def _json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text
