"""Tell conversions apart by what makes them: a hash of functions and objects, the same in each process.

Functions of the user's own modules count by code, defaults, closures and the globals that they name, those of
installed packages by name and version. Objects with a `fingerprint` count by that, others by class and
state. Arrays and plain values count by content. What none of this tells apart, such as a lock or a generator,
is noted: nobody knows whether it is the same in another process.
"""

from __future__ import annotations

import copyreg
import dis
import functools
import hashlib
import importlib
import importlib.metadata
import importlib.util
import os
import pickle
import sys
import sysconfig
import types
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

_PLAIN = frozenset({bytes, str, int, float, bool, type(None)})
_AS_SHOWN = (int, float, complex, range, slice, type(None), type(Ellipsis), type(NotImplemented))
_AT_ONCE = 4096
"""Items of a list that are hashed together."""
_OURS = ("dataflow", "sharding", "prefetch")
_LOOKS_UP = frozenset({"eval", "exec", "globals", "__import__", "import_module"})
"""Globals by which code may find what it does not name."""
_OF_CODE = ("co_code", "co_names", "co_varnames", "co_freevars", "co_cellvars", "co_flags")
_ARGUMENTS = ("co_argcount", "co_posonlyargcount", "co_kwonlyargcount")
_OF_CLASSES = frozenset(
    {"__dict__", "__weakref__", "__module__", "__firstlineno__", "__static_attributes__", "_abc_impl"}
)
"""Attributes that classes have by themselves."""
_INSTALLED = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})


