"""Parameters that live on several stages: one in meaning, so one gradient and equal copies."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch import nn

from lightning_autopipe.runtime.gradient_reduction import GradientReducer
from lightning_autopipe.runtime.process_groups import ProcessGroups


class TiedParameters:
    """Sums the gradients of tied parameters over all their stages and all replicas, each once.

    Every rank goes through the sets of stages in one order and through the names in one order, so that any number of
    overlapping ties cannot wait in a circle. An all-reduce gives every member the same bits, so copies that start equal
    stay equal under equal optimizers.
    """

    def __init__(self, stages_by_name: Mapping[str, Collection[int]], groups: ProcessGroups) -> None:
        """Tie parameters.

        Args:
            stages_by_name: For each parameter on more than one stage its stages. A parameter with several names has one
                of them here. Equal on all ranks, whether this stage has a copy or not.
            groups: Created with `tied_stages=stages_by_name.values()`.
        """
        stage_index = groups.stage_index
        self._stages_by_name = {
            name: tuple(sorted(set(stages)))
            for name, stages in sorted(stages_by_name.items())
            if stage_index in stages and len(set(stages)) > 1
        }
        self._is_counted = {name: stages[0] == stage_index for name, stages in self._stages_by_name.items()}
        self.reducers = {
            stages: GradientReducer(groups.ties[stages], name=f"the holders of tied parameters, stages {stages}")
            for stages in sorted(set(self._stages_by_name.values()))
        }
        """By stages, in the order in which they run."""

    def __contains__(self, name: str) -> bool:
        """Whether this stage shares the parameter with another one."""
        return name in self._stages_by_name

    def is_counted(self, name: str) -> bool:
        """Whether this stage is the one that counts the parameter (in a norm, in a checkpoint): its first stage."""
        return self._is_counted.get(name, True)

    def reduce(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Sum the gradients of the tied ones among this stage's parameters; leave the others alone.

        Raises:
            CommunicationError: A holder did not join within its group's limit, or its connection broke.
        """
        for stages, reducer in self.reducers.items():
            reducer.reduce({name: parameters[name] for name, tied in self._stages_by_name.items() if tied == stages})
