"""Imported by a fork server of the standard library that workers come from; see `signals.shield_server`."""

from prefetch.workers.signals import shield_server

shield_server()
