"""What the commands share: options, values of a command line, pictures, progress of indexing.

In: text that a user typed. Out: values, or errors in a sentence.
Read `options` first, then `given`.
"""
