"""Sums gradients over the processes that hold the same parameters."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping

import torch
import torch.distributed as dist
from torch import nn

from lightning_autopipe.runtime.errors import CommunicationError
from lightning_autopipe.runtime.gradient_buckets import Sums
from lightning_autopipe.runtime.step_reduction import StepReduction

BUCKET_BYTES = 4 * 2**20
"""Small, so that over slow links much of a sum is under way before the backward has ended."""


class GradientReducer:
    """Sums `parameter.grad` over a group, in flat buckets.

    The members agree on which gradients exist. One that no member has stays None (an optimizer decays the weight of a
    zero gradient but skips None); one that some member has is summed, with zeros from the others.

    A reduction is `arm`, the last backward, `start` and `finish`. From `arm` on, buckets are summed while the backward
    goes on, each as soon as it is full and those before it are on their way; all members have the same buckets in the
    same order: those of the gradients that the reduction before has found. Without `arm` all is summed after `start`,
    with the same result. `reduce` is `start` and `finish` at once.
    """

    def __init__(
        self, group: dist.ProcessGroup, *, name: str, bucket_bytes: int = BUCKET_BYTES, keeps_order: bool = False
    ) -> None:
        """Reduce over `group`, all members of which pass the same parameters in the same order.

        Args:
            group: The processes.
            name: For errors, such as "the replicas of stage 1".
            bucket_bytes: Gradients of one dtype are joined to messages of about this size.
            keeps_order: Whether backwards wait for the group's members, too (`StepReduction`).
        """
        self.num_reductions = 0
        """How often gradients were summed over more than one process."""
        self.num_collectives = 0
        """How many collectives that took."""
        self.num_early = 0
        """How many of them were under way before `start`."""
        self._group = group
        self._name = name
        self._bucket_bytes = bucket_bytes
        self._keeps_order = keeps_order
        self._expected: tuple[str, ...] = ()
        self._under_way: StepReduction | None = None

    def arm(self, parameters: Mapping[str, nn.Parameter], *, complete: Collection[str] = ()) -> None:
        """Sum buckets from now on as backward fills them; no gradient changes between that and `start`.

        Args:
            parameters: Those to be reduced, in the order in which a forward uses them.
            complete: Names of those whose gradients this backward is not expected to change.
        """
        if self._is_alone(parameters):
            return
        self.disarm()
        self._under_way = self._begin(parameters)
        self._under_way.watch(self._named_errors, complete=complete)

    def disarm(self) -> None:
        """Give up what was begun: stop watching a backward that has failed, or forget sums that nobody asked for."""
        if self._under_way is not None:
            self._under_way.unwatch()
            self._under_way = None

    def start(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Start what is not yet under way, when backwards have ended.

        Raises:
            CommunicationError: A connection broke.
        """
        if self._is_alone(parameters):
            return
        step = self._under_way = self._under_way or self._begin(parameters)
        step.unwatch()
        self.num_early += step.num_collectives
        with self._named_errors():
            step.start()

    def finish(self) -> Sums:
        """Wait for the sums of the started reduction, and give them by name.

        Raises:
            CommunicationError: A member did not join within the group's limit, or its connection broke.
        """
        step, self._under_way = self._under_way, None
        if step is None:
            return {}
        with self._named_errors():
            sums = step.finish()
        self._expected = step.expected_next
        self.num_reductions += 1
        self.num_collectives += step.num_collectives
        return sums

    def reduce(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Replace every parameter's gradient by the sum over the group.

        Raises:
            CommunicationError: A member did not join within the group's limit, or its connection broke.
        """
        self.start(parameters)
        for name, gradient in self.finish().items():
            parameters[name].grad = gradient

    def _is_alone(self, parameters: Mapping[str, nn.Parameter]) -> bool:
        return not parameters or dist.get_world_size(self._group) == 1

    def _begin(self, parameters: Mapping[str, nn.Parameter]) -> StepReduction:
        return StepReduction(
            parameters,
            group=self._group,
            expected=self._expected,
            bucket_bytes=self._bucket_bytes,
            keeps_order=self._keeps_order,
        )

    @contextlib.contextmanager
    def _named_errors(self) -> Iterator[None]:
        try:
            yield
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise CommunicationError(
                f"global rank {dist.get_rank()}: the sum of gradients over {self._name} "
                f"(global ranks {dist.get_process_group_ranks(self._group)}) failed: {error}"
            ) from error
