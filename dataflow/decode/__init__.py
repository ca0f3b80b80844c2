"""Decoding: the bytes of values become numbers, objects, pixels.

In: stored bytes. Out: arrays and Python objects. Pure functions, called from any thread. Read `values` first;
`image`, `jpeg` and `crop` make pixels.
"""
