"""A step's gradients, from the end of its schedule to the optimizer.

Lightning calls ``zero_grad`` after ``training_step`` and before ``backward``. The schedule back-propagates inside
``training_step``; gradients that it left in ``parameter.grad`` would be zeroed. So they are taken out there, and put in
by the strategy's ``backward``.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from lightning_autopipe.runtime.gradient_reduction import GradientReducer
from lightning_autopipe.runtime.tied_parameters import TiedParameters


class GradientLedger:
    """The gradients of one rank's parameters.

    A step is ``set_aside``, the schedule, ``take_new``, and later ``commit``. Over replicas and ties gradients are
    summed once for each optimizer step: right after the schedule where nothing was accumulated before, so that a stage
    reduces while earlier stages still compute; else in the last commit, all that was accumulated at once.

    Args:
        parameters: This rank's own, by (first) name.
        replicas: Sums over the replicas of this stage; None where there is one.
        ties: Sums over the stages that share parameters; None where none are shared.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        *,
        replicas: GradientReducer | None,
        ties: TiedParameters | None,
    ) -> None:
        self._parameters = dict(parameters)
        self._replicas = replicas
        self._ties = ties
        self._kept: dict[str, Tensor | None] = {}
        self._new: dict[str, Tensor] = {}
        self._has_new = False
        self._is_new_reduced = False
        self._holds_unreduced = False

    def set_aside(self) -> None:
        """Takes accumulated gradients out of the schedule's way."""
        self._kept = {name: parameter.grad for name, parameter in self._parameters.items()}
        for parameter in self._parameters.values():
            parameter.grad = None

    def take_new(self, *, reduce: bool) -> None:
        """Takes what the schedule left, and puts back what was set aside.

        Args:
            reduce: Whether an optimizer step follows, not another batch to accumulate.

        Raises:
            CommunicationError: another rank did not join the reduction.
        """
        self._is_new_reduced = reduce and not self._holds_unreduced
        if self._is_new_reduced:
            self._reduce()
        self._new = {}
        for name, parameter in self._parameters.items():
            if parameter.grad is not None:
                self._new[name] = parameter.grad
            parameter.grad = self._kept.get(name)
        self._kept = {}
        self._has_new = True

    def commit(self, *, divisor: float, reduce: bool) -> None:
        """Adds the new gradients to ``parameter.grad``; a parameter without any keeps None.

        Args:
            divisor: What the gradients are divided by: the losses' weight in all, times the batches an optimizer step.
            reduce: Whether an optimizer step follows.

        Raises:
            CommunicationError: another rank did not join the reduction.
        """
        assert self._has_new, "Lightning called backward without a training_step before it"
        with torch.no_grad():
            for name, gradient in self._new.items():
                parameter = self._parameters[name]
                scaled = gradient.div_(divisor)
                if parameter.grad is None:
                    parameter.grad = scaled
                elif parameter.grad.layout is torch.strided:
                    parameter.grad.add_(scaled)
                else:
                    parameter.grad = parameter.grad + scaled
        self._new, self._has_new = {}, False
        if self._is_new_reduced:
            return
        self._holds_unreduced = True
        if reduce:
            self._reduce()
            self._holds_unreduced = False

    def _reduce(self) -> None:
        """Sums ``parameter.grad`` over all ranks that hold a parameter, in place."""
        ties = self._ties
        if ties is not None:
            ties.reduce(self._parameters)
        if self._replicas is not None:
            self._replicas.reduce(
                {name: parameter for name, parameter in self._parameters.items() if ties is None or name not in ties}
            )
