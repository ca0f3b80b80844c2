"""The pytest marker `ranks(n)`: the test body runs once in each of n gloo processes.

Fixtures and other plugins stay in pytest's process; the values of the fixtures that the test asks for are
pickled and given to each rank. What a rank raises (a failing assertion, a skip) becomes the test's outcome.
torch is imported when the first marked test runs, not when pytest starts.
"""

from __future__ import annotations

import copyreg
import functools
import pickle
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing import get_all_start_methods
from typing import Any

import pytest

_MARKER = (
    "ranks(n, *, timeout_s=60, num_nodes=1, hosts=None, racks=None, backend='gloo', env=None, "
    "output='by rank', start_method='forkserver'): run the test body once in each of n processes "
    "(arguments of dataflow.testing.run_ranks)"
)


def pytest_configure(config: pytest.Config) -> None:
    """Make the marker known."""
    config.addinivalue_line("markers", _MARKER)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a marked test in its ranks."""
    __tracebackhide__ = True
    marker = pyfuncitem.get_closest_marker("ranks")
    if marker is None:
        return None
    if len(marker.args) != 1:
        pytest.fail("the marker takes the number of ranks: @pytest.mark.ranks(4)", pytrace=False)
    _run_test_in_ranks(pyfuncitem.obj, marker.args[0], _fixtures(pyfuncitem), marker.kwargs)
    return True


def _run_test_in_ranks(
    test: Any, world_size: int, fixtures: Mapping[str, Any], settings: Mapping[str, Any]
) -> None:
    from dataflow.testing import run_ranks

    fastest = "forkserver" if "forkserver" in get_all_start_methods() else "spawn"
    prepare = functools.partial(prepare_rank, test.__module__)
    defaults = {"start_method": fastest, "output": "by rank"}
    run_ranks(test, world_size, kwargs=fixtures, prepare=prepare, **{**defaults, **settings})


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


def prepare_rank(module: str) -> None:
    """Make a rank's process fit for a test of this module, which is imported afterwards."""
    # pytest's outcomes say that they live in `builtins`, so pickle does not find them by itself.
    copyreg.pickle(pytest.skip.Exception, functools.partial(_reduce_outcome, "skip"))
    copyreg.pickle(pytest.fail.Exception, functools.partial(_reduce_outcome, "fail"))
    # There is no public way to rewrite assertions; without it they work, but explain no values.
    with suppress(Exception):
        from _pytest.assertion import install_importhook
        from _pytest.config import get_config

        install_importhook(get_config()).mark_rewrite(module)


def _reduce_outcome(kind: str, outcome: BaseException) -> tuple[Any, tuple[str, str]]:
    return _outcome, (kind, str(outcome))


def _outcome(kind: str, message: str) -> BaseException:
    made: BaseException = getattr(pytest, kind).Exception(message)
    return made
