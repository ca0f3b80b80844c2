"""Our own HTTP and S3: ranges read past fsspec's clients, straight into memory that is given.

In: a filesystem, a path, a range, memory. Out: bytes as they come, held against what the catalog knows.
Read `clients` first (by which way a range is read), then `direct` and `connections`; `hub` reads the Hub.
"""
