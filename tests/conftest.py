"""What several test modules share."""

import functools

import pytest
from datasets_kit import MAKERS, Make

pytest_plugins = ["dataflow.pytest_plugin", "pytester"]


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """One dataset a format, made when first asked for. Tests only read it."""
    return functools.cache(lambda name: MAKERS[name](tmp_path_factory.mktemp(name.replace(".", "-"))))
