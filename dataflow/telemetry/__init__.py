"""Telemetry: who watches the loops over loaders, and what is made of what they see.

In: begin, batches and end of each loop, from both engines of `DataLoader`. Out: a progress bar, a page of
figures, records of steps, reports, metrics. Read `watchers` (who watches a loader) first, then `status` (the
page), `timing` (where the time of steps goes) and `serving` (metrics over HTTP).
"""
