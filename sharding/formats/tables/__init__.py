"""Read the Parquet files of a table under the names and types that the table has, with what it says of them.

In: what a table says of a file, and the file. Out: blocks and columns as of Parquet. Read `format` first;
`fitting` compares the columns of a table with those of a file.
"""
