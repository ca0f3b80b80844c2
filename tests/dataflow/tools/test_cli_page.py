"""docs/reference/cli.md is what the commands say of themselves; `python` with this file writes it anew."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import click

from dataflow.tools.cli import main

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "cli.md"
HEAD = """# The command line

Every command and option with its default; `dataflow COMMAND --help` tells what each is for. SOURCE is a file, a directory, a URL, a glob or a brace pattern (quote those two), several of them, or a catalog; `bench loader`, `bench compare`, `explain`, `find` and `verify` also take `package.module:function`. SIZE is bytes, such as `256MiB` or `2GB`.

<!-- Written by tests/dataflow/tools/test_cli_page.py. -->
"""  # noqa: E501 - a line a paragraph
KINDS = {"INTEGER RANGE": "N", "INTEGER": "N", "FLOAT RANGE": "X"}


def commands_of(group: click.Group, name: str) -> Iterator[tuple[str, click.Command]]:
    """Name and command of all that can be run."""
    for word, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from commands_of(command, f"{name} {word}")
        else:
            yield f"{name} {word}", command


def option_of(param: click.Parameter, ctx: click.Context) -> tuple[str, str]:
    """Return an option as it is written, and its default."""
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
    return re.sub(r"\[(.*)\]$", r"\1", name).replace("|", "\\|"), default


def section_of(name: str, command: click.Command) -> str:
    """What a command is for, the usual call, its options: those without a default in one row."""
    ctx = click.Context(command, info_name=name)
    summary, _, *_, examples = inspect.cleandoc(command.help or "").split("\n\n")
    call = re.split(r"\s{3,}", examples.partition("Examples:\n")[2].splitlines()[0].strip())[0]
    options = [option_of(param, ctx) for param in command.params if isinstance(param, click.Option)]
    rows = [f"| `{option}` | {default} |" for option, default in options if default]
    rows.append(f"| {', '.join(f'`{option}`' for option, default in options if not default)} | |")
    prose = " ".join(summary.splitlines())
    table = "\n".join(["| option | default |", "|---|---|", *rows])
    return f"\n## `{name}`\n\n{prose}\n\n```bash\n{call}\n```\n\n{table}\n"


def page() -> str:
    """The whole page."""
    return HEAD + "".join(section_of(name, command) for name, command in commands_of(main, "dataflow"))


def test_the_page_is_what_the_commands_say() -> None:
    assert PAGE.read_text() == page(), f"python {Path(__file__).name} writes it anew"


def test_every_option_of_every_command_is_on_the_page() -> None:
    text = PAGE.read_text()
    for name, command in commands_of(main, "dataflow"):
        section = text.partition(f"## `{name}`\n")[2].partition("\n## ")[0]
        flags = [flag for param in command.params if isinstance(param, click.Option) for flag in param.opts]
        assert flags
        assert [flag for flag in flags if f"`{flag}" not in section] == []


if __name__ == "__main__":
    PAGE.write_text(page())
