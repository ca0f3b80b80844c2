"""The import of matplotlib, from the extra `plot`: only where a picture is asked for."""

from __future__ import annotations

from typing import Any


def figure_class() -> Any:
    """`matplotlib.figure.Figure`; not pyplot, which would pick a window system and keep every figure.

    Raises `ImportError`, which names the extra, without matplotlib.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("pictures need matplotlib: pip install 'dataflow-loader[plot]'") from error
    return Figure
