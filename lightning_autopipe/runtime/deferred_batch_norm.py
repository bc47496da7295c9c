"""The running statistics of batch normalization, in training steps that run as micro-batches."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_autopipe.capture.compiled_calls import REPLACES
from lightning_autopipe.capture.interception import current
from lightning_autopipe.runtime.batch_norm_moments import Moments, combined, merged, moments_of

_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


class BatchNormStatistics:
    """Looks after running statistics while a step runs as micro-batches.

    A layer that runs again in a backward (recomputation) leaves them alone. Deferred, they change once per step, as by
    the whole batch over all micro-batches and replicas; each micro-batch is still normalized by itself. The layers run
    as ever; what their micro-batches wrote is replaced when the step ends.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        deferred: bool = False,
        over_replicas: Callable[[Moments, Mapping[str, Tensor]], list[Moments]] | None = None,
    ) -> None:
        """Look after a module.

        Args:
            module: The module.
            deferred: Whether to take the statistics of whole batches.
            over_replicas: Gives the moments of all replicas of this stage; takes this one's and, for each layer of the
                stage, its running mean. None where there is one replica.
        """
        self._module = module
        self._deferred = deferred
        self._over_replicas = over_replicas
        self._forwards: dict[str, tuple[_BatchNorm, Any, Callable[..., Any]]] = {}
        self._owners: Mapping[str, frozenset[int]] = {}
        self._is_silent: Callable[[], bool] = bool
        self._place: tuple[int, int] | None = None
        self._num_calls: dict[str, int] = {}
        self._num_batches: dict[str, int] = {}
        self._seen: dict[str, dict[tuple[int, int], Any]] = {}

    def begin_microbatch(self, stage_index: int, microbatch_index: int) -> None:
        """Say whose forward runs from now on."""
        self._place = stage_index, microbatch_index
        self._num_calls.clear()

    @contextlib.contextmanager
    def training_step(
        self, owners: Mapping[str, frozenset[int]], stages: Collection[int], is_silent: Callable[[], bool]
    ) -> Iterator[None]:
        """Run the forwards and backwards of one step in this context; its end is collective over replicas.

        Args:
            owners: For each buffer that the step writes the stages that do.
            stages: Those that run in this process.
            is_silent: Whether a trace runs.

        Raises:
            CommunicationError: another replica did not join.
        """
        layers = _tracking_layers(self._module)
        self._owners, self._is_silent = owners, is_silent
        self._seen.clear()
        own = {path: layer for path, layer in layers.items() if not self._owning_stages(path).isdisjoint(stages)}
        before = {path: _copies(layer) for path, layer in own.items()} if self._deferred else {}
        cumulative = {path: layer for path, layer in own.items() if _is_cumulative(layer) and not self._deferred}
        self._num_batches = {path: int(_counter(layer)) for path, layer in cumulative.items()}
        with self._own_forwards(layers):
            yield
        if own and self._deferred:
            self._take_whole_batch(own, before)
        for path, layer in cumulative.items():
            _counter(layer).fill_(self._num_batches[path] + len(self._seen.get(path, ())))

    def _owning_stages(self, path: str) -> frozenset[int]:
        # More than one where a cut lies between the counter's increment and the normalization.
        owners = (self._owners.get(f"{path}.{name}".lstrip("."), frozenset[int]()) for name in _STATISTICS)
        return frozenset[int]().union(*owners)

    # Forwards -----------------------------------------------------------------

    @contextlib.contextmanager
    def _own_forwards(self, layers: Mapping[str, _BatchNorm]) -> Iterator[None]:
        before: list[tuple[dict[str, Any], Any]] = []
        try:
            for path, layer in layers.items():
                attributes = layer.__dict__
                own = attributes.get("forward")
                known = self._forwards.get(path)
                if known is None or known[0] is not layer or known[1] is not own:
                    # One function for all steps: stages hold on to the forwards of modules that they watch.
                    known = self._forwards[path] = layer, own, self._make_forward(path, layer)
                before.append((attributes, own))
                attributes["forward"] = known[2]
            yield
        finally:
            self._place = None
            for attributes, forward in before:
                if forward is None:
                    del attributes["forward"]
                else:
                    attributes["forward"] = forward

    def _make_forward(self, path: str, layer: _BatchNorm) -> Callable[..., Any]:
        original = layer.forward

        def forward(input: Tensor, *args: Any, **kwargs: Any) -> Any:
            if torch._C._current_graph_task_id() != -1:  # a backward is running
                return _without_effect(layer, original, input, *args, **kwargs)
            is_cumulative = _is_cumulative(layer)
            is_seen = layer.training and self._place is not None and not self._is_silent()
            if not is_seen or not (self._deferred or is_cumulative):
                return original(input, *args, **kwargs)
            # Before the layer runs, and not after: a stage may end within it.
            mode = current()
            number = self._see(path, input) if mode is None else mode.unwatched(self._see, (path, input), {})
            if not is_cumulative:
                return original(input, *args, **kwargs)
            # The counter may be another stage's.
            with _with_momentum(layer, 1.0 / (self._num_batches.get(path, 0) + number)):
                return original(input, *args, **kwargs)

        setattr(forward, REPLACES, layer.__dict__.get("forward"))
        return forward

    def reasons_against_compilation(self) -> dict[nn.Module, str]:
        """Give the layers whose forwards have to be replaced, or wait for other replicas: no graph has that. Why."""
        reasons: dict[nn.Module, str] = {}
        for layer in _tracking_layers(self._module).values():
            if self._deferred:
                reasons[layer] = "deferred_batch_norm=True takes the moments of what its layers are given"
            elif _is_cumulative(layer):
                reasons[layer] = (
                    "its batch normalization with momentum=None takes the mean over batches, not micro-batches"
                )
        for sub in self._module.modules():
            if isinstance(sub, nn.SyncBatchNorm):
                reasons[sub] = "its SyncBatchNorm exchanges moments with the other replicas"
        return reasons

    def _see(self, path: str, input: Tensor) -> int:
        """Note a call of a layer; give the how manieth it is in this step."""
        assert self._place is not None
        stage_index, microbatch_index = self._place
        if stage_index not in self._owning_stages(path):
            return 1
        call_index = self._num_calls.get(path, 0)
        self._num_calls[path] = call_index + 1
        # Where one stage ends and the next begins within the layer, both come here, with the same input.
        seen = self._seen.setdefault(path, {})
        key = call_index, microbatch_index
        if key not in seen:
            seen[key] = moments_of(input) if self._deferred else None
        return list(seen).index(key) + 1

    # The step's end -----------------------------------------------------------

    @torch.no_grad()
    def _take_whole_batch(self, layers: Mapping[str, _BatchNorm], before: Mapping[str, list[Tensor | None]]) -> None:
        moments: Moments = {}
        for path, seen in self._seen.items():
            by_call: dict[int, list[Tensor]] = {}
            for (call_index, _), part in sorted(seen.items(), key=lambda item: item[0]):
                by_call.setdefault(call_index, []).append(part)
            moments[path] = [combined(parts) for parts in by_call.values()]
        if self._over_replicas is not None:
            means = {path: copies[0] for path, copies in before.items() if copies[0] is not None}
            moments = merged(self._over_replicas(moments, means))
        for path, calls in moments.items():
            _update(layers[path], before[path], calls)


