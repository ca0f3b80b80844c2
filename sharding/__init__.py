"""Values about shards, samples and their order: no torch, no threads, no clocks.

In: URLs, bytes of shards, settings. Out: catalogs, orders, plans, mixtures: pure functions and frozen values.
One of the engine's packages: its names may change in any version (docs/reference/names.md).
`errors`, `blocks` (what a format gives), `urls`, `redaction` and `compression` serve all packages.
Read `blocks` first, then in this order: `formats`, `catalog`, `order`, `plan`, `mixture`, `lengths`.
"""
