"""What the commands share: errors as one line, and how a dataset, sizes and `name=value` are given."""

from __future__ import annotations

import functools
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
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
    """Message and notes; not the traceback of a rank, which `run_ranks` tells in a note of many lines."""
    text = str(error) or type(error).__name__
    notes = [note.splitlines() for note in getattr(error, "__notes__", ())]
    return "\n".join([text, *(f"  {lines[0].rstrip(':')}" for lines in notes if lines)])


def output_path(_ctx: click.Context, _param: click.Parameter, value: str | None) -> str | None:
    """A file that can be written, which is seen before anything is measured; "-" is stdout."""
    if value is None or value == "-":
        return value
    path = Path(value)
    if path.is_dir():
        raise click.BadParameter(f"{value!r} is a folder; name a file in it")
    if not path.parent.is_dir():
        raise click.BadParameter(f"the folder {str(path.parent)!r} does not exist; make it first")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise click.BadParameter(f"{value!r} may not be written")
    return value


json_option = click.option(
    "--json",
    "json_path",
    callback=output_path,
    metavar="PATH",
    help='Write all figures to a file; "-": print them.',
)


class Finite(click.FloatRange):
    """A range without NaN, which no comparison finds outside, and without infinity."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """As `FloatRange`."""
        found = super().convert(value, param, ctx)
        if not math.isfinite(found):
            self.fail(f"{value} is not a finite number", param, ctx)
        return found


POSITIVE = Finite(min=0, min_open=True)


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


storage_options = click.option(
    "--storage-option",
    "storage_options",
    callback=settings,
    multiple=True,
    metavar="NAME=VALUE",
    help="Keyword argument for the fsspec filesystem, such as anon=true; may be repeated.",
)


def dataset_options(command: Command) -> Command:
    """Add SOURCE and the options that say how to read it; its `given` is a `Given` of them."""

    @click.argument("source", nargs=-1, required=True)
    @click.option(
        "--format",
        "format_",
        default="auto",
        show_default=True,
        metavar="NAME",
        help="tar, parquet, arrow, arrow-stream, jsonl, tokens or megatron; auto goes by the file endings.",
    )
    @click.option("--dtype", metavar="TYPE", help="Type of a token in .bin files, such as uint16.")
    @click.option(
        "--length", type=click.IntRange(min=1), metavar="N", help="Tokens a sample, for token files."
    )
    @click.option(
        "--allow-unfinished", is_flag=True, help="Read tar and Arrow files that end too early, too."
    )
    @storage_options
    @functools.wraps(command)
    def run(
        source: tuple[str, ...],
        format_: str,
        dtype: str | None,
        length: int | None,
        allow_unfinished: bool,
        storage_options: dict[str, Any],
        **rest: Any,
    ) -> None:
        from dataflow.tools.terminal.given import Given

        told = {
            "format": format_,
            "dtype": dtype,
            "length": length,
            "allow_unfinished": allow_unfinished,
            "storage_options": storage_options,
        }
        options = {name: value for name, value in told.items() if value and value != "auto"}
        command(given=Given(source, options), **rest)

    return run


def size(_ctx: click.Context, _param: click.Parameter, value: str | None) -> int | None:
    """Bytes, from text such as "4MiB"."""
    if value is None:
        return None
    from dataflow.limits import parse_bytes

    try:
        nbytes = parse_bytes(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None
    if nbytes < 1:
        raise click.BadParameter(f"must be at least 1 byte, got {value}")
    return nbytes
