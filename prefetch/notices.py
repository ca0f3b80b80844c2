"""When somebody who waits says what for."""

FIRST_NOTICE_S = 3.0
"""After so many seconds who waits says for what."""


def next_notice_s(waited_s: float, first_s: float = FIRST_NOTICE_S) -> float:
    """When who waits says for what: first after some seconds, then whenever the wait has doubled."""
    due_s = first_s
    while due_s <= waited_s:
        due_s *= 2
    return due_s
