"""Import the author's file as Python would: with the modules beside it, and as a part of its package.

`python FILE` finds modules beside FILE. A file in a package (a folder with `__init__.py`) also has relative
imports, and the package's own name for absolute ones, also in a `src/` layout. All of that works at the first
import and later, in functions that import when they are called.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from types import ModuleType

SOURCE_FOLDER = "src"


@lru_cache(8)
def import_folders(path: Path) -> tuple[str, ...]:
    """Folders in which the imports of the file at `path` are looked for, before all others."""
    sources = [folder for folder in path.parents if folder.name == SOURCE_FOLDER][:1]
    return tuple(dict.fromkeys(map(str, (path.parent, package_root(path), *sources))))


def package_root(path: Path) -> Path:
    """The folder that holds the outermost package of the file at `path`; without a package its own folder."""
    return next(folder for folder in path.parents if not (folder / "__init__.py").exists())


@contextmanager
def author_imports(path: Path) -> Iterator[None]:
    """Context in which imports look in the folders of the file at `path` first; afterwards they come last.

    Last, since a neighbour called `datasets.py` must not stand in for a library that is imported later.
    """
    folders = import_folders(path)
    sys.path[:] = [*folders, *(folder for folder in sys.path if folder not in folders)]
    try:
        yield
    finally:
        sys.path[:] = [*(folder for folder in sys.path if folder not in folders), *folders]


@lru_cache(8)
def author_module(path: Path, _content: bytes) -> ModuleType:
    """The module at the absolute `path`, imported once per content: model, loss and data share it.

    Raises what the author's code raises, and ImportError for a file that is not Python.
    """
    package = _package(path)
    name = f"{package}.{path.stem}" if package else f"hetpeer_author_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path.name} is not a Python file")
    with author_imports(path):
        if package and name not in sys.modules:
            importlib.import_module(package)
            if name in sys.modules:
                return sys.modules[name]  # the package imports it itself
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return module


def _package(path: Path) -> str:
    """Dotted name of the package of the file at `path`; empty if it has none.

    Empty also if a package of that name was imported from elsewhere: hetpeer's own from another folder.
    """
    root = package_root(path)
    parts = path.parent.relative_to(root).parts
    known = sys.modules.get(parts[0]) if parts else None
    if known is not None and str(root / parts[0]) not in map(str, getattr(known, "__path__", ())):
        return ""
    return ".".join(parts)
