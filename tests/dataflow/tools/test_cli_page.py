"""docs/reference/cli.md is what the commands say of themselves; `python` with this file writes it anew."""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

import click

from dataflow.tools.cli import main

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "cli.md"
HEAD = """# The command line

Every command and option; `dataflow COMMAND --help` tells more. SOURCE is a file, a directory, a URL, a glob or a brace pattern (quote those two), several of them, or a catalog; `bench loader` and `bench compare` also take `package.module:function`, which makes the dataset. SIZE is bytes, such as `256MiB` or `2GB`. Errors that you can cure are one line and exit code 1.

<!-- Written by tests/dataflow/tools/test_cli_page.py. -->

## Options of several commands

A command names those of them that it takes.
"""  # noqa: E501 - a line a paragraph
SHARED_BY = 3
"""An option that so many commands have, in the same words, stands in the table of all commands."""
KINDS = {"INTEGER RANGE": "N", "INTEGER": "N", "FLOAT RANGE": "X"}


def commands_of(group: click.Group, name: str) -> Iterator[tuple[str, click.Command]]:
    """Name and command of all that can be run."""
    for word, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from commands_of(command, f"{name} {word}")
        else:
            yield f"{name} {word}", command


def row_of(param: click.Parameter, ctx: click.Context) -> str:
    """A line of the table: option, meaning, default."""
    record = param.get_help_record(ctx)
    assert record is not None
    name, text = record
    for kind, letter in KINDS.items():
        name = re.sub(f" {kind}$", f" {letter}", name)
    default = ""
    while notes := re.search(r"\s*\[([^][]*)\]$", text):
        text = text[: notes.start()]
        for note in notes[1].split("; "):
            if note == "required":
                default = note
            elif note.startswith("default: "):
                default = note.removeprefix("default: ").strip("()")
    name = re.sub(r"\[(.*)\]$", r"\1", name).replace("|", "\\|")
    return f"| `{name}` | {text} | {default} |"


def rows_of(name: str, command: click.Command) -> dict[str, str]:
    """Flag and line of each option of a command."""
    ctx = click.Context(command, info_name=name)
    return {param.opts[0]: row_of(param, ctx) for param in command.params if isinstance(param, click.Option)}


def table_of(rows: Iterable[str]) -> str:
    """Return the table of options that has these lines."""
    return "\n".join(["| option | meaning | default |", "|---|---|---|", *rows])


def shared_rows() -> list[str]:
    """Lines that several commands have, in the order of the commands."""
    counts = Counter(
        row for name, command in commands_of(main, "dataflow") for row in rows_of(name, command).values()
    )
    return [row for row, count in counts.items() if count >= SHARED_BY]


def section_of(name: str, command: click.Command, shared: Collection[str]) -> str:
    """What a command is for, the usual call, its options."""
    ctx = click.Context(command, info_name=name)
    summary, _, *_, examples = inspect.cleandoc(command.help or "").split("\n\n")
    call = re.split(r"\s{3,}", examples.partition("Examples:\n")[2].splitlines()[0].strip())[0]
    pieces = " ".join([name, *command.collect_usage_pieces(ctx)])
    rows = rows_of(name, command)
    prose = " ".join(summary.splitlines())
    table = table_of(row for row in rows.values() if row not in shared)
    also = ", ".join(f"`{flag}`" for flag, row in rows.items() if row in shared)
    return (
        f"\n## `{name}`\n\n{prose}\n\n```bash\n{call}\n```\n\nUsage: `{pieces}`\n\n{table}\n\nAlso: {also}.\n"
    )


def page() -> str:
    """The whole page."""
    shared = shared_rows()
    sections = (section_of(name, command, shared) for name, command in commands_of(main, "dataflow"))
    return f"{HEAD}\n{table_of(shared)}\n" + "".join(sections)


def test_the_page_is_what_the_commands_say() -> None:
    assert PAGE.read_text() == page(), f"python {Path(__file__).name} writes it anew"


def test_every_option_of_every_command_is_on_the_page() -> None:
    text = PAGE.read_text()
    for name, command in commands_of(main, "dataflow"):
        section = text.partition(f"## `{name}`\n")[2].partition("\n## ")[0]
        flags = [flag for param in command.params if isinstance(param, click.Option) for flag in param.opts]
        assert len(flags) > 2
        assert [flag for flag in flags if f"`{flag}" not in section] == []


if __name__ == "__main__":
    PAGE.write_text(page())
