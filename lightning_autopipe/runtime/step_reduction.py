"""One reduction of gradients, while a backward fills them and after it."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_autopipe.runtime.gradient_buckets import BucketSum, Sums, all_reduce, plan_buckets

_NO_GRADIENT, _DENSE, _SPARSE = 0, 1, 2
_MAX_BUCKETS_UNDER_WAY = 6
"""Bounds the memory of vectors that are being summed."""


class StepReduction:
    """Sums the gradients of some parameters over a group.

    The *expected* gradients are summed in buckets that are planned beforehand, in the reverse of the parameters' order,
    which is about the order in which a backward gives them. A missing one counts as zeros; what the members agree on at
    the end decides whether it stays None. Gradients that were not expected, and sparse ones, are summed after that.

    A gradient that a backward adds to after its bucket has left (a reentrant checkpoint may) is kept apart and summed
    at the end; it is not expected the next time.

    Args:
        parameters: In the order of their use; equal on all members.
        group: The processes.
        expected: Names of those that had a dense gradient in the last reduction; equal on all members.
        bucket_bytes: Of a bucket.
        keeps_order: Whether each sum begins at the same place of the backward on all members, if need be behind one
            that is waited for: where the backward itself waits for the members.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        *,
        group: dist.ProcessGroup,
        expected: Iterable[str],
        bucket_bytes: int,
        keeps_order: bool = False,
    ) -> None:
        self.num_collectives = 0
        self.expected_next: tuple[str, ...] = ()
        """What the members have agreed on, for the next reduction."""
        self._parameters = dict(parameters)
        self._group = group
        self._bucket_bytes = bucket_bytes
        self._keeps_order = keeps_order
        known = frozenset(expected)
        self._buckets = self._plan(name for name in self._parameters if name in known)
        self._bucket_of = {name: index for index, bucket in enumerate(self._buckets) for name in bucket}
        self._num_missing = [len(bucket) for bucket in self._buckets]
        self._num_launched = 0
        self._under_way: deque[BucketSum] = deque()
        self._num_times_seen: Counter[str] = Counter()
        self._late: dict[str, Tensor] = {}
        self._hooks: list[RemovableHandle] = []
        self._gradients: dict[str, Tensor | None] = {}  # from `start` on
        self._sums: Sums = {}
        self._kinds = torch.empty(0)
        self._agreement: dist.Work | None = None

    # While a backward runs -------------------------------------------------------

    def watch(
        self, named_errors: Callable[[], AbstractContextManager[None]], *, complete: Collection[str] = ()
    ) -> None:
        """Sum each bucket as soon as a backward has filled it and those before it.

        Args:
            named_errors: A context that gives errors of communication their name.
            complete: Names of gradients that the backward is not expected to change.
        """

        def before(name: str, gradient: Tensor) -> Tensor | None:
            with named_errors():
                return self._keep_if_late(name, gradient)

        def after(name: str, _: Tensor) -> None:
            with named_errors():
                self._note(name)

        for name, parameter in self._parameters.items():
            if parameter.requires_grad:
                self._hooks.append(parameter.register_hook(partial(before, name)))  # type: ignore[no-untyped-call]
                handle = parameter.register_post_accumulate_grad_hook(partial(after, name))  # type: ignore[no-untyped-call]
                self._hooks.append(handle)
        with named_errors():
            for name in complete:
                self._note(name)

    def unwatch(self) -> None:
        """Leave backwards alone from now on."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _note(self, name: str) -> None:
        self._num_times_seen[name] += 1
        if self._num_times_seen[name] > 1 or name not in self._bucket_of:
            return
        self._num_missing[self._bucket_of[name]] -= 1
        while self._num_launched < len(self._buckets) and not self._num_missing[self._num_launched]:
            if len(self._under_way) >= _MAX_BUCKETS_UNDER_WAY:
                if not self._keeps_order and not self._under_way[0].is_completed:
                    return  # a backward does not wait: the next gradient, or the end, goes on
                self._finish_oldest()
            self._launch(self._buckets[self._num_launched])
            self._num_launched += 1

    def _keep_if_late(self, name: str, gradient: Tensor) -> Tensor | None:
        if self._bucket_of.get(name, self._num_launched) >= self._num_launched:
            return None
        while self._under_way:  # nothing may be added to what is being summed, not even zeros
            self._finish_oldest()
        known = self._late.get(name)
        self._late[name] = gradient.detach().clone() if known is None else known + gradient.detach()
        return torch.zeros_like(gradient)

    # At the end ------------------------------------------------------------------

    def start(self) -> None:
        """Start the sums of all buckets that are left, and the agreement on which gradients exist.

        From here on nobody else may change the gradients; the parameters may be given others.
        """
        self._gradients = {name: parameter.grad for name, parameter in self._parameters.items()}
        self._launch_all(self._buckets[self._num_launched :])
        self._num_launched = len(self._buckets)
        rows = [
            [_kind(gradient) for gradient in self._gradients.values()],
            [self._num_times_seen[name] > 1 for name in self._parameters],
            [name in self._late for name in self._parameters],
        ]
        first = next(iter(self._parameters.values()))
        self._kinds = torch.tensor(rows, dtype=torch.uint8).to(first.device)
        self._agreement = self._all_reduce(self._kinds, dist.ReduceOp.MAX)

    def finish(self) -> Sums:
        """Wait for everything; give the sums of the gradients that some member has."""
        assert self._agreement is not None, "start comes first"
        while self._under_way:
            self._finish_oldest()
        self._agreement.wait()
        kinds, repeated, late = (dict(zip(self._parameters, row, strict=True)) for row in self._kinds.tolist())
        unexpected = [name for name in self._parameters if name not in self._bucket_of]
        self._launch_all(self._plan(name for name in unexpected if kinds[name] == _DENSE))
        while self._under_way:
            self._finish_oldest()
        for name in unexpected:
            if kinds[name] == _SPARSE:
                self._sums[name] = self._sum_of_sparse(name)
        for name in (name for name in self._parameters if late[name]):
            self._add_late(name)
        self.expected_next = tuple(name for name in self._parameters if kinds[name] == _DENSE and not repeated[name])
        return {
            name: gradient if kinds[name] == _DENSE or gradient.is_sparse else gradient.to_sparse(1).coalesce()
            for name, gradient in self._sums.items()
            if kinds[name] != _NO_GRADIENT
        }

    def _sum_of_sparse(self, name: str) -> Tensor:
        gradient = self._gradient(name)
        gradient = gradient.to_sparse(1).coalesce() if gradient.layout is torch.strided else gradient.coalesce()
        self._all_reduce(gradient, dist.ReduceOp.SUM).wait()
        return gradient

    def _add_late(self, name: str) -> None:
        total = self._sums[name]
        late = self._late.get(name, torch.zeros_like(total)).to_dense().contiguous()
        self._all_reduce(late, dist.ReduceOp.SUM).wait()
        self._sums[name] = total + late

    # Collectives -----------------------------------------------------------------

    def _plan(self, names: Iterable[str]) -> list[tuple[str, ...]]:
        parameters = {name: self._parameters[name] for name in names}
        return plan_buckets(dict(reversed(parameters.items())), self._bucket_bytes)

    def _launch_all(self, buckets: Sequence[tuple[str, ...]]) -> None:
        for bucket in buckets:
            if len(self._under_way) >= _MAX_BUCKETS_UNDER_WAY:
                self._finish_oldest()
            self._launch(bucket)

    def _launch(self, bucket: tuple[str, ...]) -> None:
        self.num_collectives += 1
        gradients = {name: self._gradient(name) for name in bucket}
        self._under_way.append(
            BucketSum({name: g if _kind(g) == _DENSE else g.to_dense() for name, g in gradients.items()}, self._group)
        )

    def _finish_oldest(self) -> None:
        self._sums.update(self._under_way.popleft().finish())

    def _gradient(self, name: str) -> Tensor:
        """A gradient as it is, zeros where there is none."""
        parameter = self._parameters[name]
        gradient = self._gradients.get(name, parameter.grad)
        return torch.zeros_like(parameter, requires_grad=False) if gradient is None else gradient.detach()

    def _all_reduce(self, tensor: Tensor, operation: dist.ReduceOp.RedOpType) -> dist.Work:
        self.num_collectives += 1
        return all_reduce(tensor, operation, self._group)


def _kind(gradient: Tensor | None) -> int:
    if gradient is None:
        return _NO_GRADIENT
    return _DENSE if gradient.layout is torch.strided else _SPARSE
