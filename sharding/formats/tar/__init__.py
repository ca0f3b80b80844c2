"""Tars, plain or compressed, as WebDataset writes them: one sample is the members of one key.

In: bytes of a shard or of one block. Out: blocks, and the members of their samples as spans. Read `format`
first; `header` and `members` read tar itself, `run` finds what repeats, `samples` groups by key.
"""
