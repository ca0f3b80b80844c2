"""Which columns a dataset delivers, and how each is decoded.

In: a catalog's schema, what the user asked for. Out: `Output` values: dtype, shape, decoder of each column.
Read `outputs` first; `image`, `jpeg` and `crop` make pixels.
"""
