"""How the package is built: as setuptools does it, with `sharding/core/libcore.so` in it.

This file is two things. pyproject.toml names it as the build backend, because setuptools' own cannot ask for
a compiler only where there is none; and setuptools runs it as its script, which compiles and names the wheel.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from setuptools import Extension, setup
from setuptools.build_meta import (
    build_editable,
    build_sdist,
    build_wheel,
    get_requires_for_build_sdist,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

from sharding.core.compile import LIBRARY, SOURCES, NoCompilerError, compile_core, compilers_on_path

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]

CORE = "sharding.core.libcore"
MACHINES = ("x86_64", "aarch64")
"""Of others PyPI may have no zig, and what cannot be installed would end the installation."""


def get_requires_for_build_wheel(config_settings: Any = None) -> list[str]:
    """A C compiler, where none is on PATH."""
    if compilers_on_path():
        return []
    return [f"ziglang>=0.13; platform_machine == '{machine}'" for machine in MACHINES]


get_requires_for_build_editable = get_requires_for_build_wheel


class CompileCore(build_ext):
    """Compiles a library that is no module: without Python's version in its name and without its flags."""

    def get_ext_filename(self, fullname: str) -> str:
        return os.path.join(*fullname.split(".")) + ".so"

    def run(self) -> None:
        if self.inplace:  # setuptools would copy it there: who starts meanwhile must find a whole one
            self._compile(LIBRARY)
        else:
            super().run()

    def build_extension(self, ext: Extension) -> None:
        library = Path(self.get_ext_fullpath(ext.name))
        library.parent.mkdir(parents=True, exist_ok=True)
        self._compile(library)

    def _compile(self, library: Path) -> None:
        try:
            compile_core(library)
        except NoCompilerError as error:
            raise CompileError(str(error)) from None


class CoreWheel(bdist_wheel):
    """A wheel for every Python of one platform."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


if __name__ == "__main__":
    sources = [f"sharding/core/{source.name}" for source in SOURCES]
    core = Extension(CORE, sources, depends=["sharding/core/core.h"])
    setup(ext_modules=[core], cmdclass={"build_ext": CompileCore, "bdist_wheel": CoreWheel})
