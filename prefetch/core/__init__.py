"""The core: copies of a chunk's values as a table, and who runs it.

In: for each column where every row's value lies and where it goes. Out: the bytes, and a status a row.
Read `copy_table` first, then `executor`, which calls the library of `sharding.core`.
"""
