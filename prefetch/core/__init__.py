"""The core: copies of a chunk's values as a table, and who runs it.

In: for each column where every row's value lies and where it goes. Out: the bytes, and a status a row.
Read `plan` first, then `executor`; `core.h` is the contract of the compiled one (`compiled`), and `by_numpy`
gives the same bytes where nothing could be compiled.
"""
