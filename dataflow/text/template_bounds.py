"""Jinja in bounds: a template of anybody's can take neither memory nor time without an end.

A template comes with a model's folder, and what it renders with a dataset. Jinja's sandbox keeps both from
Python's own objects, but not from `9**(9**9)`, `"x" * 10**10`, `s ~ s` forty times, or a loop in a loop. Here
each operation whose result can be larger than what goes in says so first: it spends units of one budget a
rendering (a character is one unit, an item of a list 64), and what would spend more than there is does not
run. All values are then small enough for any single operation, and loops look at the thread's CPU time, so a
rendering ends within seconds. Nothing is folded when a template is compiled, where there is no budget.
"""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from jinja2 import nodes, pass_context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MOST_SOURCE_CHARS = 128 << 10
"""Most characters of a template's source; those of models have at most some 50,000."""
_UNITS = 64 << 20
"""Most units of a rendering, and `_TIMES_INPUT` for each unit of its messages besides."""
_TIMES_INPUT = 100
_ITEM_UNITS = 64
_CPU_S = 3.0
_LOOK_EVERY = 16
"""Operations between two looks at the clock. Each takes a quarter of a second at most."""
_MOST_BITS = 4096
"""Most bits of an integer that is multiplied."""
_MOST_WIDTH = 100_000
"""Largest number that says how wide a text shall be, or how often something comes."""
_MOST_SLOW = 1 << 20
"""Units of what filters take that look at a text more than once."""
_SMALL = {bool, float, int, type(None)}
_SLOW = {"indent", "pprint", "striptags", "urlize", "wordwrap", "xmlattr"}
_GROWING = _SLOW | {
    *("batch", "center", "expandtabs", "filesizeformat", "format", "format_map", "join", "ljust", "replace"),
    *("rjust", "round", "slice", "sum", "tojson", "translate", "truncate", "zfill"),
}
"""Filters and methods of text whose result may be larger than the text, or whose arguments say how large."""
_WIDE_FORMAT = re.compile(r"[0-9]{6}|\{[^{}]*\{|%[^a-zA-Z%]*\*")
"""A width of six digits, or one that is a value itself."""


class TemplateLimitError(ValueError):
    """A rendering that would take more memory or time than a chat can need."""

    def __init__(self, what: str) -> None:
        super().__init__(what)

    def __str__(self) -> str:
        return f"the chat template {self.args[0]}: it is broken or means harm"


class RenderBudget:
    """Units and CPU time that one rendering may still spend. Used by one thread."""

    def __init__(self, messages: Any) -> None:
        self._left = _UNITS + _TIMES_INPUT * size_of(messages, _UNITS)
        self._ends_s = time.thread_time() + _CPU_S
        self._num_spent = 0

    def spend(self, units: float) -> None:
        """Take so many units. Raises `TemplateLimitError` where they are not there, or time is over."""
        if units > self._left:
            raise TemplateLimitError("makes more text or lists than a chat of this size can need")
        self._left -= int(units)
        self._num_spent += 1
        if not self._num_spent % _LOOK_EVERY and time.thread_time() > self._ends_s:
            raise TemplateLimitError(f"computes for longer than {_CPU_S:g} s")


_current: ContextVar[RenderBudget] = ContextVar("budget")


@contextmanager
def bounded(messages: Any) -> Iterator[None]:
    """One rendering, in this thread."""
    token = _current.set(RenderBudget(messages))
    try:
        yield
    finally:
        _current.reset(token)


def size_of(value: Any, most: float = float("inf")) -> int:
    """Units of a value as if it were written out: what is held twice counts twice. Stops beyond `most`."""
    units, stack = 0, [value]
    while stack and units <= most:
        item = stack.pop()
        if isinstance(item, str | bytes):
            units += len(item)
            continue
        units += _ITEM_UNITS
        if isinstance(item, Mapping):
            stack += [*item.keys(), *item.values()]
        elif isinstance(item, range):
            units += _ITEM_UNITS * len(item)
        elif isinstance(item, list | tuple | set | frozenset):
            stack += item
        elif isinstance(item, int):
            units += item.bit_length()
    return units


