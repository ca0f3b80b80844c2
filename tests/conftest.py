"""What several test modules share."""

import functools

import pytest
from datasets_kit import MAKERS, Make
from hypothesis import HealthCheck, settings

pytest_plugins = ["dataflow.pytest_plugin", "pytester"]


# How fast examples are made depends on what else the machine does.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """One dataset a format, made when first asked for. Tests only read it."""
    return functools.cache(lambda name: MAKERS[name](tmp_path_factory.mktemp(name.replace(".", "-"))))
