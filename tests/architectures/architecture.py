"""What an architecture is: a network that makes its own loss, a batch for it, and the LightningModule around it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from lightning.pytorch import LightningModule
from torch import Tensor, nn

transformers.logging.set_verbosity_error()


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """One row of the table."""

    kind: str
    network: Callable[[], nn.Module]
    """A LightningModule, or a network whose output has a `loss`; with random weights."""
    batch: Callable[[], Any]
    """Its losses are means over a power of two of terms: weighting them is exact then."""
    dtype: torch.dtype = torch.float64
    min_layers: int = 4
    remark: str = ""

    def module(self, *, draws: bool = False) -> LightningModule:
        """The user's module, the same at each call; without dropout and other random draws unless `draws`."""
        torch.manual_seed(0)
        network = self.network().train()
        module = network if isinstance(network, LightningModule) else Wrapped(network)
        return (module if draws else without_draws(module)).to(self.dtype)


class Wrapped(LightningModule):
    """A network as a user's module: the loss is made inside the network."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        return self.network(**batch).loss

    validation_step = training_step


def without_draws(module: Any) -> Any:
    """Set every probability of dropping something to 0, wherever the network keeps it."""
    configs = {id(sub.config): sub.config for sub in module.modules() if hasattr(sub, "config")}
    for sub in module.modules():
        if isinstance(sub, nn.Dropout):
            sub.p = 0.0
    for holder in (*module.modules(), *configs.values()):
        for name, value in vars(holder).items():
            if isinstance(value, float) and "drop" in name:
                setattr(holder, name, 0.0)
        if hasattr(holder, "apply_spec_augment"):
            holder.apply_spec_augment = False
    return module
