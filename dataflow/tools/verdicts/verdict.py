"""`verdict_of` makes the verdict of a report from the figures that are in it, and from nothing else.

Rules are imported where used: those of loaders come with torch, which `dataflow plan` does without.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from dataflow.tools.terminal.report import Verdict

Report = Literal["bench storage", "bench loader", "bench compare", "inspect", "plan"]


def verdict_of(report: Report, figures: Mapping[str, Any]) -> Verdict:
    """Return the verdict of a report.

    Args:
        report: the command that made it.
        figures: what its JSON has: a file that was saved gives the same verdict again.
    """
    if report == "bench storage":
        from dataflow.tools.verdicts.storage import storage_verdict as judge
    elif report == "bench loader":
        from dataflow.tools.verdicts.loading import loader_verdict as judge
    elif report == "bench compare":
        from dataflow.tools.verdicts.loading import comparison_verdict as judge
    elif report == "inspect":
        from dataflow.tools.verdicts.plans import inspection_verdict as judge
    else:
        from dataflow.tools.verdicts.plans import plan_verdict as judge
    return judge(figures)
