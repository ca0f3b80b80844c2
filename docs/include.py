"""Put the programs of `examples/` into the pages that show them: `python docs/include.py`.

A page names the file above a code block, and the block is filled from it:

    <!-- include examples/quickstart.py -->
    ```python
    ```

`examples/quickstart.py#resume` takes the lines between `# [resume]` and `# [end]`, without their indentation.
A page can so be read on a repository host as it is, and never shows a program that differs from the one that
the tests run: `tests/test_docs.py` compares them.
"""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(
    r"(<!-- include ([^ #]+)(?:#(\w+))? -->\n```(\w+)\n)(.*?)(^```$)", re.MULTILINE | re.DOTALL
)
MARK = re.compile(r"^\s*# \[\w+\]\n", re.MULTILINE)


def pages() -> list[Path]:
    """The pages that may include programs: the README, and all below `docs/`."""
    return [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]


def excerpt(name: str, part: str | None) -> str:
    """Return a file's text, or a part of it.

    Args:
        name: path from the root of the project.
        part: the name of a part that is marked in the file; None: all of it.

    Raises:
        ValueError: the file marks no such part.
    """
    text = (ROOT / name).read_text("utf-8")
    if part is not None:
        _, begun, rest = text.partition(f"# [{part}]\n")
        if not begun:
            raise ValueError(f"{name} has no line '# [{part}]'")
        text = textwrap.dedent(rest.partition("# [end]")[0].rstrip(" "))
    return MARK.sub("", text).strip("\n") + "\n"


def filled(page: str) -> str:
    """Return a page's text with its blocks filled anew."""
    return BLOCK.sub(lambda m: m[1] + excerpt(m[2], m[3]) + m[6], page)


if __name__ == "__main__":
    for path in pages():
        text = path.read_text("utf-8")
        if (now := filled(text)) != text:
            path.write_text(now, "utf-8")
            print(f"filled {path.relative_to(ROOT)}")
