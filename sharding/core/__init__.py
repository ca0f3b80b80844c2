"""The compiled library of the project: C sources, what compiles them, and the one place that loads them.

In: numbers and addresses. Out: what `core.h`, the contract, says. Packages above say what for.
Read `core.h` first, then `library`.
"""
