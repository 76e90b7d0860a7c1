"""Doing something to a module right after user code has imported it, without importing it before."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

Change = Callable[[Any], None]


class Watcher:
    """A finder that finds nothing itself, but has the modules it waits for changed once they are loaded."""

    def __init__(self) -> None:
        self._changes: dict[str, Change] = {}

    def after(self, name: str, change: Change) -> None:
        self._changes[name] = change

    def install(self) -> None:
        finders: list[Any] = sys.meta_path
        finders.insert(0, self)

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> Any:
        if name not in self._changes:
            return None
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = Loader(spec.loader, self._changes[name])  # type: ignore[assignment]
                return spec
        return None


class Loader:
    """The module's own loader, and the change after it."""

    def __init__(self, loader: Any, change: Change) -> None:
        self._loader = loader
        self._change = change

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: Any) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        try:
            self._change(module)
        except (AttributeError, TypeError):
            # A release that looks different inside; it works as it does anywhere else.
            return
