"""Modules of which a part, or the whole, is given to `torch.compile`."""

from __future__ import annotations

from typing import Any

import torch
import torch._dynamo
import torch.nn.functional as F
from lightning.pytorch.utilities.compile import from_compiled
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.strategy.modules import WIDTH, MlpModule

graphs: list[int] = []
"""Number of operations of each graph that `counting` has compiled in this process."""


def counting(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
    """A backend that needs no compiler: forward and backward are traced, and run as they are."""
    graphs.append(sum(node.op.startswith("call") for node in graph.graph.nodes))
    return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)


def num_graphs() -> int:
    """Graphs compiled since the last call."""
    found = len(graphs)
    graphs.clear()
    return found


def has_compiled(*_: Any) -> bool:
    """Whether any graph was compiled since a module was made."""
    return num_graphs() > 0


def _forget_graphs() -> None:
    """What other modules have compiled in this process is not used again."""
    torch._dynamo.reset()
    graphs.clear()


@torch.compile(backend="eager")
def squashed(x: Tensor) -> Tensor:
    return x.tanh() + 1.0


class CompiledModule(MlpModule):
    """`how`: "blocks" (each by `compile()`), "net" (a wrapped submodule), "function" (inside the step)."""

    def __init__(self, *, how: str, compile_options: dict[str, Any] | None = None, **options: Any) -> None:
        super().__init__(**options)
        self.how = how
        _forget_graphs()
        given = {"backend": counting, **(compile_options or {})}
        if how == "blocks":
            for block in self.blocks:
                block.compile(**given)
        elif how == "net":
            self.net = torch.compile(nn.Sequential(*self.blocks), **given)
            del self.blocks

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "net":
            return self.head(self.net(x)).squeeze(-1)
        if self.how == "function":
            x = squashed(x)
            for block in self.blocks:
                x = squashed(block(x))
            return self.head(x).squeeze(-1)
        return super().forward(x)


class WhollyCompiledModule(MlpModule):
    """What a Trainer makes of the result of `torch.compile(module)`."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        _forget_graphs()
        from_compiled(torch.compile(self, backend=counting))  # type: ignore[arg-type]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return F.mse_loss(self(x), y)  # torch cannot compile self.log under each version of Python


class Block(nn.Module):
    """Two layers and what may stand between them."""

    def __init__(self, between: nn.Module | None = None) -> None:
        super().__init__()
        self.first, self.between, self.second = nn.Linear(WIDTH, WIDTH), between, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).relu()
        return x + self.second(h if self.between is None else self.between(h)).tanh()


class CompiledBlocksModule(MlpModule):
    """Residual blocks, each compiled; `between`: a module's class, and what it is made with."""

    def __init__(
        self,
        *,
        between: Any = None,
        between_options: dict[str, Any] | None = None,
        recomputed: bool = False,
        backend: Any = counting,
        fullgraph: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        made = [None if between is None else between(**(between_options or {})) for _ in self.blocks]
        self.blocks = nn.ModuleList(map(Block, made))
        self.recomputed = recomputed
        _forget_graphs()
        for block in self.blocks if backend is not None else ():
            block.compile(backend=backend, fullgraph=fullgraph)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recomputed else block(x)
        return self.head(x).squeeze(-1)
