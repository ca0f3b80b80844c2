"""What several test modules share."""

import compileall
import functools
import gc
import os
import signal
import sys
import tempfile
from collections import Counter
from pathlib import Path

import loader_kit
import pytest
from datasets_kit import MAKERS, Made, Make, make_ints_tar
from forked_kit import fork_servers
from hypothesis import HealthCheck, settings
from threads_kit import our_threads

# Where Python is told to keep no bytecode, pytest rewrites the assertions of 190 modules in every process of
# every run anew, which takes 10 s. What tests write and import themselves is still not kept.
_KEEPS_NO_BYTECODE, sys.dont_write_bytecode = sys.dont_write_bytecode, False
_MANY_OBJECTS = 150_000
"""Objects of this process, about which the collector takes 0.1 s."""
pytest_plugins = ["dataflow.pytest_plugin", "pytester"]


# A shell starts what runs in the background with Ctrl-C ignored, and so would the programs of tests be.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# How fast examples are made depends on what else the machine does. Other examples are tried by each run.
settings.register_profile(
    "full", deadline=None, max_examples=300, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("some", settings.get_profile("full"), max_examples=30)
settings.load_profile("some")


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--builders`: who builds batches over shards where a test does not say; `--full`: all tests."""
    parser.addoption(
        "--full", action="store_true", help="tests, too, that have a representative among others"
    )
    parser.addoption("--builders", default="", choices=["", "main", "thread", "process", "ray"])


def pytest_configure(config: pytest.Config) -> None:
    """Processes that tests start need not compile the packages again, also where Python keeps none.

    What is kept of data without a place is this run's own: in others the same port served something else.
    """
    kept = tempfile.TemporaryDirectory(prefix="dataflow-tests-")
    config.add_cleanup(kept.cleanup)
    os.environ["XDG_CACHE_HOME"] = kept.name
    if not hasattr(config, "workerinput"):
        for package in ("sharding", "prefetch", "dataflow"):
            compileall.compile_dir(Path(__file__).parent.parent / package, quiet=2)
        if config.getoption("--builders") == "ray":
            from ray_kit import start_cluster

            start_cluster()
    if config.getoption("--full") and config.getoption("--builders") not in ("process", "ray"):
        settings.load_profile("full")  # there, each example starts processes
    loader_kit.build_in(config.getoption("--builders"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests that are about this process's own objects say nothing about builders in others."""
    _mark_variants(items)
    if not config.getoption("--full"):
        left_out = [item for item in items if item.get_closest_marker("full")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]
    if config.getoption("--builders") in ("process", "ray"):
        skip = pytest.mark.skip(reason="looks at, or changes, objects of this process")
        for item in items:
            if item.get_closest_marker("here"):
                item.add_marker(skip)


def _mark_variants(items: list[pytest.Item]) -> None:
    """Mark all but one in so many variants of some tests as `full`, as pytest lists them."""
    seen = Counter[str]()
    for item in items:
        marker = item.get_closest_marker("one_in")
        if marker is not None and not item.get_closest_marker("full"):
            name = f"{item.path}::{getattr(item, 'originalname', item.name)}"
            if seen[name] % marker.args[0]:
                item.add_marker("full")
            seen[name] += 1


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Where actors build, they read, too, but for what is about how this process reads; and who builds.

    Threads that are there are of a loader that an earlier test left in a cycle, as examples of docstrings do.
    """
    if our_threads():
        gc.collect()
    loader_kit.reads_here = item.get_closest_marker("reads_here") is not None
    loader_kit.chooses_itself = item.get_closest_marker("here") is not None


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """What libraries keep for good is not looked through again: botocore alone has 700,000 objects.

    After fixtures have ended: a loader that one of them held would never be collected, nor its threads end.
    """
    if nextitem is not None and nextitem.path != item.path and len(gc.get_objects()) > _MANY_OBJECTS:
        gc.collect()
        gc.freeze()


def pytest_collection_finish(session: pytest.Session) -> None:
    """All test modules have been imported; in a process that runs tests."""
    sys.dont_write_bytecode = _KEEPS_NO_BYTECODE
    gc.collect()
    gc.freeze()  # tests that collect garbage need not look through torch and all modules, 0.3 s a time
    if session.items and session.config.getoption("--builders") != "ray":  # whose threads are here by now
        capture = session.config.pluginmanager.getplugin("capturemanager")
        capture.resume_global_capture()  # what workers and ranks print is the test's
        fork_servers()
        capture.suspend_global_capture()
    if session.config.getoption("--builders") == "ray" and session.items:
        from ray_kit import reuse_actors

        reuse_actors()


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """One dataset a format, made when first asked for. Tests only read it."""
    makers = {**MAKERS, "ints": make_ints_tar}
    return functools.cache(lambda name: makers[name](tmp_path_factory.mktemp(name.replace(".", "-"))))


@pytest.fixture(scope="session")
def ints(made: Make) -> Made:
    """One integer a sample. Tests only read it."""
    return made("ints")


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catalogs that are kept without a place are the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
