"""What batches weigh over all replicas, found out while a pipeline runs, without waiting for it."""

from __future__ import annotations

from collections import deque

import torch
import torch.distributed as dist

from lightning_autopipe.runtime.errors import CommunicationError
from lightning_autopipe.runtime.stage_step import StepOutcome
from lightning_autopipe.strategy.communicator import Communicator
from lightning_autopipe.strategy.gradients import GradientLedger


class BatchWeight:
    """The weight of one batch's losses over all replicas. Collective over all ranks.

    Args:
        own: Of this replica on its last stage; 0 elsewhere.
        communicator: This rank's groups.
    """

    def __init__(self, own: float, communicator: Communicator) -> None:
        self._total = torch.tensor([own], dtype=torch.float64)
        self._group = communicator.world_group
        self._work: dist.Work | None = None
        if self._group is not None:
            self._work = dist.all_reduce(self._total, group=self._group, async_op=True)

    @property
    def is_known(self) -> bool:
        """Whether all ranks have told their part."""
        return self._work is None or self._work.is_completed()

    def total(self) -> float:
        """The sum; waits for it.

        Raises:
            CommunicationError: another rank did not join.
        """
        if self._work is not None:
            try:
                self._work.wait()
            except RuntimeError as error:
                raise CommunicationError(
                    f"the weight of a batch could not be summed over all ranks: {error}"
                ) from error
        return float(self._total.item())


class WaitingBatches:
    """Batches of a window whose gradients are set apart until their weight is known.

    Args:
        ledger: Of the gradients.
        communicator: This rank's groups.
    """

    def __init__(self, ledger: GradientLedger, communicator: Communicator) -> None:
        self._ledger = ledger
        self._communicator = communicator
        self._waiting: deque[tuple[StepOutcome, BatchWeight]] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def set_apart(self, outcome: StepOutcome) -> None:
        """Takes the gradients of a batch that has ended; adds those of batches whose weight is known by now."""
        self._ledger.next_batch()
        own = float(sum(outcome.weights)) if self._communicator.is_last_stage else 0.0
        self._waiting.append((outcome, BatchWeight(own, self._communicator)))
        while self._waiting and self._waiting[0][1].is_known:
            known, weight = self._waiting.popleft()
            self._ledger.add_oldest(known.gradient_divisor(weight.total()))
