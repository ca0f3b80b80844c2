"""What the README and docs/ say is so: programs run, names, arguments, messages and links exist."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import tomllib
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
from programs_kit import run_script
from source_kit import MODULES, facts

import dataflow
from benchmarks.kernels import image_options
from dataflow.testing import run_ranks
from prefetch.control.pause import PauseStats
from prefetch.counts import CacheStats, ReadStats
from prefetch.engine.ledger import MemoryHeld
from prefetch.engine.stats import EngineStats, StageStats
from sharding import errors
from sharding.errors import DataflowError
from sharding.formats import FORMATS
from sharding.lengths.units import LengthStats

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text("utf-8")
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
GUIDE, REFERENCE = ROOT / "docs" / "guide", ROOT / "docs" / "reference"
PACKAGES = ("sharding", "prefetch", "dataflow")
WITH_SNIPPETS = {"batching", "media", "mixtures", "ranks"}
"""Guides that show a few lines beside their programs."""
OF_EXAMPLES = [page for page in sorted(GUIDE.glob("*.md")) if page.stem not in WITH_SNIPPETS]


def code_blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def run(command: list[str], folder: Path) -> str:
    environment = os.environ | {"XDG_CACHE_HOME": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def run_forked(program: str, folder: Path, *, warnings: str = "error") -> str:
    """As `python -W error` would, in a process that is forked with torch imported; what it prints."""
    first, _, rest = program.partition("\n")  # its lines keep their numbers
    code, out, err = run_script(
        f"import warnings; warnings.simplefilter({warnings!r}); {first}\n{rest}",
        how="forked",
        folder=folder,
        cwd=folder,
        variables={"XDG_CACHE_HOME": str(folder / "cache"), "OMP_NUM_THREADS": "1"},
    )
    assert code == 0, out + err
    return out


@pytest.mark.full
def test_the_first_program_learns_and_goes_on_behind_its_checkpoint(tmp_path: Path) -> None:
    program = code_blocks(README, "python")[0]
    lines = run_forked(program, tmp_path).splitlines()
    losses = [float(re.findall(r"loss ([\d.]+)", line)[0]) for line in lines]
    assert losses[-1] < losses[0] < 3.5
    last = int(re.findall(r"step (\d+)", lines[-1])[0])
    assert run_forked(program, tmp_path).splitlines() == [f"go on with step {last + 1}"]


@pytest.mark.parametrize("page", OF_EXAMPLES, ids=lambda page: page.name)
def test_every_program_on_a_page_is_one_of_the_examples(page: Path) -> None:
    """Which `tests/test_examples.py` runs, or the demo."""
    text = page.read_text("utf-8")
    shown = r"(?:examples/\w+|dataflow/tools/demo)\.py"
    included = re.findall(rf"^<!-- include {shown}(?:#\w+)? -->\n```python$", text, re.MULTILINE)
    assert len(included) == len(code_blocks(text, "python")) > 0


def test_the_lines_for_a_plain_ddp_loop_are_those_of_an_example() -> None:
    text = (REFERENCE / "strategies.md").read_text("utf-8")
    assert code_blocks(text, "python") != []
    assert text.count("<!-- include ") == len(code_blocks(text, "python"))


def test_the_page_on_images_has_every_option_in_its_table_and_in_a_picture_of_its_own_script() -> None:
    options = sorted(inspect.signature(dataflow.Image).parameters)
    guide, pictures = ((folder / "images.md").read_text("utf-8") for folder in (GUIDE, REFERENCE))
    table = guide.partition("| option | default |")[2].partition("\n\n")[0]
    cells = re.findall(r"^\|([^|]*)\|", table, re.MULTILINE)
    assert sorted(re.findall(r"`(\w+)`", "".join(cells))) == options
    sections = pictures.partition("\n## Options\n")[2].partition("\n## ")[0]
    assert sorted(re.findall(r"\*\*`(\w+)`\*\*", sections)) == options
    shown = re.findall(r"\(\.\./images/image-([\w-]+)\.png\)", sections)
    assert sorted(shown) == sorted(image_options.figures())
    files = {path.stem.removeprefix("image-") for path in (ROOT / "docs" / "images").glob("image-*.png")}
    assert files == set(shown)


def test_demo_and_test_commands_are_marked_for_ci() -> None:
    marks = [block.partition("\n")[0] for block in code_blocks(README, "sh")]
    assert marks.count("# demo") == marks.count("# tests") == 1


def test_ci_runs_the_commands_of_the_readme_as_they_stand(tmp_path: Path) -> None:
    shown = run(["bash", str(ROOT / ".ci" / "run"), "--dry-run"], tmp_path).splitlines()
    for mark in ("# demo", "# tests"):
        [block] = [b for b in code_blocks(README, "sh") if b.startswith(mark)]
        assert block.splitlines()[1] in shown


def test_every_public_name_is_in_the_table_and_nothing_else() -> None:
    table = (REFERENCE / "names.md").read_text("utf-8")
    assert sorted(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == sorted(dataflow.__all__)


def test_all_that_is_public_has_its_name_on_the_page() -> None:
    page = (REFERENCE / "names.md").read_text("utf-8")
    own = [
        name for name, one in vars(dataflow.DataLoader).items() if callable(one) or hasattr(one, "__get__")
    ]
    names = {*dataflow._MODULES, *(name for name in own if not name.startswith("_"))}
    assert sorted(name for name in names if f"`{name}`" not in page) == []


def test_every_format_is_in_the_table() -> None:
    table = (REFERENCE / "formats.md").read_text("utf-8").partition("| `format=` |")[2].partition("\n\n")[0]
    assert tuple(re.findall(r"^\| `([\w-]+)` \|", table, re.MULTILINE)) == FORMATS


def test_every_figure_of_stats_is_on_their_page() -> None:
    page = (REFERENCE / "stats.md").read_text("utf-8")
    parts = (EngineStats, StageStats, MemoryHeld, LengthStats, ReadStats, CacheStats, PauseStats)
    kinds = (dataflow.LoaderStats, dataflow.WorkerStats, *parts)
    names = {field.name for kind in kinds for field in fields(kind)}
    names |= {name for name, value in vars(dataflow.LoaderStats).items() if isinstance(value, property)}
    assert {name for name in names if f"`{name}`" not in page} == set()


def test_every_extra_exists() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    table = (REFERENCE / "installation.md").read_text("utf-8").partition("| extra |")[2].partition("\n\n")[0]
    named = re.findall(r"`([\w-]+)`", "".join(re.findall(r"^\|([^|]*)\|", table, re.MULTILINE)))
    assert sorted(named) == sorted(extras)


def test_every_command_exists() -> None:
    from dataflow.tools.cli import main

    text = "".join(page.read_text("utf-8") for page in PAGES)
    named = set(re.findall(r"(?:bin/|[`\s])dataflow (demo|index|bench|inspect|plan|doctor|convert)\b", text))
    assert named <= main.commands.keys()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_arguments_written_as_code_are_arguments_of_something_public(page: Path) -> None:
    takers = [getattr(dataflow, name) for name in dataflow.__all__ if name != "DataflowError"]
    takers += [
        dataflow.Audio,
        dataflow.Manifest,
        dataflow.Optional,
        dataflow.ShardedDataset.join,
        dataflow.Video,
    ]
    takers += [
        dataflow.convert,
        dataflow.Tokenize,
        dataflow.ChatTemplate,
        dataflow.PreferencePairs,
        dataflow.split_pairs,
        dataflow.VisionChat,
        dataflow.Processor,
    ]
    known = {name for taker in [*takers, run_ranks] for name in inspect.signature(taker).parameters}
    text = page.read_text("utf-8")
    if page.name.startswith("coming-from"):  # what a row begins with is a call of another loader
        text = re.sub(r"^\|[^|]*\|", "|", text, flags=re.MULTILINE)
    assert set(re.findall(r"`(\w+)=[^`]*`", text)) <= known


def links_of(page: Path) -> list[str]:
    """Files that a page links to, as written there."""
    prose = re.sub(r"`[^`]*`", "", page.read_text("utf-8"))
    return re.findall(r"\]\((?!https?:)([^)#]+)", prose)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page: Path) -> None:
    assert [target for target in links_of(page) if not (page.parent / target).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_dotted_module_names_written_as_code_can_be_imported(page: Path) -> None:
    for name in set(re.findall(rf"`((?:{'|'.join(PACKAGES)})(?:\.\w+)+)[`(]", page.read_text("utf-8"))):
        try:
            assert resolve(name) is not None
        except ImportError as error:  # of a package that an extra installs: its own tests import it
            if "pip install 'dataflow-loader[" not in str(error):
                raise


def test_pages_named_in_docstrings_and_messages_exist() -> None:
    named = {page for path in sources() for page in re.findall(r"docs/[\w/-]+\.md", path.read_text("utf-8"))}
    assert {page for page in named if not (ROOT / page).exists()} == set()


def test_every_page_can_be_reached_from_the_readme() -> None:
    reached, new = set[Path](), {ROOT / "README.md"}
    while new:
        reached |= new
        links = {page.parent / target for page in new for target in links_of(page) if target.endswith(".md")}
        new = {link.resolve() for link in links} - reached
    assert set(PAGES) - reached == set()


def resolve(name: str) -> object:
    """A module, or something in one."""
    found: object = import_module(name.partition(".")[0])
    for part in name.split(".")[1:]:
        if isinstance(found, ModuleType) and not hasattr(found, part):
            found = import_module(f"{found.__name__}.{part}")
        else:
            found = getattr(found, part)
    return found


def error_classes() -> set[str]:
    for path in sources():
        if "Error(DataflowError" in path.read_text("utf-8"):
            import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
    found = {DataflowError}
    while more := {sub for cls in found for sub in cls.__subclasses__()} - found:
        found |= more
    return {cls.__name__ for cls in found if cls.__module__.partition(".")[0] in PACKAGES}


def sources() -> list[Path]:
    return sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def test_the_page_on_errors_names_every_error_class() -> None:
    text = (REFERENCE / "errors.md").read_text("utf-8")
    assert {name for name in error_classes() if f"`{name}`" not in text} == set()
    assert "CorruptShardError" in vars(errors)


def listed_messages() -> list[str]:
    """The messages on the page on errors; "…" stands for what differs."""
    messages = (REFERENCE / "errors.md").read_text("utf-8").partition("\n## Messages and cures\n")[2]
    cells = re.findall(r"^\| (`.*?`) \| ", messages, re.MULTILINE)
    return [message for cell in cells for message in re.findall(r"`([^`]+)`", cell)]


def test_messages_on_the_page_on_errors_are_in_the_source() -> None:
    known = "\n".join(text for module in MODULES for text in facts(module).texts)
    pieces = {piece.strip() for message in listed_messages() for piece in message.split("…")}
    assert len(listed_messages()) > 20
    assert sorted(piece for piece in pieces if piece not in known) == []


def test_each_message_on_the_page_on_errors_is_expected_by_a_test() -> None:
    tests = "".join(path.read_text("utf-8") for path in (ROOT / "tests").rglob("test_*.py")).replace("\\", "")
    pieces = [[piece.strip(" ,:;.()") for piece in message.split("…")] for message in listed_messages()]
    assert [piece for piece in (max(each, key=len) for each in pieces) if piece not in tests] == []
