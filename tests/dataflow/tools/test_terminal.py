"""What the commands share: options declared as fields, and the writer of reports."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner
from rich.console import Console

from dataflow.tools.terminal.options import (
    COUNT,
    SIZE,
    DatasetArguments,
    ReportFiles,
    option,
    options_of,
    part,
)
from dataflow.tools.terminal.report import (
    Drawing,
    Page,
    ReportSummary,
    Sentence,
    Table,
    fail_unless_yes,
    html_of,
    publish,
    save,
    show,
)


@dataclass(frozen=True, kw_only=True)
class Inner:
    size: int | None = option("Bytes.", SIZE, None)


@dataclass(frozen=True, kw_only=True)
class Outer:
    count: int = option("How many.", COUNT)
    names: tuple[str, ...] = option("Names.", None, (), "--name", multiple=True)
    quick: bool = option("In a hurry.", bool, False)
    inner: Inner = part(Inner)


def settings_of(*arguments: str) -> tuple[int, list[Outer], str]:
    """Exit code, what the command was given, and what was printed."""
    given: list[Outer] = []

    @click.command()
    @options_of(Outer)
    @click.option("--own")
    def command(settings: Outer, own: str | None) -> None:
        given.append(settings)

    result = CliRunner().invoke(command, arguments)
    return result.exit_code, given, result.output


def test_a_settings_value_is_made_of_the_options() -> None:
    code, given, _ = settings_of(
        "--count", "3", "--name", "a", "--name", "b", "--quick", "--size", "4KiB", "--own", "x"
    )
    assert code == 0
    assert given == [Outer(count=3, names=("a", "b"), quick=True, inner=Inner(size=4096))]


def test_defaults_are_those_of_the_fields() -> None:
    assert settings_of("--count", "1")[1] == [Outer(count=1, inner=Inner())]
    assert "count" in settings_of()[2]  # is required
    assert settings_of("--count", "0")[0] == 2


def test_a_dataset_is_opened_with_what_was_said_and_nothing_else() -> None:
    assert DatasetArguments(source=["x.tar"]).options == {}
    tokens = DatasetArguments(source=["x.bin"], dtype="uint16", length=8, storage_options={"anon": True})
    assert tokens.options == {"dtype": "uint16", "length": 8, "storage_options": {"anon": True}}


PAGE = Page(
    "a <page>",
    {"rate": 1.5},
    (
        "it is [bold] & so",
        Sentence("dim", "dim"),
        Table(("name", "MB"), [("a [b]", "1"), ("c", "2")]),
        Table((), [("fact", "<told>")]),
    ),
)


def test_text_is_printed_as_it_is() -> None:
    console = Console(record=True, width=60)
    show(PAGE.parts, console)
    lines = [line.rstrip() for line in console.export_text().splitlines()]
    assert lines == ["it is [bold] & so", "dim", "name   MB", "a [b]   1", "c       2", "fact  <told>"]


def test_a_page_is_escaped_and_has_all_parts() -> None:
    text = html_of(PAGE)
    assert "<h1>a &lt;page&gt;</h1>" in text
    assert "<pre>it is [bold] &amp; so\n" in text
    assert "a [b]   1" in text
    assert "&lt;told&gt;" in text


def test_figures_are_printed_in_place_of_text_or_written_beside_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    publish(PAGE, ReportFiles(json_path="-"))
    assert json.loads(capsys.readouterr().out) == {"rate": 1.5}
    publish(PAGE, ReportFiles(json_path=str(tmp_path / "figures.json"), picture=str(tmp_path / "page.html")))
    assert "a [b]" in capsys.readouterr().out
    assert json.loads((tmp_path / "figures.json").read_text()) == {"rate": 1.5}
    assert (tmp_path / "page.html").read_text() == html_of(PAGE)


def test_drawings_are_on_pages_and_in_pictures(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    page = Page("drawn", {}, [Drawing(2, 1, lambda figure: figure.subplots().plot([1, 2]))])
    assert "<svg" in html_of(page)
    save(page, picture=str(tmp_path / "drawn.png"))
    assert (tmp_path / "drawn.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("answer", ["yes", "no", "unknown"])
def test_a_verdict_comes_first_and_is_in_the_figures(answer: Any, capsys: pytest.CaptureFixture[str]) -> None:
    verdict = ReportSummary(text="It is so.", advice="Do this.", answer=answer, margin=2.0)
    page = replace(PAGE, verdict=verdict, rows=[{"name": "a, b", "MB": 1.5}, {"name": "c", "MB": None}])
    publish(page, ReportFiles())
    assert capsys.readouterr().out.startswith("It is so.\nNext: Do this.\n\nit is [bold]")
    assert 'font-weight: bold">It is so.</span>' in html_of(page)
    publish(page, ReportFiles(json_path="-"))
    found = json.loads(capsys.readouterr().out)
    assert found == {
        "verdict": "It is so.",
        "advice": "Do this.",
        "answer": answer,
        "margin": 2.0,
        "rate": 1.5,
    }
    publish(page, ReportFiles(csv_path="-"))
    assert capsys.readouterr().out == 'name,MB\n"a, b",1.5\nc,\n'


def test_a_strict_command_fails_unless_the_answer_is_yes() -> None:
    fail_unless_yes(replace(PAGE, verdict=ReportSummary(text="", advice="", answer="yes")))
    for answer in ("no", "unknown"):
        with pytest.raises(click.exceptions.Exit) as left:
            fail_unless_yes(replace(PAGE, verdict=ReportSummary(text="", advice="", answer=answer)))
        assert left.value.exit_code == 1


def test_files_are_written_also_if_nobody_reads_the_text_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def closed(_: object) -> None:
        raise BrokenPipeError

    monkeypatch.setattr("dataflow.tools.terminal.report.show", closed)
    with pytest.raises(BrokenPipeError):
        publish(PAGE, ReportFiles(json_path=str(tmp_path / "figures.json")))
    assert json.loads((tmp_path / "figures.json").read_text()) == {"rate": 1.5}
