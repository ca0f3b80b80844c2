"""Docstrings of what is public name every argument, and nothing that is none.

Where a user makes a value, its class has an entry under "Args:" for each argument of the constructor, so that
`help()` shows it. Values that calls return have a text below each field, errors an entry under "Attributes:".
Methods of public classes may leave "Args:" out, but what stands there is theirs.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Callable
from dataclasses import is_dataclass
from importlib import import_module
from typing import Any

import pytest

import dataflow
import dataflow.testing

PUBLIC = dict.fromkeys(dataflow._MODULES, "dataflow")
PUBLIC |= dict.fromkeys(dataflow.testing.__all__, "dataflow.testing")
RETURNED = {"Converted", "LoaderHealth", "LoaderStats", "PackedRows", "Ragged", "StepInfo", "WorkerStats"}
"""Values that users are given: nobody calls their constructors."""
NO_CODE = {"StartMethod"}
"""Names of types, which have no docstring."""


def public(name: str) -> Any:
    return getattr(import_module(PUBLIC[name]), name)


ERRORS = {name for name in PUBLIC.keys() - NO_CODE if name.endswith("Error")}
CALLED = sorted(PUBLIC.keys() - RETURNED - ERRORS - NO_CODE)


def section(doc: str, heading: str) -> str:
    """The lines below a heading, without their indent."""
    match = re.search(rf"^{heading}:\n((?:    .*\n|\n)*)", f"{inspect.cleandoc(doc)}\n", re.MULTILINE)
    return textwrap.dedent(match[1]) if match else ""


def entries(doc: str, heading: str) -> list[str]:
    """The names under a heading, one a text."""
    return re.findall(r"^\*{0,2}(\w+): \S", section(doc, heading), re.MULTILINE)


def arguments(called: Callable[..., Any]) -> list[str]:
    """Those that a docstring tells of: `**settings` too, where the rest is not nameless."""
    rest = {("VAR_KEYWORD", name) for name in ("_", "kwargs")}
    told = [one for one in inspect.signature(called).parameters.values() if one.kind.name != "VAR_POSITIONAL"]
    names = [one.name for one in told if (one.kind.name, one.name) not in rest]
    return [name for name in names if name not in ("self", "cls")]


@pytest.mark.parametrize("name", CALLED)
def test_args_are_those_of_the_signature(name: str) -> None:
    thing = public(name)
    order = sorted if is_dataclass(thing) else list  # inherited fields come first in the signature
    assert order(entries(thing.__doc__ or "", "Args")) == order(arguments(thing))


@pytest.mark.parametrize("name", CALLED)
def test_help_of_a_class_shows_its_args(name: str) -> None:
    """They stand in the class, not in the constructor, nor below its fields."""
    thing = public(name)
    if inspect.isclass(thing):
        own = vars(thing).get("__init__")
        assert "Args:" not in (getattr(own, "__doc__", None) or "")
        assert texts_below_fields(thing) == {}


def texts_below_fields(kind: type) -> dict[str, str]:
    """Annotated names of a class body that have a text below them."""
    body = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]
    assert isinstance(body, ast.ClassDef)
    return {
        node.target.id: str(below.value.value)
        for node, below in zip(body.body, body.body[1:], strict=False)
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
    }


@pytest.mark.parametrize("name", sorted(RETURNED))
def test_every_field_of_a_value_that_is_returned_has_a_text(name: str) -> None:
    kind = public(name)
    texts = {field for one in kind.__mro__[:-1] if is_dataclass(one) for field in texts_below_fields(one)}
    fields = set(arguments(kind))
    assert fields - (texts | texts_below_fields(kind).keys()) - {"engine"} == set()


@pytest.mark.parametrize("name", sorted(ERRORS))
def test_errors_name_their_attributes(name: str) -> None:
    kind = public(name)
    named = {
        entry
        for one in kind.__mro__
        for heading in ("Attributes", "Args")
        for entry in entries(one.__doc__ or "", heading)
        if one.__module__ != "builtins"
    }
    own = "__init__" in vars(kind)
    assert set(arguments(kind.__init__ if own else lambda: None)) <= named


@pytest.mark.parametrize("name", sorted(name for name in CALLED if inspect.isfunction(public(name))))
def test_functions_say_what_they_return_and_raise(name: str) -> None:
    doc = public(name).__doc__ or ""
    assert section(doc, "Returns")
    assert entries(doc, "Raises")


@pytest.mark.parametrize("name", [name for name in PUBLIC if name not in NO_CODE])
def test_args_of_methods_are_those_of_their_signatures(name: str) -> None:
    kind = public(name)
    if not inspect.isclass(kind):
        return
    for key, value in inspect.getmembers(kind, callable):
        module = getattr(value, "__module__", "") or ""
        if key.startswith("_") or not module.startswith(("dataflow", "prefetch", "sharding")):
            continue
        if "\nArgs:\n" in inspect.cleandoc(value.__doc__ or ""):
            assert entries(value.__doc__, "Args") == arguments(value), f"{name}.{key}"


@pytest.mark.parametrize("name", CALLED)
def test_an_entry_has_one_name(name: str) -> None:
    """Documentation tools take "a, b: text" for no entry at all."""
    lines = section(public(name).__doc__ or "", "Args").splitlines()
    assert [line for line in lines if line[:1].strip() and not re.match(r"\*{0,2}\w+: \S", line)] == []


def test_entries_are_found() -> None:
    doc = """One.

    Args:
        a: text: more
            b: of the same entry
        *rest: text

    Raises:
        ValueError: text
    """
    assert entries(doc, "Args") == ["a", "rest"]
    assert entries(doc, "Raises") == ["ValueError"]
    assert entries(doc, "Returns") == []
