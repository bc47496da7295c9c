"""A step's gradients, from its schedule to the optimizer.

Lightning calls ``zero_grad`` after ``training_step`` and before ``backward``. The schedule back-propagates inside
``training_step``; gradients that it left in ``parameter.grad`` would be zeroed. So they are taken out there, and put in
by the strategy's ``backward``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from lightning_autopipe.runtime.gradient_reduction import GradientReducer
from lightning_autopipe.runtime.tied_parameters import TiedParameters


class GradientLedger:
    """The gradients of one rank's parameters.

    A step is its `schedule`, and later `commit`. Over replicas and ties gradients are summed once for each optimizer
    step. Where nothing was accumulated before, that begins in the last backward of the schedule, so that a stage
    reduces while its backward goes on and while earlier stages still compute; the last commit waits for the sums. Else
    they are summed in the last commit, all that was accumulated at once.

    Args:
        parameters: This rank's own, by (first) name, in the order in which a forward uses them.
        replicas: Sums over the replicas of this stage; None where there is one.
        ties: Sums over the stages that share parameters; None where none are shared.
        complete: Names of parameters whose gradients are there before the last backward: of a rank's other stages.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        *,
        replicas: GradientReducer | None,
        ties: TiedParameters | None,
        complete: Collection[str] = (),
    ) -> None:
        self._parameters = dict(parameters)
        self._replicas = replicas
        self._ties = ties
        self._untied = {name: p for name, p in self._parameters.items() if ties is None or name not in ties}
        self._complete = [name for name in self._untied if name in complete]
        self._kept: dict[str, Tensor] = {}
        self._new: list[dict[str, Tensor]] = []
        self._is_new_reduced = False
        self._holds_unreduced = False

    @contextlib.contextmanager
    def schedule(self, *, reduce: bool) -> Iterator[Callable[[], None] | None]:
        """A context in which a schedule back-propagates; accumulated gradients are out of its way.

        Gives what the schedule is to call before the last backward on this rank, if anything.

        Args:
            reduce: Whether an optimizer step follows, not another batch to accumulate.

        Raises:
            CommunicationError: another rank did not join the reduction.
        """
        self._kept, self._new = self._take(), []
        self._is_new_reduced = reduce and not self._holds_unreduced
        replicas = self._replicas if self._is_new_reduced else None
        try:
            yield None if replicas is None else partial(replicas.arm, self._untied, complete=self._complete)
            if replicas is not None:
                replicas.start(self._untied)
        except BaseException:
            if replicas is not None:
                replicas.disarm()
            raise
        if self._is_new_reduced and self._ties is not None:
            self._ties.reduce(self._parameters)
        self.next_batch()
        for name, gradient in self._kept.items():
            self._parameters[name].grad = gradient
        self._kept = {}

    def next_batch(self) -> None:
        """Sets the gradients that are there apart from those that are still to come: they have their own divisor."""
        self._new.append(self._take())

    def add_oldest(self, divisor: float) -> None:
        """Adds the batch that was set apart first to what is accumulated, in the middle of a schedule."""
        _add(self._kept, self._new.pop(0), divisor)

    def _take(self) -> dict[str, Tensor]:
        taken = {name: parameter.grad for name, parameter in self._parameters.items() if parameter.grad is not None}
        for parameter in self._parameters.values():
            parameter.grad = None
        return taken

    def commit(self, *, divisors: Sequence[float], reduce: bool) -> None:
        """Adds the new gradients to ``parameter.grad``; a parameter without any keeps None.

        Args:
            divisors: What the gradients of each batch that was set apart are divided by: the losses' weight in all.
            reduce: Whether an optimizer step follows.

        Raises:
            CommunicationError: another rank did not join the reduction.
        """
        assert self._new, "Lightning called backward without a training_step before it"
        if self._is_new_reduced and self._replicas is not None:
            self._new[-1].update(self._replicas.finish())
        total = self._take()
        for gradients, divisor in zip(self._new, divisors, strict=True):
            _add(total, gradients, divisor)
        for name, gradient in total.items():
            self._parameters[name].grad = gradient
        self._new = []
        if self._is_new_reduced:
            return
        self._holds_unreduced = True
        if reduce:
            self._reduce()
            self._holds_unreduced = False

    def _reduce(self) -> None:
        """Sums ``parameter.grad`` over all ranks that hold a parameter, in place."""
        if self._ties is not None:
            self._ties.reduce(self._parameters)
        if self._replicas is not None:
            self._replicas.reduce(self._untied)


@torch.no_grad()
def _add(total: dict[str, Tensor], gradients: dict[str, Tensor], divisor: float) -> None:
    for name, gradient in gradients.items():
        scaled = gradient.div_(divisor)
        if name not in total:
            total[name] = scaled
        elif total[name].layout is torch.strided:
            total[name].add_(scaled)
        else:
            total[name] = total[name] + scaled