@contextlib.contextmanager
def without_cumulative_momentum(module: nn.Module) -> Iterator[None]:
    """Within, no batch normalization reads its counter (`momentum=None`), whose value a trace does not know."""
    with contextlib.ExitStack() as stack:
        for layer in _tracking_layers(module).values():
            if _is_cumulative(layer):
                stack.enter_context(_with_momentum(layer, 1.0))
        yield


@contextlib.contextmanager
def _with_momentum(layer: _BatchNorm, momentum: float) -> Iterator[None]:
    before, layer.momentum = layer.momentum, momentum
    try:
        yield
    finally:
        layer.momentum = before


def _is_cumulative(layer: _BatchNorm) -> bool:
    return layer.momentum is None and layer.num_batches_tracked is not None


def _counter(layer: _BatchNorm) -> Tensor:
    assert layer.num_batches_tracked is not None
    return layer.num_batches_tracked


def _tracking_layers(module: nn.Module) -> dict[str, _BatchNorm]:
    return {
        path: layer
        for path, layer in module.named_modules()
        if isinstance(layer, _BatchNorm) and layer.track_running_stats and layer.running_mean is not None
    }


def _copies(layer: _BatchNorm) -> list[Tensor | None]:
    return [None if (buffer := getattr(layer, name)) is None else buffer.detach().clone() for name in _STATISTICS]


def _without_effect(layer: _BatchNorm, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a forward and put the running statistics back."""
    before = _copies(layer)
    try:
        return forward(*args, **kwargs)
    finally:  # recomputation leaves by an exception as soon as it has all that it needs
        for name, copy in zip(_STATISTICS, before, strict=True):
            if copy is not None:
                # Through `data`: autograd has saved the buffer, and would take this for a change that matters to it.
                getattr(layer, name).data.copy_(copy)


def _update(layer: _BatchNorm, before: list[Tensor | None], calls: list[Tensor]) -> None:
    """Update the running statistics once for each call, from what they were before the step."""
    mean, variance, num_batches = before
    assert mean is not None
    assert variance is not None
    for total, batch_mean, squares in calls:
        num_batches = None if num_batches is None else num_batches + 1
        share: Any = layer.momentum
        if share is None:
            share = 0.0 if num_batches is None else 1.0 / num_batches.double()
        mean = (1 - share) * mean.double() + share * batch_mean
        variance = (1 - share) * variance.double() + share * squares / (total - 1)
    for name, value in zip(_STATISTICS, (mean, variance, num_batches), strict=True):
        if value is not None:
            getattr(layer, name).copy_(value)
