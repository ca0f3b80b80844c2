"""Tars, plain or compressed, as WebDataset writes them: one sample is the members of one key.

In: bytes of a shard or of one block. Out: blocks, and the members of their samples as spans. Read `format`
first; `header` and `members` read tar itself, `header_chains` many headers at once, `samples` groups by key.
"""
