"""Options, each declared once: as a field of a frozen settings value, which a command is given.

`option` makes such a field, `options_of` adds the options of a settings class to a command and hands it the
value. Errors that a user can cure end as one line. Nothing here imports torch: `--help` is quick.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sharding.errors import DataflowError
from sharding.formats import FORMATS
from sharding.printable import printable

if TYPE_CHECKING:
    from concurrent.futures import Executor

_EXPECTED = (DataflowError, ValueError, OSError, ImportError)

Command = Callable[..., None]


def plain_errors(command: Command) -> Command:
    """Add `--traceback`, and without it end expected errors as one line."""

    @click.option("--traceback", is_flag=True, help="Show Python's traceback of an error.")
    @functools.wraps(command)
    def run(*args: Any, traceback: bool, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except _EXPECTED as error:
            if traceback:
                raise
            raise click.ClickException(_typed(_error_text(error))) from None
        except KeyboardInterrupt as stopped:  # what it has cost is in its notes
            for note in getattr(stopped, "__notes__", ()):
                click.echo(f"\n{note}", err=True)
            raise

    return run


def _error_text(error: BaseException) -> str:
    """Message and notes; not the traceback of a rank, which `run_ranks` tells in a note of many lines."""
    text = str(error) or type(error).__name__
    notes = [note.splitlines() for note in getattr(error, "__notes__", ())]
    return printable("\n".join([text, *(f"  {lines[0].rstrip(':')}" for lines in notes if lines)]))


def _typed(text: str) -> str:
    """A message with this command's options in place of arguments: `--split train` of `split='train'`."""
    of_dataset = {each.name for each in dataclasses.fields(DatasetArguments)}
    params = click.get_current_context().command.params
    names = {each.name: each.opts[0] for each in params if each.name in of_dataset}

    def flag(match: re.Match[str]) -> str:
        name, value = match.groups()
        return match[0] if name not in names else f"{names[name]} {value or ''}".strip()

    return re.sub(r"\b(?<![-.])(\w+)=(?:'([^']*)'|(?=[\s,;:)]|$))", flag, text)


def named_function(name: str) -> Any:
    """Return what the user calls `package.module:name`; modules of the current folder count, too.

    Raises:
        ImportError: there is no such module.
        ValueError: the module has no such function, or that is no such name.
    """
    module_name, colon, path = name.partition(":")
    if not (module_name and colon and path):
        raise ValueError(f"a function is named as package.module:name, got {name!r}")
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # a console script's own folder stands first, not the user's
    try:
        module = import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # it is there, and imports what is not
        raise ImportError(
            f"{name}: there is no module {error.name!r} here ({os.getcwd()}) or installed"
        ) from error
    try:
        value = attrgetter(path)(module)
    except AttributeError:
        value = None
    if not callable(value):
        raise ValueError(f"{name}: the module has no function {path!r}")
    return value


# ---- settings -------------------------------------------------------------------------------------------


def option(
    text: str, kind: Any = None, default: Any = dataclasses.MISSING, flag: str = "", **more: Any
) -> Any:
    """A field of a settings class that is an option, too.

    Args:
        text: its help.
        kind: click's type; bool makes a flag.
        default: of the field and of the option, or a callable that makes it; without one it is required.
        flag: such as "--in-flight", or several; "": the field's name.
        more: what `click.option` takes besides.
    """
    more |= {"help": text} | ({"is_flag": True} if kind is bool else {"type": kind})
    if default is dataclasses.MISSING:
        more["required"] = True
    elif not callable(default):
        more = {"default": default, "show_default": default is not None and default is not False} | more

    def declared(name: str) -> Callable[[Command], Command]:
        return click.option(*(flag or f"--{name.replace('_', '-')}").split(), name, **more)

    defaults = {"default_factory" if callable(default) else "default": default}
    return dataclasses.field(**defaults, metadata={"click": declared})


def argument(**more: Any) -> Any:
    """A field of a settings class that is an argument of the command, as `click.argument` takes them."""
    return dataclasses.field(metadata={"click": lambda name: click.argument(name, **more)})


def part(settings: type) -> Any:
    """A field that holds another settings class, whose options are the command's, too."""
    return dataclasses.field(metadata={"settings": settings})


def options_of(settings: type, name: str = "settings") -> Callable[[Command], Command]:
    """Add the options of a settings class to a command, which is given such a value under `name`."""

    def add(command: Command) -> Command:
        @functools.wraps(command)
        def run(**values: Any) -> None:
            value = _from_values(settings, values)
            command(**{name: value}, **values)

        added: Command = run
        for declared, field_name in reversed(list(_declared(settings))):
            added = declared(field_name)(added)
        return added

    return add


