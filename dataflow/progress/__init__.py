"""Progress bars on stderr, of what the library does for long.

In come counts of what is done, at any rate; out go lines, ten times a second at most, drawn by tqdm.
Read `bar`.
"""
