"""Pictures by matplotlib, from the extra `plot`, imported only when a picture is asked for."""

from __future__ import annotations

from typing import Any


def check_picture(path: str, endings: tuple[str, ...]) -> None:
    """Say early what would fail late: `ValueError` for another ending, `ImportError` without matplotlib."""
    if not path.endswith(endings):
        raise ValueError(f"a picture must end in {' or '.join(endings)}, got {path!r}")
    figure_class()


def figure_class() -> Any:
    """`matplotlib.figure.Figure`; not pyplot, which would pick a window system and keep every figure.

    Raises `ImportError`, which names the extra, without matplotlib.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("pictures need matplotlib: pip install 'dataflow-loader[plot]'") from error
    return Figure