def _spent(value: Any) -> Any:
    """The value, whose units are taken."""
    kind = type(value)
    if kind is str:
        _current.get().spend(len(value))
    elif kind not in _SMALL:
        _current.get().spend(size_of(value, _UNITS))
    return value


@pass_context
def _written(context: Any, value: Any) -> Any:
    """A value that is put out. It takes a context, so that Jinja does not call it when it compiles."""
    return _spent(value)


def _check_width(*values: Any) -> None:
    for value in values:
        if isinstance(value, int) and abs(value) > _MOST_WIDTH:
            raise TemplateLimitError(f"asks for a width or count of {value:.3g}")


# ---- operations --------------------------------------------------------------------------------------------


def _check_operator(operator: str, left: Any, right: Any) -> None:
    """Spend what the result of an operator will take beyond its operands."""
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
        if operator in ("*", "**") and bits > _MOST_BITS:
            raise TemplateLimitError(f"computes an integer of {bits:,} bits")
    elif operator == "*" and isinstance(left, int) | isinstance(right, int):
        times, value = (left, right) if isinstance(left, int) else (right, left)
        if not isinstance(value, float):
            _current.get().spend(max(0, times) * size_of(value, _UNITS))
    elif operator == "%" and isinstance(left, str):
        _check_format(left, right)


def _check_format(text: str, *values: Any) -> None:
    if _WIDE_FORMAT.search(text):
        raise TemplateLimitError(f"formats with a width: {text!r:.60}")
    _check_width(*values)
    _current.get().spend((text.count("%") + text.count("{")) * size_of(values, _UNITS))


def _check_growth(name: str, args: tuple[Any, ...], options: Mapping[str, Any]) -> None:
    """Spend what a filter, or a text's method, will make of its arguments, the text being the first."""
    value, *more = args or (None,)
    more += options.values()
    budget = _current.get()
    _check_width(*more)
    if name == "tojson" and more:
        budget.spend(size_of(value, _UNITS) * max((_width(argument) for argument in more), default=1))
    elif name in ("format", "format_map"):
        _check_format(str(value), *more)
    elif name == "replace" and len(more) > 1:
        budget.spend((str(value).count(str(more[0])) + 1) * len(str(more[1])))
    elif name == "join" and isinstance(value, str):  # the method: its argument is what is joined
        budget.spend((1 + len(value)) * size_of(more, _UNITS))
    elif name == "join":
        budget.spend((1 + len(str(more[0] if more else ""))) * size_of(value, _UNITS))
    elif name == "expandtabs":
        budget.spend(str(value).count("\t") * int(more[0] if more else 8))
    elif name == "sum" and more and not isinstance(more[-1], int | float):
        budget.spend(size_of(value, _UNITS) ** 2 / _ITEM_UNITS)
    if name in _SLOW and size_of(value, _MOST_SLOW) + size_of(more, _MOST_SLOW) > _MOST_SLOW:
        raise TemplateLimitError(f"uses {name!r} on a text of more than {_MOST_SLOW:,} characters")
    if name in ("indent", "wordwrap"):
        budget.spend(size_of(value) * max((_width(argument) for argument in more), default=4))


