"""What of a LightningModule the user has given to `torch.compile`, for a run in which it is compiled stage by stage."""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.compile import to_uncompiled
from torch import nn
from torch._dynamo import OptimizedModule
from torch._dynamo.eval_frame import OptimizeContext

from lightning_autopipe.capture.compiled_calls import Compilation, Compiler
from lightning_autopipe.capture.records import STEP
from lightning_autopipe.runtime.pipeline import Pipeline

_NUM_NAMED = 3  # modules in a warning
_CUDA_GRAPHS = (
    "its CUDA graphs hold the results of one micro-batch, and several are in flight (use "
    "mode='max-autotune-no-cudagraphs', or no mode)"
)


class StagewiseCompilation:
    """Between `begin` and `end` torch compiles nothing but what lies within one of this process's stages."""

    def __init__(self) -> None:
        self._stance: Any = None
        self._pipeline: Pipeline | None = None
        self._told: set[str] = set()

    def begin(self) -> None:
        """Switch compilation off: nothing can be traced, cut or measured in a compiled graph."""
        if self._stance is None:
            self._stance = torch.compiler.set_stance("force_eager")
            self._stance.__enter__()

    def serve(self, pipeline: Pipeline, whole: Compiler | None) -> None:
        """Let a pipeline run compiled what is compiled of its module, and tell what it cannot.

        Args:
            pipeline: Runs the module.
            whole: How the module was compiled itself; None: it was not.
        """
        self._told.clear()
        self._pipeline = pipeline
        compilers, uncompiled = _compilers(pipeline.module, whole, pipeline.device)
        excluded = pipeline.batch_norm.reasons_against_compilation() if compilers else {}
        known = pipeline.store.compilation
        if ((known.compilers, known.excluded) if known is not None else ({}, {})) != (compilers, excluded):
            pipeline.store.clear()
            pipeline.store.compilation = None
            if compilers:
                pipeline.store.compilation = Compilation(
                    compilers=compilers,
                    allowed=self._allowed,
                    tell=self._tell,
                    excluded=excluded,
                )
        self._tell(uncompiled)

    def end(self) -> None:
        """Let what is compiled run compiled again."""
        if self._stance is not None:
            self._stance.__exit__(None, None, None)
            self._stance = None

    @contextlib.contextmanager
    def _allowed(self) -> Iterator[None]:
        """Have torch compile as the user's own stance says."""
        stance = self._stance
        stance.__exit__(None, None, None)
        try:
            yield
        finally:
            stance.__enter__()

    def _tell(self, uncompiled: Mapping[str, str]) -> None:
        assert self._pipeline is not None
        by_reason: dict[str, list[str]] = {}
        for path, reason in uncompiled.items():
            by_reason.setdefault(reason, []).append(path or type(self._pipeline.module).__name__)
        for reason, paths in by_reason.items():
            if reason in self._told or self._pipeline.replica_index > 0:
                continue
            self._told.add(reason)
            more = f" and {len(paths) - _NUM_NAMED} more" if len(paths) > _NUM_NAMED else ""
            warnings.warn(
                f"{', '.join(paths[:_NUM_NAMED])}{more}: given to torch.compile, but run uncompiled by the pipeline, "
                f"with the same numbers: {reason}",
                stacklevel=2,
            )


def taken_apart(module: pl.LightningModule | None) -> Compiler | None:
    """Make a compiled LightningModule an ordinary one again, in place; give how it was compiled, None if it was not."""
    if module is None or module._compiler_ctx is None:
        return None
    compiler: Compiler = module._compiler_ctx["dynamo_ctx"]
    to_uncompiled(module)
    return compiler


def _compilers(
    module: nn.Module, whole: Compiler | None, device: torch.device
) -> tuple[dict[str, Compiler], dict[str, str]]:
    """Find what of a module is compiled and how, and what has to stay uncompiled and why, by path."""
    found: dict[str, Compiler | None] = {} if whole is None else {STEP: whole}
    for path, sub in module.named_modules():
        if isinstance(sub, OptimizedModule):
            found[path] = sub.dynamo_ctx
        elif sub._compiled_call_impl is not None:
            found[path] = _context_of(sub._compiled_call_impl)
    compilers: dict[str, Compiler] = {}
    uncompiled: dict[str, str] = {}
    for path, compiler in found.items():
        if compiler is None:
            uncompiled[path] = "its compile() was not that of torch"
        elif device.type == "cuda" and _has_cuda_graphs(compiler):
            uncompiled[path.replace(STEP, "")] = _CUDA_GRAPHS
        else:
            compilers[path] = compiler
    return compilers, uncompiled


def _context_of(compiled: Callable[..., Any]) -> Compiler | None:
    """Give the object with the options of a `torch.compile`, which its result has in its closure."""
    context = inspect.getclosurevars(compiled).nonlocals.get("self") if inspect.isfunction(compiled) else None
    return context if isinstance(context, OptimizeContext) else None


def _has_cuda_graphs(compiler: Any) -> bool:
    config = getattr(compiler, "compiler_config", None)
    return isinstance(config, Mapping) and bool(config.get("triton.cudagraphs"))
