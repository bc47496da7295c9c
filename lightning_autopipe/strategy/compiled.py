"""Modules and functions that users have given to `torch.compile`: a pipeline runs them as they were before."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.compile import to_uncompiled
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch._dynamo import OptimizedModule


class EagerRun:
    """Between `begin` and `end` nothing that was compiled runs compiled: a graph of several layers cannot be cut."""

    def __init__(self) -> None:
        self._stance: Any = None

    def begin(self, module: pl.LightningModule, *, is_compiled: bool) -> None:
        """Switch compilation off, and say so where a part of the module is compiled.

        Args:
            module: The user's.
            is_compiled: Whether it was itself given to `torch.compile`.
        """
        place = type(module).__name__ if is_compiled else _first_compiled(module)
        if place is not None:
            rank_zero_warn(
                f"{place} is compiled with torch.compile, but a pipeline runs the step layer by layer and cannot cut a "
                "compiled graph: it runs uncompiled, with the same numbers. Leave torch.compile out to silence this"
            )
        if self._stance is None:
            self._stance = torch.compiler.set_stance("force_eager")
            self._stance.__enter__()

    def end(self) -> None:
        """Let what is compiled run compiled again."""
        if self._stance is not None:
            self._stance.__exit__(None, None, None)
            self._stance = None


def taken_apart(module: pl.LightningModule | None) -> bool:
    """Make a compiled LightningModule an ordinary one again, in place; give whether it was compiled."""
    if module is None or module._compiler_ctx is None:
        return False
    to_uncompiled(module)
    return True


def _first_compiled(module: pl.LightningModule) -> str | None:
    for path, submodule in module.named_modules():
        if isinstance(submodule, OptimizedModule) or submodule._compiled_call_impl is not None:
            return path or type(module).__name__
    return None
