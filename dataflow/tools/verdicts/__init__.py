"""The meaning of a report: one sentence that says it, one that says what to do, and yes or no to --need.

In: the figures of a report, as its JSON has them, and nothing else: a file that was saved gives the same
verdict again. Out: a `ReportSummary`. Read `storage`, `loading` or `plans`; `need` is what a user may ask
for.
"""
