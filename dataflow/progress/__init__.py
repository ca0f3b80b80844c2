"""Progress is told here: to observers of loops, and by bars on stderr of what the library does for long.

In come batches that are handed over, and counts of what is done, at any rate. Out goes what whoever watches
makes of it; of a bar, lines, ten times a second at most, drawn by tqdm. Read `observer` and `bar`.
"""