def _declared(settings: Any) -> Iterator[tuple[Callable[[str], Callable[[Command], Command]], str]]:
    for each in dataclasses.fields(settings):
        if "settings" in each.metadata:
            yield from _declared(each.metadata["settings"])
        elif "click" in each.metadata:
            yield each.metadata["click"], each.name


def _from_values(settings: Any, values: dict[str, Any]) -> Any:
    """A settings value out of `values`, which are taken out of there."""
    taken = {
        each.name: _from_values(each.metadata["settings"], values)
        if "settings" in each.metadata
        else values.pop(each.name)
        for each in dataclasses.fields(settings)
    }
    return settings(**taken)


# ---- values ---------------------------------------------------------------------------------------------


class Finite(click.FloatRange):
    """A range without NaN, which no comparison finds outside, and without infinity."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Do as `FloatRange`, and refuse infinity."""
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number", param, ctx)
        return number


class Parsed(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.5
    """A value that a function makes of text; what is wrong with the text, it says by a `ValueError`."""

    def __init__(self, name: str, parse: Callable[[str], Any]) -> None:
        self.name, self._parse = name, parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Text to a value; others stay."""
        if not isinstance(value, str):
            return value
        try:
            return self._parse(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


def _size(text: str) -> int:
    """Bytes >= 1, from text such as "4MiB"."""
    from dataflow.limits import parse_bytes

    nbytes = parse_bytes(text)
    if nbytes < 1:
        raise ValueError(f"must be at least 1 byte, got {text}")
    return nbytes


class OutputPath(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.5
    """A file that can be written, which is seen before anything is measured; "-" is stdout.

    Pictures have `endings`, and need matplotlib.
    """

    name = "path"

    def __init__(self, *endings: str) -> None:
        self._endings = endings

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Check the path, and return it unchanged."""
        if value == "-" and not self._endings:
            return value
        path = Path(value)
        if path.is_dir():
            self.fail(f"{value!r} is a folder; name a file in it", param, ctx)
        if not path.parent.is_dir():
            self.fail(f"the folder {str(path.parent)!r} does not exist; make it first", param, ctx)
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            self.fail(f"{value!r} may not be written", param, ctx)
        if self._endings:
            self._check_picture(value)
        return value

    def _check_picture(self, path: str) -> None:
        if not path.endswith(self._endings):
            raise click.ClickException(f"a picture must end in {' or '.join(self._endings)}, got {path!r}")
        try:
            figure_class()
        except ImportError as error:
            raise click.ClickException(str(error)) from None


def figure_class() -> Any:
    """`matplotlib.figure.Figure`; not pyplot, which would pick a window system and keep every figure.

    Raises `ImportError`, which names the extra, without matplotlib.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("pictures need matplotlib: pip install 'dataflow-loader[plot]'") from error
    return Figure


COUNT = click.IntRange(min=1)
POSITIVE = Finite(min=0, min_open=True)
SIZE = Parsed("size", _size)

json_option = click.option(
    "--json",
    "json_path",
    type=OutputPath(),
    metavar="PATH",
    help='Write all figures as JSON to this file, or to standard output for "-".',
)


@dataclass(frozen=True, kw_only=True)
class ReportFiles:
    """The files that a report is written to; None: it is not."""

    json_path: str | None = option(
        'Write the verdict and all figures as JSON to this file, or to standard output for "-".',
        OutputPath(),
        None,
        "--json",
        metavar="PATH",
    )
    csv_path: str | None = option(
        'Write a row for each measurement as CSV to this file, or to standard output for "-".',
        OutputPath(),
        None,
        "--csv",
        metavar="PATH",
    )
    picture: str | None = option(
        "Draw the figures to this file, .png or .svg, or write the whole report with them, .html (extra: "
        "plot).",
        OutputPath(".png", ".svg", ".html"),
        None,
        "--plot",
        metavar="PATH",
    )

    def __post_init__(self) -> None:
        if self.json_path == self.csv_path == "-":
            raise click.UsageError("--json - and --csv - cannot share standard output: name a file for one")


# ---- datasets -------------------------------------------------------------------------------------------


def _named(read: Callable[[str], Any]) -> Callable[..., dict[str, Any]]:
    """A callback that makes keyword arguments of `name=value`, each value `read`."""

    def named(_ctx: click.Context, _param: click.Parameter, values: Sequence[str]) -> dict[str, Any]:
        pairs = [text.partition("=") for text in values]
        for name, equals, value in pairs:
            if not (name and equals):
                raise click.BadParameter(f"must be name=value, got {name + equals + value!r}")
        return {name: read(value) for name, _, value in pairs}

    return named


def _json_or_text(value: str) -> Any:
    with suppress(json.JSONDecodeError):
        return json.loads(value)
    return value


def _columns(
    _ctx: click.Context, _param: click.Parameter, texts: tuple[str, ...]
) -> list[str] | dict[str, str] | None:
    names = [name for text in texts for name in text.split(",")]
    if not any("=" in name for name in names):
        return names or None
    pairs = (name.partition("=") for name in names)
    return {new: old or new for new, _, old in pairs}


COLUMNS: Mapping[str, Any] = {
    "flag": "--columns --column",
    "callback": _columns,
    "multiple": True,
    "metavar": "NAME",
    "show_default": "all",
}
"""Arguments of `option` for the columns that are taken: a list, or a mapping where some are renamed."""


def storage_options() -> Any:
    """The field for what a filesystem is made with: a mapping of names to values."""
    return option(
        "Keyword argument for the fsspec filesystem, such as anon=true; may be repeated.",
        default=dict,
        flag="--storage-option",
        callback=_named(_json_or_text),
        multiple=True,
        metavar="NAME=VALUE",
    )


@dataclass(frozen=True, kw_only=True)
class EngineArguments:
    """The engine that work is done on, as the user names it."""

    on: str | None = option(
        "Do the work on this engine: processes, ray, dask, spark, slurm or mpi.",
        None,
        None,
        metavar="ENGINE",
        show_default="this machine",
    )
    workers: int | None = option(
        "Number of tasks at a time, of what is started here.",
        COUNT,
        None,
        metavar="N",
        show_default="one for each CPU",
    )
    engine_options: Mapping[str, str] = option(
        "Option of the engine, such as address=tcp://host:8786; may be repeated.",
        default=dict,
        flag="--engine-option",
        callback=_named(str),
        multiple=True,
        metavar="NAME=VALUE",
    )

    @contextmanager
    def started(self, *, has_workers: bool = False) -> Iterator[Executor | None]:
        """Start the engine, and say which it is; None: none was named. `has_workers`: without one, too."""
        if self.on is None:
            if self.engine_options or (self.workers is not None and not has_workers):
                what = "--engine-option is" if has_workers else "--workers and --engine-option are"
                raise click.UsageError(f"{what} for an engine: name it with --on")
            yield None
            return
        from dataflow.executors import engine

        with engine(self.on, workers=self.workers, options=self.engine_options, say=click.echo) as executor:
            yield executor


@dataclass(frozen=True, kw_only=True)
class DatasetArguments:
    """A dataset as the user names it: SOURCE, and how to read it. Picklable."""

    source: Sequence[str] = argument(nargs=-1, required=True)
    """Sources as `ShardedDataset` takes them, one or several."""
    format: str = option(
        f"Format of the shards: {', '.join(FORMATS)}, energon, lerobot, or auto, which goes by the file "
        "endings.",
        default="auto",
        metavar="NAME",
    )
    dtype: str | None = option(
        "Type of a token in flat .bin files, such as uint16.", None, None, metavar="TYPE"
    )
    length: int | None = option(
        "Number of tokens in a sample of flat .bin files.",
        COUNT,
        None,
        metavar="N",
        show_default="none: token files need it",
    )
    allow_unfinished: bool = option("Also read tar and Arrow files that end too early.", bool, False)
    split: str | None = option("Split of a folder, or of a dataset on the Hub.", None, None, metavar="NAME")
    config: str | None = option("Config of such a dataset.", None, None, metavar="NAME")
    columns: list[str] | dict[str, str] | None = option(
        "Column to take, or NEW=OLD to rename one; may be repeated.", None, None, **COLUMNS
    )
    revision: str | None = option(
        "Version of a table, or revision of a dataset on the Hub.",
        None,
        None,
        metavar="TEXT",
        show_default="the last one",
    )
    storage_options: Mapping[str, Any] = storage_options()

    @property
    def options(self) -> dict[str, Any]:
        """Named arguments of `ShardedDataset`: those that say something."""
        names = ("format", "split", "config", "columns", "dtype", "length", "allow_unfinished", "revision")
        values = {name: getattr(self, name) for name in (*names, "storage_options")}
        return {name: value for name, value in values.items() if value and value != "auto"}

    def open_with(self, **more: Any) -> Any:
        """The `ShardedDataset` of these shards; `more`: further arguments of it."""
        from dataflow.dataset import ShardedDataset

        source = self.source[0] if len(self.source) == 1 else list(self.source)
        return ShardedDataset(source, **self.options, **more)
