"""Which replica of a stage keeps, or writes, which of its parameters."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from lightning_autopipe.core.layout import ParallelLayout
from lightning_autopipe.runtime.ownership import Ownership
from lightning_autopipe.strategy.pruning import name_without_mask


def even_shares(num_bytes: Mapping[str, int], num_shares: int) -> dict[str, int]:
    """Gives each parameter to a share, so that shares have about equally many bytes; the same on every rank.

    The largest comes first, to the share that has least by then. Whether a parameter is pruned does not count: what is
    kept of it stays where it is.
    """
    filled = [0] * num_shares
    shares: dict[str, int] = {}
    for name in sorted(num_bytes, key=lambda name: (-num_bytes[name], name_without_mask(name))):
        share = min(range(num_shares), key=filled.__getitem__)
        shares[name] = share
        filled[share] += num_bytes[name]
    return shares


class ParameterShares:
    """For each stage the replica that has a parameter in its share.

    Args:
        module: Placed or not: placeholders have the shapes.
        ownership: Which stage uses which parameters.
        layout: Stages and replicas.
    """

    def __init__(self, module: nn.Module, ownership: Ownership, layout: ParallelLayout) -> None:
        self._layout = layout
        self._ownership = ownership
        parameters = dict(module.named_parameters())
        self._replicas = []
        for stage in range(layout.num_stages):
            owned = ownership.owned_parameters(stage)
            sizes = {name: p.numel() * p.element_size() for name, p in parameters.items() if name in owned}
            self._replicas.append(even_shares(sizes, layout.num_replicas))

    def of_stage(self, stage_index: int) -> dict[str, int]:
        """The replica by the (first) name of each parameter of a stage."""
        return self._replicas[stage_index]

    def holder(self, name: str) -> int:
        """The global rank that has a parameter in its share, on the stage that a checkpoint takes it from."""
        stage_index = self._ownership.parameter_owner(name)
        return self._layout.global_rank(stage_index, self._replicas[stage_index][name])
