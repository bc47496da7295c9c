"""Registers the strategy ``autopipe_h`` with Lightning without importing torch or Lightning.

Lightning knows no entry point for strategies: a name has to be put into its registry after the registry exists and
before a ``Trainer`` is made. `install` does that at once where Lightning is already imported; otherwise it leaves a
finder on ``sys.meta_path`` that waits for the import of one of the two registries and registers right after it.

What is registered is a function that makes the strategy, not the class: the registry is filled in the middle of
Lightning's own import, when the strategy's module could not be imported yet.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import sys
import threading
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

STRATEGY_NAME = "autopipe_h"
STRATEGY_MODULES = {
    "lightning.pytorch": "lightning_autopipe.strategy",
    "pytorch_lightning": "lightning_autopipe.pytorch_lightning",
}
"""Where the strategy is for each of the names under which Lightning is published."""
REGISTRY_MODULES = tuple(f"{namespace}.strategies" for namespace in STRATEGY_MODULES)

_DESCRIPTION = "Pipeline parallelism for an unchanged LightningModule (lightning_autopipe)"
_log = logging.getLogger(__name__)


def install() -> None:
    """Registers ``autopipe_h`` in every Lightning registry that is imported, and in the others once they are.

    Calling it again changes nothing. It never raises: it runs inside other packages' imports, and a failure here must
    not break theirs; failures are logged.
    """
    try:
        missing = [name for name in REGISTRY_MODULES if not _register_in(sys.modules.get(name))]
        # By name: this module may have been reloaded.
        if missing and not any(type(finder).__qualname__ == _RegistryFinder.__qualname__ for finder in sys.meta_path):
            sys.meta_path.insert(0, _RegistryFinder())
    except Exception:
        _log.warning("the strategy %r could not be registered with Lightning", STRATEGY_NAME, exc_info=True)


def strategy_module_in_use() -> str:
    """The module of the strategy for the Lightning that this process uses.

    ``lightning.pytorch`` where it is imported; else ``pytorch_lightning`` where that is imported, or is the only one
    that can be; else ``lightning.pytorch``.
    """
    if "lightning.pytorch" not in sys.modules:
        if "pytorch_lightning" in sys.modules or importlib.util.find_spec("lightning") is None:
            return STRATEGY_MODULES["pytorch_lightning"]
    return STRATEGY_MODULES["lightning.pytorch"]


def _register_in(module: ModuleType | None) -> bool:
    """Puts the name into the registry of ``module``; False where the module has none (yet)."""
    registry = getattr(module, "StrategyRegistry", None)
    if module is None or registry is None:
        return False
    if STRATEGY_NAME not in registry:
        strategy_module = STRATEGY_MODULES[module.__name__.removesuffix(".strategies")]
        registry.register(STRATEGY_NAME, functools.partial(_make_strategy, strategy_module), description=_DESCRIPTION)
    return True


def _make_strategy(module_name: str, **init_params: Any) -> Any:
    return importlib.import_module(module_name).AutoPipeStrategy(**init_params)


class _RegistryFinder(MetaPathFinder):
    """Finds a registry's module as the other finders do, and arranges that it is registered with after it has run."""

    def __init__(self) -> None:
        self._in_progress = threading.local()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        # Another finder may ask all finders in turn, as this one does.
        if fullname not in REGISTRY_MODULES or getattr(self._in_progress, "name", None) == fullname:
            return None
        self._in_progress.name = fullname
        try:
            spec = self._found_by_others(fullname, path, target)
        finally:
            self._in_progress.name = None
        if spec is not None:
            try:
                _register_after_execution(spec)
            except Exception:
                _log.warning("the strategy %r could not be registered", STRATEGY_NAME, exc_info=True)
        return spec

    def _found_by_others(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None
    ) -> ModuleSpec | None:
        for finder in list(sys.meta_path):
            if finder is not self and hasattr(finder, "find_spec"):
                spec = finder.find_spec(fullname, path, target)
                if spec is not None:
                    return spec
        return None


def _register_after_execution(spec: ModuleSpec) -> None:
    loader = spec.loader
    if loader is None or "exec_module" in vars(loader):  # the latter: it serves all modules, and was asked before
        return
    execute = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        # Set on this one loader object, and taken back first: the module sees the loader it always had.
        del loader.exec_module
        execute(module)
        try:
            _register_in(module)
        except Exception:
            _log.warning("the strategy %r could not be registered", STRATEGY_NAME, exc_info=True)

    loader.exec_module = exec_module  # type: ignore[method-assign]
