"""A framework's version outside the tried range is a warning that names both versions."""

import warnings

import pytest

from dataflow.integrations import versions
from dataflow.integrations.versions import warn_if_untried


def installed(monkeypatch, version):
    monkeypatch.setattr(versions, "version", lambda package: version)


@pytest.mark.parametrize("version", ["2.5.0", "2.5.3", "2.6.9", "2.6.0rc1+cpu", "2.6"])
def test_a_version_in_the_range_is_no_warning(monkeypatch, version):
    installed(monkeypatch, version)
    with warnings.catch_warnings(action="error"):
        warn_if_untried("lightning", ("2.5", "2.6"))


@pytest.mark.parametrize("version", ["2.4.9", "2.7.0", "3.0", "unknown"])
def test_a_version_outside_the_range_is_named_with_the_range(monkeypatch, version):
    installed(monkeypatch, version)
    with pytest.warns(UserWarning, match=f"lightning {version} is installed.*lightning 2.5 to 2.6"):
        warn_if_untried("lightning", ("2.5", "2.6"))


def test_a_package_that_is_not_installed_is_no_warning():
    with warnings.catch_warnings(action="error"):
        warn_if_untried("no-such-package-anywhere", ("1", "2"))
