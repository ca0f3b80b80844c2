"""Chunks built by actors of a Ray cluster, on the cores of other machines.

In: chunks of the engine, with their windows staged. Out: their batches, copied from Ray's object store into
slots. Read `builders` first; `actor` is what runs elsewhere, `cluster` how we come to a cluster and what we
refuse there.
"""
