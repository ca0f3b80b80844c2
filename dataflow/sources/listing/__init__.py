"""List patterns and folders: the files that they mean.

In: what a user names. Out: the URLs of its shards, or all files of a folder with sizes and versions.
Read `claims` first, then `expand` and `shards`; `folders` lists files that are samples.
"""