class Identity:
    """Hashes values, as many as are given, and notes what cannot be told apart.

    Args:
        known: asked first about each object: what it counts by, or None.
    """

    def __init__(self, known: Callable[[Any], Any] | None = None) -> None:
        self._known = known
        self.unknown = ""
        """The first thing that cannot be told apart, in words; "": there is none."""
        self._digests = dict[int, bytes]()
        self._alive = list[Any]()  # an address may not be taken by another object meanwhile
        self._open = dict[int, int]()
        self._names: frozenset[str] | None = None
        """The names in the function at hand; None: there is none."""

    def of(self, value: Any) -> str:
        """The hash of a value, 16 hex digits."""
        try:
            return self._of(value).hex()[:16]
        except RecursionError:
            self._note("values nested too deeply")
            return ""

    def _note(self, what: str) -> bytes:
        self.unknown = self.unknown or what
        return b"?"

    def _of(self, value: Any) -> bytes:
        kind = type(value)
        if kind in _AS_SHOWN:
            return _hashed([kind.__name__, repr(value)])
        if kind is str:
            return _hashed(["str", value])
        if kind in (bytes, bytearray):
            return _hashed(["bytes", value])
        key = id(value)
        if key in self._digests:
            return self._digests[key]
        if key in self._open:
            return _hashed(["again", str(self._open[key])])
        self._open[key] = len(self._open)
        try:
            digest = _hashed(self._parts(value, kind))
        except RecursionError:
            raise
        except Exception:  # whatever code of users or packages raises when it is looked at
            digest = self._note(f"a {kind.__module__}.{kind.__qualname__}")
        finally:
            del self._open[key]
        if not isinstance(value, types.ModuleType):  # of those, it is what a function names
            self._alive.append(value)
            self._digests[key] = digest
        return digest

    def _parts(self, value: Any, kind: type) -> Iterable[Any]:
        """Yield what a value is hashed by: its kind, then bytes, text, or hashes of other values."""
        if kind in (list, tuple):
            return self._items(value, kind)
        if kind is dict:
            return ["dict", *map(self._of, chain.from_iterable(value.items()))]
        if kind in (set, frozenset):
            return [kind.__name__, *sorted(map(self._of, value))]
        if (known := self._known and self._known(value)) is not None:
            return ["known", self._of(known)]
        if isinstance(value, (np.ndarray, np.generic)):
            array = np.asarray(value)
            if array.dtype.hasobject:
                return ["objects", str(array.shape), *map(self._of, array.ravel().tolist())]
            data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
            return ["array", repr(array.dtype), str(array.shape), data]
        if isinstance(value, pickle.PickleBuffer):
            return ["buffer", value.raw()]
        if isinstance(value, types.ModuleType):
            return self._module(value)
        if isinstance(value, types.CodeType):
            return self._code(value)
        if isinstance(value, types.FunctionType):
            return self._function(value)
        return self._class(value) if isinstance(value, type) else self._object(value, kind)

    def _items(self, items: Any, kind: type) -> Iterable[Any]:
        """Lists may be datasets: samples of plain values are hashed thousands at a time."""
        yield f"{kind.__name__} of {len(items)}"
        for first in range(0, len(items), _AT_ONCE):
            part = items[first : first + _AT_ONCE]
            kinds = set(map(type, part))
            inner: Iterable[Any] = part
            if kinds == {dict}:
                inner = chain.from_iterable(chain(sample, sample.values()) for sample in part)
            elif kinds in ({list}, {tuple}):
                inner = chain.from_iterable(part)
            try:
                if not _PLAIN.issuperset(map(type, inner)):
                    raise TypeError
                yield f"plain {sorted(item_kind.__name__ for item_kind in kinds)}"
                yield msgspec.msgpack.encode(part)
            except (TypeError, ValueError, OverflowError):
                yield from map(self._of, part)

    # ---- code ----------------------------------------------------------------------------------------

    def _module(self, module: types.ModuleType) -> Iterable[Any]:
        """An installed module by its version; one of the user's own by those of its values that are named."""
        yield f"module {module.__name__}"
        if _is_installed(module.__name__):
            yield _version(module.__name__)
        elif self._names is None:
            yield self._note(f"the module {module.__name__}, held as a value")
        else:
            for name in sorted(self._names & vars(module).keys()):
                yield name
                yield self._of(vars(module)[name])

    def _code(self, code: types.CodeType) -> Iterable[Any]:
        yield "code"
        yield repr([getattr(code, name) for name in (*_OF_CODE, *_ARGUMENTS)])
        yield getattr(code, "co_exceptiontable", b"")
        yield self._of(code.co_consts)

    def _function(self, function: types.FunctionType) -> Iterable[Any]:
        namespace = function.__globals__
        module = str(namespace.get("__name__", ""))
        is_installed = _is_installed(module)
        yield f"function {function.__qualname__}"
        outer = self._names
        named, reached = _named(function.__code__)
        self._names = reached
        try:
            for part in (function.__defaults__, function.__kwdefaults__, vars(function)):
                yield self._of(part)
            for cell in function.__closure__ or ():
                try:
                    yield self._of(cell.cell_contents)
                except ValueError:
                    yield "empty"
            if is_installed:
                yield f"{module} {_version(module)}"
                return
            yield self._of(function.__code__)
            if lookups := named & _LOOKS_UP - namespace.keys():
                yield self._note(f"what {function.__qualname__} finds by {min(lookups)}()")
            for name in sorted(named & namespace.keys()):
                yield name
                yield self._of(namespace[name])
            for name in sorted(_imported(function.__code__, str(namespace.get("__package__") or ""))):
                if _is_installed(name):
                    yield f"import {name} {_version(name)}"
                    continue
                try:
                    yield self._of(importlib.import_module(name))
                except ImportError:
                    yield f"import {name}"
        finally:
            self._names = outer

    def _class(self, kind: type) -> Iterable[Any]:
        yield f"class {kind.__module__}.{kind.__qualname__}"
        if _is_installed(kind.__module__):
            yield _version(kind.__module__)
            return
        for base in kind.__bases__:
            yield self._of(base)
        for name in sorted(vars(kind).keys() - _OF_CLASSES):
            yield name
            yield self._of(vars(kind)[name])

    # ---- objects -------------------------------------------------------------------------------------

    def _object(self, value: Any, kind: type) -> Iterable[Any]:
        yield f"{kind.__module__}.{kind.__qualname__}"
        if (fingerprint := _fingerprint(value)) is not None:
            yield fingerprint
            return
        if isinstance(value, (types.MethodType, staticmethod, classmethod)):
            yield self._of(value.__func__)
            yield self._of(getattr(value, "__self__", None))
        elif isinstance(value, property):
            yield self._of((value.fget, value.fset, value.fdel))
        elif isinstance(value, functools.cached_property):
            yield self._of(value.func)
        elif isinstance(value, functools._lru_cache_wrapper):
            yield self._of(value.__wrapped__)
        elif isinstance(value, types.MappingProxyType):
            yield self._of(dict(value))
        elif isinstance(value, (types.MemberDescriptorType, types.GetSetDescriptorType)):
            yield value.__name__
        elif hasattr(value, "detach") and hasattr(value, "untyped_storage"):
            bits = value.detach().cpu().contiguous().reshape(-1).view(sys.modules["torch"].uint8)
            yield f"{value.dtype} {tuple(value.shape)}"
            yield self._of(bits.numpy())
        elif is_dataclass(value) and _is_installed(kind.__module__):  # what is cached beside does not count
            yield self._of(kind)
            yield self._of({field.name: getattr(value, field.name) for field in fields(value)})
        else:
            yield from self._reduced(value)

    def _reduced(self, value: Any) -> Iterable[Any]:
        """An object by what pickle would make it of."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            reduce = copyreg.dispatch_table.get(type(value))
            recipe: Any = reduce(value) if reduce is not None else value.__reduce_ex__(5)
        if isinstance(recipe, str):
            module = str(getattr(value, "__module__", ""))
            yield f"{module} {recipe} {_version(module)}"
            return
        for part in recipe[:3]:
            yield self._of(part)
        for part in recipe[3:5]:
            yield self._of(None if part is None else list(part))


def _hashed(parts: Iterable[Any]) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        data = memoryview(part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part)
        digest.update(data.nbytes.to_bytes(8, "little"))
        digest.update(data)
    return digest.digest()


def _fingerprint(value: Any) -> str | None:
    """Return what an object says of itself; `datasets` calls it `_fingerprint`."""
    with suppress(Exception):
        for name in ("fingerprint", "_fingerprint"):
            fingerprint = getattr(value, name, None)
            if isinstance(fingerprint, str) and fingerprint:
                return fingerprint
    return None


def _codes(code: types.CodeType) -> Iterable[types.CodeType]:
    """Yield code, and that of the functions and classes in it."""
    yield code
    for value in code.co_consts:
        if isinstance(value, types.CodeType):
            yield from _codes(value)


@functools.lru_cache(maxsize=1024)
def _named(code: types.CodeType) -> tuple[frozenset[str], frozenset[str]]:
    """The globals that code names; and all names and texts by which it may ask a module for a value."""
    globals_, reached = set[str](), set[str]()
    for body in _codes(code):
        loads = (step for step in dis.get_instructions(body) if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"))
        globals_.update(step.argval for step in loads)
        reached.update(body.co_names, (value for value in body.co_consts if isinstance(value, str)))
    return frozenset(globals_), frozenset(reached)


def _imported(code: types.CodeType, package: str) -> set[str]:
    """The modules that code imports when it runs."""
    modules = set[str]()
    for body in _codes(code):
        level: Any = 0
        steps = list(dis.get_instructions(body))
        for number, step in enumerate(steps):
            if step.opname == "IMPORT_NAME":
                level = steps[number - 2].argval if number > 1 else 0
                name = "." * (level if isinstance(level, int) else 0) + step.argval
                try:
                    modules.add(importlib.util.resolve_name(name, package))
                except ImportError:
                    modules.add(step.argval)
    return modules


@functools.lru_cache(maxsize=4096)
def _is_installed(name: str) -> bool:
    """Return whether a module comes with Python or a package, and not from the user."""
    top = name.partition(".")[0]
    if top in _OURS:
        return True
    modules = (sys.modules.get(name), sys.modules.get(top))
    path = next((path for module in modules if (path := getattr(module, "__file__", None))), None)
    if path is None and top not in sys.modules:
        with suppress(ImportError, ValueError):
            path = getattr(importlib.util.find_spec(top), "origin", None)
    if path is None or not os.path.isabs(path):
        return top in sys.stdlib_module_names
    return path.startswith(_INSTALLED) or not {"site-packages", "dist-packages"}.isdisjoint(Path(path).parts)


@functools.lru_cache(maxsize=1024)
def _version(name: str) -> str:
    """The version of the package that a module belongs to."""
    top = name.partition(".")[0]
    if top in sys.stdlib_module_names:
        return f"{sys.version_info.major}.{sys.version_info.minor}"
    version = getattr(sys.modules.get(top), "__version__", None)
    if isinstance(version, str):
        return version
    try:
        return importlib.metadata.version("dataflow-loader" if top in _OURS else top)
    except importlib.metadata.PackageNotFoundError:
        return ""


def described(
    values: Mapping[str, Any], known: Callable[[Any], Any]
) -> tuple[dict[str, str], dict[str, str]]:
    """The name and hash of each value ("" of None), and why some cannot be told apart."""
    identities, unknown = dict[str, str](), dict[str, str]()
    for label, value in values.items():
        identity = Identity(known)
        named = value if hasattr(value, "__qualname__") else type(value)
        name = f"{named.__module__}:{named.__qualname__}"
        is_none = value is None or (isinstance(value, tuple) and not value)
        identities[label] = "" if is_none else f"{name} {identity.of(value)}"
        if identity.unknown:
            unknown[label] = identity.unknown
    return identities, unknown
