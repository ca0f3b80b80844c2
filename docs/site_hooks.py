"""What the site has beside the pages: the README as its first page, and the reference from the docstrings.

Links from a page to a file that is no page (a result, an example) become its name: the site lacks such files.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path, PurePosixPath
from posixpath import normpath
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parent.parent
LINK = re.compile(r"(?<!!)\[([^\]]*)\]\((?!https?:|#|mailto:)([^)#\s]+)(#[^)\s]*)?\)")
ABOUT = """# API

What `dataflow` gives by name, from its docstrings. [Names](../reference/names.md) says what may change.

"""


def public_modules() -> dict[str, str]:
    """Return the module that defines each public name, as `dataflow/__init__.py` lists them."""
    tree = ast.parse((ROOT / "dataflow" / "__init__.py").read_text("utf-8"))
    for node in tree.body:
        target = node.target if isinstance(node, ast.AnnAssign) else getattr(node, "targets", [None])[0]
        if isinstance(target, ast.Name) and target.id == "_MODULES" and node.value is not None:
            found: dict[str, str] = ast.literal_eval(node.value)
            return found
    raise ValueError("dataflow/__init__.py has no table _MODULES")


def on_files(files: Any, config: Any) -> Any:
    """Add the first page, the changes, and a page of the reference for each public name."""
    readme = (ROOT / "README.md").read_text("utf-8")
    files.append(File.generated(config, "index.md", content=readme.replace("](docs/", "](")))
    changes = (ROOT / "CHANGELOG.md").read_text("utf-8")
    files.append(File.generated(config, "CHANGELOG.md", content=changes.replace("](docs/", "](")))
    modules = public_modules()
    rows = "".join(f"- [`{name}`]({name}.md)\n" for name in sorted(modules))
    files.append(File.generated(config, "api/index.md", content=ABOUT + rows))
    for name, module in modules.items():
        files.append(File.generated(config, f"api/{name}.md", content=f"# {name}\n\n::: {module}.{name}\n"))
    return files


def on_nav(nav: Any, config: Any, files: Any) -> Any:
    """Put guides before what is looked up, and that before what is read once."""
    order = {"Guide": 1, "Reference": 2, "Api": 3, "Notes": 4}
    nav.items.sort(key=lambda item: order.get(item.title, 5 if item.title else 0))
    return nav


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Leave of a link that leads out of the site its text."""
    folder = PurePosixPath(page.file.src_uri).parent

    def kept(link: re.Match[str]) -> str:
        target = normpath(str(folder / link[2]))
        if target == "../README.md":
            return f"[{link[1]}]({'../' * len(folder.parts)}index.md)"
        if target == "../CHANGELOG.md":
            return f"[{link[1]}]({'../' * len(folder.parts)}CHANGELOG.md)"
        return link[0] if files.get_file_from_path(target) else link[1]

    return LINK.sub(kept, markdown)
