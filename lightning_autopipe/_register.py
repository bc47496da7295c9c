"""Registers the strategy ``autopipe_h`` with Lightning without importing torch or Lightning.

Lightning knows no entry point for strategies: a name has to be put into its registry after the registry exists and
before a ``Trainer`` is made. `install` does that at once where Lightning is already imported; otherwise it leaves a
finder on ``sys.meta_path`` that waits for the import of one of the two registries and registers right after it.

What is registered is a function that makes the strategy, not the class: the registry is filled in the middle of
Lightning's own import, when the strategy's module could not be imported yet.
"""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

STRATEGY_NAME = "autopipe_h"
REGISTRY_MODULES = ("lightning.pytorch.strategies", "pytorch_lightning.strategies")

_DESCRIPTION = "Pipeline parallelism for an unchanged LightningModule (lightning_autopipe)"
_log = logging.getLogger(__name__)


def install() -> None:
    """Registers ``autopipe_h`` in every Lightning registry that is imported, and in the others once they are.

    Calling it again changes nothing. It never raises: it runs inside other packages' imports, and a failure here must
    not break theirs; failures are logged.
    """
    try:
        missing = [name for name in REGISTRY_MODULES if not _register_in(sys.modules.get(name))]
        if missing and not any(isinstance(finder, _RegistryFinder) for finder in sys.meta_path):
            sys.meta_path.insert(0, _RegistryFinder())
    except Exception:
        _log.warning("the strategy %r could not be registered with Lightning", STRATEGY_NAME, exc_info=True)


def _register_in(module: ModuleType | None) -> bool:
    """Puts the name into the registry of ``module``; False where the module has none (yet)."""
    registry = getattr(module, "StrategyRegistry", None)
    if module is None or registry is None:
        return False
    if STRATEGY_NAME not in registry:
        factory = _make_lightning_strategy if module.__name__.startswith("lightning.") else _make_pl_strategy
        registry.register(STRATEGY_NAME, factory, description=_DESCRIPTION)
    return True


def _make_lightning_strategy(**init_params: Any) -> Any:
    return importlib.import_module("lightning_autopipe.strategy").AutoPipeStrategy(**init_params)


def _make_pl_strategy(**init_params: Any) -> Any:
    strategy = _make_lightning_strategy(**init_params)
    base = sys.modules["pytorch_lightning.strategies"].Strategy
    if not isinstance(strategy, base):
        from lightning_autopipe.core.errors import ConfigurationError

        raise ConfigurationError(
            f"strategy={STRATEGY_NAME!r} was given to pytorch_lightning.Trainer, but it is made for lightning.pytorch; "
            "import Trainer and LightningModule from lightning.pytorch (the same code under the package's newer name)"
        )
    return strategy


class _RegistryFinder(MetaPathFinder):
    """Finds a registry's module as the other finders do, and arranges that it is registered with after it has run."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in REGISTRY_MODULES:
            return None
        for finder in sys.meta_path:
            if isinstance(finder, _RegistryFinder) or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                try:
                    _register_after_execution(spec)
                except Exception:
                    _log.warning("the strategy %r could not be registered", STRATEGY_NAME, exc_info=True)
                return spec
        return None


def _register_after_execution(spec: ModuleSpec) -> None:
    loader = spec.loader
    if loader is None:
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
