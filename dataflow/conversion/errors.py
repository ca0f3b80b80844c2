"""The error of a conversion that cannot begin or go on."""

from __future__ import annotations

from sharding.errors import DataflowError


class ConversionError(DataflowError):
    """A conversion cannot begin or go on; the message says what to do."""
