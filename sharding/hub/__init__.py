"""Datasets on the Hugging Face Hub: which files a split has, how large they are, and at which commit.

In: `hf://datasets/org/name`, a config, a split. Out: URLs of files at one commit, and a filesystem that
knows them from one listing. Reads of their bytes are `prefetch.http.hub`'s. Read `snapshot` first, then
`layout` (no I/O: also for folders that have the Hub's layout). The core has `names` alone.
"""
