"""`dataflow convert`: writes a dataset as shards of another format, order or size.

In: a source, a target, functions by name. Out: shards, their catalog, and figures.
Read `command` first; the work is that of `dataflow.conversion`.
"""
