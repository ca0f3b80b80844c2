"""Transforms that are Python, in worker processes. Read `compare` first, then `kinds`."""
