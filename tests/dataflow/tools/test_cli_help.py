"""The help of every command and option: sentences, with units, defaults and examples that can be run."""

from __future__ import annotations

import inspect
import re
import shlex
from collections.abc import Iterator

import click
import pytest
from test_cli_page import commands_of

from dataflow.tools.cli import main
from dataflow.tools.estimate.measure import main as measure

MEASURE = "torchrun ... -m dataflow.tools.estimate.measure"
COMMANDS = dict([*commands_of(main, "dataflow"), (MEASURE, measure)])
NUMBERS = {"integer range", "float range", "integer", "size", "number", "counts"}
"""Names of click's types and ours that are numbers."""
UNITS = re.compile(
    r"\b(numbers? of|bytes|MiB|pixels|(milli|micro)?seconds|Gbit/s|watts|price|ratio|share|seed)\b",
    re.IGNORECASE,
)
CHOSEN_BY_NOBODY = {
    "--compute-ms",
    "--nodes",
    "--parameters",
    "--microbatch-ms",
    "--output",
    "--account",
    "--state",
    "--to",
}
"""Options without a default, which a command refuses to run without."""


def options_with_help() -> Iterator[tuple[str, click.Option, str]]:
    """Each option of each command, with its line of help as a terminal shows it."""
    for name, command in COMMANDS.items():
        ctx = click.Context(command, info_name=name)
        for param in command.get_params(ctx):
            if isinstance(param, click.Option):
                record = param.get_help_record(ctx)
                assert record is not None, f"{name} hides {param.opts}"
                yield f"{name} {param.opts[0]}", param, record[1]


OPTIONS = list(options_with_help())


def test_every_option_is_explained_by_sentences() -> None:
    texts = {name: param.help or "" for name, param, _ in OPTIONS}
    wrong = {name: text for name, text in texts.items() if not re.fullmatch(r"[A-Z].*[^ .]\.", text)}
    assert wrong == {}
    assert {name: text for name, text in texts.items() if len(text.split()) < 4 or "[default" in text} == {}


def test_every_number_says_its_unit_and_its_default() -> None:
    numbers = [(name, param, line) for name, param, line in OPTIONS if param.type.name in NUMBERS]
    assert len(numbers) > 30
    assert [name for name, param, _ in numbers if not UNITS.search(param.help or "")] == []
    assert [name for name, _, line in numbers if not re.search(r"\[.*(default: |required)", line)] == []


def test_only_what_nobody_else_can_know_is_required() -> None:
    required = {param.opts[0] for _, param, _ in OPTIONS if param.required}
    assert required == CHOSEN_BY_NOBODY


def test_no_text_begins_with_a_preposition_or_a_pronoun() -> None:
    loose = r"(Of|As|To|For|Between|Its|They|What|Where|How|Whether|Which|Those|Who|So|A rank's)\b"
    texts = {name: param.help or "" for name, param, _ in OPTIONS}
    texts |= {name: command.help or "" for name, command in COMMANDS.items()}
    assert {name: text for name, text in texts.items() if re.match(loose, text)} == {}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_teaches_by_what_it_answers_and_by_examples_with_its_own_options(name: str) -> None:
    command = COMMANDS[name]
    text = inspect.cleandoc(command.help or "").replace("\\\n", " ")
    summary, detail, *_, examples = text.split("\n\n")
    assert re.fullmatch(r"[A-Z].*\.", summary)
    assert len(detail.split()) > 20
    title, *lines = examples.replace("\b\n", "").splitlines()
    assert title == "Examples:"
    known = {flag for param in command.params for flag in param.opts}
    for line in lines:
        own = line.partition(" -- ")[0].partition(" -m dataflow.tools.estimate.measure")
        words = shlex.split(own[2] or own[0], comments=False)
        assert {word for word in words if word.startswith("--")} <= known, line
        assert line.strip().startswith((name, "torchrun"))


def test_every_group_lists_its_commands_with_whole_phrases() -> None:
    groups = [main, *(each for each in main.commands.values() if isinstance(each, click.Group))]
    assert len(groups) == 2
    for group in groups:
        for command in group.commands.values():
            assert re.fullmatch(r"[A-Z].*\.", command.get_short_help_str(100))
