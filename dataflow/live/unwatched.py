"""The loader that is on no page: what loops call where nobody watches them, in place of a `LiveLoader`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dataflow.live.record import LoaderRecord, Role

OFF = "DATAFLOW_LIVE"
"""The environment variable that turns pages off: 0."""
SERVE = "DATAFLOW_METRICS"
"""The environment variable that has local rank 0 serve metrics: an address."""


class Unwatched:
    """A loader that is on no page."""

    name = ""
    """Its name on the page."""

    def begins(self, epoch: int) -> None:
        """Note that the loop of an epoch begins."""

    def batch(self) -> None:
        """Note that a batch is handed out."""

    def ends(self, error: BaseException | None = None) -> None:
        """Note that a loop has ended, or failed."""

    def closes(self) -> None:
        """Note that the loader is closed."""

    def record(self, at: float, clock: float) -> LoaderRecord | None:
        """Return what a page says of it; None: nothing is known."""
        return None


UNWATCHED = Unwatched()


def checked_label(name: str | None, role: Role | None) -> tuple[str | None, Role | None]:
    """Return the name and the role that a loader is given. `ValueError` if they are none."""
    if role not in (None, "train", "validation"):
        raise ValueError(f'role must be "train" or "validation", got {role!r}')
    if name is not None:
        from dataflow.live.names import checked_name

        name = checked_name(name)
    return name, role
