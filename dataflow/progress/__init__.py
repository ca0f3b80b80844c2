"""Progress bars on stderr: of a loader's epoch, and of what the library does for long.

In come counts of what is done, at any rate; out go lines, ten times a second at most, drawn by tqdm where it
is installed and by rich elsewhere. Read `bar` first, then `epoch`.
"""
