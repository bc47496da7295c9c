"""Lightning's finetuning callbacks, on ranks that keep a part of the optimizer.

`BaseFinetuning` notes the names of the parameters of each group, to make the groups again when a run is resumed. Of
groups that were pruned by then it knows this rank's only; in checkpoints they are whole, as on one device.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import BaseFinetuning

from lightning_autopipe.strategy.optimizers import WholeOptimizer

_GROUPS = "internal_optimizer_metadata"


def complete_group_names(
    checkpoint: dict[str, Any], callbacks: Iterable[pl.Callback], optimizers: Sequence[WholeOptimizer]
) -> None:
    """Puts all names of each group into the callbacks' states in a checkpoint; what the callbacks have stays."""
    states = checkpoint.get("callbacks", {})
    for callback in callbacks:
        state = states.get(callback.state_key)
        if not isinstance(callback, BaseFinetuning) or not isinstance(state, dict) or _GROUPS not in state:
            continue
        complete = {
            index: [
                {**group, "params": list(names)}
                for group, names in zip(groups, optimizers[index].group_names(), strict=False)
            ]
            for index, groups in state[_GROUPS].items()
        }
        states[callback.state_key] = {**state, _GROUPS: complete}
