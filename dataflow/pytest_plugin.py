"""The pytest marker `ranks(n)`: the test body runs once in each of n gloo processes.

Fixtures and other plugins stay in pytest's process; the values of the fixtures that the test asks for are
pickled and given to each rank. What a rank raises (a failing assertion, a skip) becomes the test's outcome.
A failure is explained in its rank, where the compared values are, with pytest's own code and this pytest's
options; the explanation travels with the exception, and is the report's. torch is imported when the first
marked test runs, not when pytest starts.
"""

from __future__ import annotations

import argparse
import copyreg
import functools
import os
import pickle
import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

_MARKER = (
    "ranks(n, *, timeout_s=60, num_nodes=1, hosts=None, racks=None, backend='gloo', env=None, "
    "output='by rank', start_method='forkserver'): run the test body once in each of n processes "
    "(arguments of dataflow.testing.run_ranks)"
)
_EXPLAINED = "_dataflow_explained"
"""Attribute of a rank's exception: pytest's representation of it, pickled."""
_RUNNING: list[Generator[None, object, object]] = []
"""pytest's hook around the one test of a rank."""


def pytest_configure(config: pytest.Config) -> None:
    """Make the marker known to pytest."""
    config.addinivalue_line("markers", _MARKER)


@dataclass(frozen=True)
class PytestOptions:
    """The options by which a rank explains failures, as this pytest would. Picklable."""

    option: Mapping[str, Any]
    """The command line's: only plain values, as verbosity and style of tracebacks are."""
    ini: Mapping[str, Any]
    """The configuration file's, as pytest keeps it."""
    rewritten: frozenset[str]
    """Modules whose assertions explain themselves, the test's among them."""

    @classmethod
    def of(cls, config: pytest.Config, module: str) -> PytestOptions:
        """Return the options of this process, for a test of a module."""
        plain = str | int | float | bool | None
        option = {name: value for name, value in vars(config.option).items() if isinstance(value, plain)}
        attributes = vars(config)  # which of them it is depends on pytest's release
        ini = attributes.get("_inicfg") or attributes.get("inicfg") or {}
        registered = (getattr(hook, "_must_rewrite", ()) for hook in sys.meta_path)
        return cls(option, dict(ini), frozenset({module}.union(*registered)))


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a marked test in its ranks."""
    __tracebackhide__ = True
    marker = pyfuncitem.get_closest_marker("ranks")
    if marker is None:
        return None
    if len(marker.args) != 1:
        pytest.fail("the marker takes the number of ranks: @pytest.mark.ranks(4)", pytrace=False)
    options = PytestOptions.of(pyfuncitem.config, pyfuncitem.obj.__module__)
    _run_test_in_ranks(pyfuncitem.obj, marker.args[0], _fixtures(pyfuncitem), options, marker.kwargs)
    return True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show a failure as pytest does in the rank it came from: the frames here are not the user's."""
    report = yield
    explained = getattr(call.excinfo.value, _EXPLAINED, None) if call.excinfo else None
    if explained and report.failed and not item.config.getoption("fulltrace"):
        report.longrepr = pickle.loads(explained)
    return report


def _run_test_in_ranks(
    test: Callable[..., object],
    world_size: int,
    fixtures: Mapping[str, Any],
    options: PytestOptions,
    settings: Mapping[str, Any],
) -> None:
    from dataflow.testing import run_ranks

    prepare = functools.partial(prepare_rank, options)
    body = functools.partial(run_body, test, options)
    defaults = {"start_method": "forkserver", "output": "by rank"}
    run_ranks(body, world_size, kwargs=fixtures, prepare=prepare, **{**defaults, **settings})


def _fixtures(item: pytest.Function) -> dict[str, Any]:
    names = item._fixtureinfo.argnames  # as pytest's own pytest_pyfunc_call asks
    values = {name: item.funcargs[name] for name in names}
    for name, value in values.items():
        reason = _why_unpicklable(value)
        if reason is not None:
            pytest.fail(f"the value of fixture {name!r} cannot be sent to the ranks: {reason}", pytrace=False)
    return values


def _why_unpicklable(value: object) -> Exception | None:
    try:
        pickle.dumps(value)
    except Exception as error:
        return error
    return None


def prepare_rank(options: PytestOptions) -> None:
    """Make a rank's process fit for a test whose module is imported afterwards."""
    # pytest's outcomes say that they live in `builtins`, so pickle does not find them by itself.
    copyreg.pickle(pytest.skip.Exception, functools.partial(_reduce_outcome, "skip"))
    copyreg.pickle(pytest.fail.Exception, functools.partial(_reduce_outcome, "fail"))
    # There is no public way to rewrite assertions; without it they work, but explain no values.
    with suppress(Exception):
        from _pytest import assertion
        from _pytest.config import get_config

        config = get_config()
        config.option = argparse.Namespace(**options.option)
        vars(config)["_inicfg" if "_inicfg" in vars(config) else "inicfg"] = dict(options.ini)
        if options.option.get("assertmode") != "rewrite":
            return
        assertion.install_importhook(config).mark_rewrite(*options.rewritten - sys.modules.keys())
        # What pytest's own hook does before an item runs. What it does behind one must never happen: the
        # generator is kept, for it would be closed with its last reference.
        item: Any = SimpleNamespace(config=config, ihook=config.hook)
        _RUNNING.append(assertion.pytest_runtest_protocol(item))
        next(_RUNNING[-1])


def run_body(test: Callable[..., object], options: PytestOptions, /, **fixtures: Any) -> None:
    """Call the body of a test in a rank; what it raises brings pytest's explanation of it along."""
    __tracebackhide__ = True
    try:
        test(**fixtures)
    except (Exception, pytest.fail.Exception) as error:
        with suppress(Exception):  # an exception that takes no attributes comes without
            setattr(error, _EXPLAINED, pickle.dumps(_explained(error, options.option)))
        raise


def _explained(error: BaseException, option: Mapping[str, Any]) -> object:
    """Pytest's representation, the rank's number below the message."""
    error.add_note(f"raised by rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}")
    style = option.get("tbstyle", "auto")
    if isinstance(error, pytest.fail.Exception) and not error.pytrace:
        style = "value"
    try:
        return pytest.ExceptionInfo.from_exception(error).getrepr(
            style="long" if style == "auto" else style,
            showlocals=bool(option.get("showlocals")),
            funcargs=True,
            truncate_locals=option.get("verbose", 0) < 2,
        )
    finally:
        error.__notes__.pop()  # with its traceback, this is said again where it is raised


def _reduce_outcome(kind: str, outcome: BaseException) -> tuple[Any, tuple[str, str], dict[str, Any]]:
    return _outcome, (kind, str(outcome)), vars(outcome)


def _outcome(kind: str, message: str) -> BaseException:
    outcome: BaseException = getattr(pytest, kind).Exception(message)
    return outcome
