"""The programs of the page on text run, one after the other, and again in their folder."""

from __future__ import annotations

import re
from pathlib import Path

from programs_kit import run_script
from text_kit import tokenizers

PAGE = Path(__file__).parents[3] / "docs" / "guide" / "text.md"


def test_the_programs_of_the_page_run_and_run_again(tmp_path: Path) -> None:
    assert tokenizers
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    variables = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    for _ in range(2):
        code, out, err = run_script(
            "\n".join(blocks), how="forked", folder=tmp_path, cwd=tmp_path, variables=variables
        )
        assert code == 0, out + err
