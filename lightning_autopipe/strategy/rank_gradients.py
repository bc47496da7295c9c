"""Who sums the gradients of one rank's parameters, and with whom."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from lightning_autopipe.capture.absent import is_absent
from lightning_autopipe.runtime.gradient_reduction import GradientReducer
from lightning_autopipe.runtime.pipeline import Pipeline
from lightning_autopipe.runtime.process_groups import ProcessGroups
from lightning_autopipe.runtime.synchronized_batch_norm import synchronized_layers
from lightning_autopipe.runtime.tied_parameters import TiedParameters
from lightning_autopipe.strategy.communicator import Communicator
from lightning_autopipe.strategy.environment import with_ties
from lightning_autopipe.strategy.gradients import GradientLedger


@dataclass(frozen=True, slots=True, kw_only=True)
class RankGradients:
    """The gradients of a placed module's parameters on this rank."""

    ledger: GradientLedger
    has_ties: bool
    """Whether stages share parameters."""
    uncounted: frozenset[int]
    """The `id`s of parameters that another stage counts."""

    def counts_in_norm(self, parameter: Tensor) -> bool:
        """Whether this stage counts a parameter in a norm over all stages: a tied one counts once."""
        return id(parameter) not in self.uncounted


def gradients_of_rank(
    module: nn.Module,
    pipeline: Pipeline,
    communicator: Communicator,
    groups: ProcessGroups | None,
) -> RankGradients:
    """The gradients of what is placed on this rank. Collective over all ranks.

    Args:
        module: Placed.
        pipeline: Knows what the ranks own.
        communicator: This rank's groups for objects.
        groups: The runtime's groups; None where there is one process.
    """
    layout, ownership = communicator.layout, pipeline.ownership
    owned = [ownership.owned_parameters(stage) for stage in range(layout.num_stages)]
    holders = {
        name: tuple(stage for stage, names in enumerate(owned) if name in names)
        for name, _ in module.named_parameters()
    }
    stages_by_name = {name: stages for name, stages in holders.items() if len(stages) > 1}
    ties: TiedParameters | None = None
    replicas: GradientReducer | None = None
    if groups is not None:
        if stages_by_name:
            ties = TiedParameters(stages_by_name, with_ties(groups, stages_by_name.values()))
        if layout.num_replicas > 1:
            replicas = GradientReducer(
                groups.stage,
                name=f"the replicas of stage {communicator.stage_index}",
                keeps_order=bool(synchronized_layers(module)),
            )
    own = ownership.in_order_of_use({name: p for name, p in module.named_parameters() if not is_absent(p)})
    return RankGradients(
        ledger=GradientLedger(
            own,
            replicas=replicas,
            ties=ties,
            complete=ownership.parameters_of_later_stages(pipeline.stage_index),
        ),
        has_ties=ties is not None,
        uncounted=frozenset(id(p) for name, p in own.items() if ties is not None and not ties.is_counted(name)),
    )
