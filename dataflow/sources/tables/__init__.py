"""Find the files of a Delta or Iceberg table at a version, by the owners' packages.

In: the name of a table, and which version. Out: its Parquet files, with what the table says of each.
Read `finding` first, then `delta` and `iceberg`; `files` reads logs from the table's own store.
"""