def _width(value: Any) -> int:
    return value if isinstance(value, int) else len(str(value))


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox whose operations spend of the current `RenderBudget`."""

    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self, **options: Any) -> None:
        super().__init__(finalize=_written, **options)
        self.filters |= {"_iterated": _iterated, "_joined": _joined, "_built": _spent}
        del self.globals["lipsum"]
        self.bound_filters()

    def bound_filters(self) -> None:
        """Bound the filters that were added since."""
        for name, function in self.filters.items():
            if function not in _OWN and not hasattr(function, "is_bounded"):
                self.filters[name] = _bounded_filter(name, function)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """See the sandbox of Jinja."""
        if type(left) is not str or operator != "+":
            _check_operator(operator, left, right)
        return _spent(super().call_binop(context, operator, left, right))

    def call(self, context: Any, function: Any, *args: Any, **options: Any) -> Any:
        """See the sandbox of Jinja."""
        if getattr(function, "__name__", "") in _GROWING:
            text = getattr(getattr(function, "__wrapped__", function), "__self__", None)
            if isinstance(text, str | bytes):
                _check_growth(function.__name__, (text, *args), options)
        return _spent(super().call(context, function, *args, **options))

    def compiled(self, source: str) -> Any:
        """The template. Raises `ValueError` for a source that is none, or is too large."""
        from jinja2 import TemplateSyntaxError

        if len(source) > MOST_SOURCE_CHARS:
            raise ValueError(
                f"the chat template has {len(source):,} characters; at most {MOST_SOURCE_CHARS:,} are read"
            )
        try:
            tree = _Bounding().visit(self.parse(source))
            code: Any = self.compile(tree)
        except TemplateSyntaxError as error:
            raise ValueError(f"the chat template is none, line {error.lineno}: {error.message}") from error
        except (SyntaxError, RecursionError, MemoryError, OverflowError, ValueError) as error:
            raise ValueError(
                f"the chat template is nested too deep, or has too large numbers: {error}"
            ) from None
        return self.template_class.from_code(self, code, self.make_globals(None))


def _bounded_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    num_given = int(hasattr(function, "jinja_pass_arg"))  # what Jinja itself passes
    may_grow = name in _GROWING

    @functools.wraps(function)
    def bounded_filter(*args: Any, **options: Any) -> Any:
        if name == "join":  # of what comes one by one: how many there are decides
            args = (*args[:num_given], list(args[num_given]), *args[num_given + 1 :])
        if may_grow:
            _check_growth(name, args[num_given:], options)
        return _spent(function(*args, **options))

    bounded_filter.is_bounded = True  # type: ignore[attr-defined]
    return bounded_filter


# ---- what no operator is -----------------------------------------------------------------------------------


def _iterated(num_chars: int) -> None:
    """Spend one turn of a loop or of a macro, and the template's own text in it."""
    _current.get().spend(_ITEM_UNITS + num_chars)


def _joined(values: tuple[Any, ...]) -> str:
    """The texts of values in one, as `~` makes it."""
    texts = [str(value) for value in values]
    _current.get().spend(sum(map(len, texts)))
    return "".join(texts)


_OWN = {_iterated, _joined, _spent}


class _Bounding(NodeTransformer):
    """Puts filters of ours where Jinja calls nothing of the environment's; filters are called directly."""

    def _filter(self, name: str, node: Any, line: int) -> nodes.Node:
        return nodes.Filter(node, name, [], [], None, None).set_lineno(line)

    def _counted(self, node: Any, *args: Any, **options: Any) -> Any:
        node = self.generic_visit(node, *args, **options)
        length = sum(len(data.data) for data in node.find_all(nodes.TemplateData))
        spending = self._filter("_iterated", nodes.Const(length), node.lineno)
        node.body.insert(0, nodes.ExprStmt(spending).set_lineno(node.lineno))
        return node

    visit_For = visit_Macro = visit_CallBlock = _counted  # noqa: N815 - as Jinja names them

    def visit_Concat(self, node: Any, *args: Any, **options: Any) -> Any:  # noqa: N802
        """See Jinja's `NodeVisitor`."""
        node = self.generic_visit(node, *args, **options)
        return self._filter("_joined", nodes.Tuple(node.nodes, "load"), node.lineno)

    def _built(self, node: Any, *args: Any, **options: Any) -> Any:
        node = self.generic_visit(node, *args, **options)
        if getattr(node, "ctx", "load") != "load" or not node.items:
            return node
        return self._filter("_built", node, node.lineno)

    visit_List = visit_Tuple = visit_Dict = _built  # noqa: N815
