"""The commands of `dataflow`, run in this process by click's runner."""

from __future__ import annotations

from click.testing import CliRunner

from dataflow.tools.cli import main


def run_command(*arguments: object) -> tuple[int, str]:
    """Exit code and everything printed, without indents and runs of spaces."""
    result = CliRunner().invoke(main, [*map(str, arguments)])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, "\n".join(" ".join(line.split()) for line in result.output.splitlines())
