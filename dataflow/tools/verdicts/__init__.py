"""The meaning of a report: one sentence that says it, one that says what to do, and yes or no to --need.

In: the figures of a report, as its JSON has them. Out: a `Verdict`. All are pure functions.
Read `verdict` first; `need` is what a user may ask for.
"""
