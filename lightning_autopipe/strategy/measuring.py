"""Measured times in the place of counted operations, before a plan is made."""

from __future__ import annotations

import contextlib
import gc
import logging
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.optim import Optimizer

from lightning_autopipe.cluster.sysfs import cpu_model
from lightning_autopipe.core.profile import ModelProfile
from lightning_autopipe.profiling import (
    DEFAULT_BUDGET_S,
    LayerFindings,
    ProfilingError,
    align_layers,
    join_findings,
    measure_share,
    on_device,
)
from lightning_autopipe.profiling.assembly import assembled_profile
from lightning_autopipe.profiling.cache import ProfileCache, cache_folder
from lightning_autopipe.profiling.sizes import affordable_splits, other_splits
from lightning_autopipe.profiling.step_key import (
    compute_dtype,
    leaf_shapes,
    optimizer_key,
    precision_key,
    step_digest,
)
from lightning_autopipe.runtime.batch import microbatch_sizes
from lightning_autopipe.runtime.pipeline import MicrobatchCapture, Pipeline
from lightning_autopipe.strategy.communicator import Communicator

OTHER_SIZES_FACTOR = 2.0
"""How much longer than the size in use all other sizes together may be measured."""

_OTHER_SIZE_BUDGET_S = DEFAULT_BUDGET_S / 4

_log = logging.getLogger(__name__)

T = TypeVar("T")


def measured_profile(
    pipeline: Pipeline,
    profile: ModelProfile,
    communicator: Communicator,
    *,
    step_name: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    num_microbatches: int,
    may_fail: bool,
    sizes: Sequence[int] | None = (),
    optimizers: Sequence[Optimizer] = (),
) -> ModelProfile:
    """The profile with seconds and bytes of each layer, for micro-batches of several sizes. Collective over all ranks.

    The ranks of each device model share the layers between them, and measure at the same time, as they will train
    (docs/decisions/0009). What was measured before, for the same step on the same devices, is read from disk if global
    rank 0 finds it there (docs/decisions/0016).

    Args:
        pipeline: Of the whole module, which has profiled the step.
        profile: What it gave.
        communicator: This rank's groups.
        step_name: The step.
        args: One whole batch and what else the step takes.
        kwargs: Keyword arguments alike.
        num_microbatches: Into which the batch is split.
        may_fail: Whether to warn and give the profile as it is where the layers cannot be measured.
        sizes: Samples of other micro-batches to measure besides; None: chosen from the batch. One that cannot be run,
            or would take too long, is left out.
        optimizers: Those of a fit, whose steps are measured on copies.

    Raises:
        ProfilingError: the layers cannot be measured, and that is not allowed; on every rank alike.
    """
    measuring = _Measuring(pipeline, profile, communicator, step_name, args, kwargs, num_microbatches, optimizers)
    try:
        return measuring.run(sizes)
    except ProfilingError as error:
        if not may_fail:
            raise
        if communicator.global_rank == 0:
            warnings.warn(
                f"{str(error).rstrip('.')}. Stages are balanced by counted floating-point operations instead; set "
                "profile='flops' to do so without trying",
                stacklevel=2,
            )
        return profile


@dataclass(frozen=True, slots=True, kw_only=True)
class _Member:
    """What a rank tells of itself before anything is measured."""

    global_rank: int
    device_model: str
    num_threads: int


class _Measuring:
    """One planning's measurements on this rank."""

    def __init__(
        self,
        pipeline: Pipeline,
        profile: ModelProfile,
        communicator: Communicator,
        step_name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        num_microbatches: int,
        optimizers: Sequence[Optimizer],
    ) -> None:
        self._pipeline = pipeline
        self._profile = profile
        self._communicator = communicator
        self._step_name = step_name
        self._args = args
        self._kwargs = kwargs
        self._num_microbatches = num_microbatches
        self._optimizers = optimizers
        self._members: list[_Member] = []
        self._own_model = ""

    def run(self, sizes: Sequence[int] | None) -> ModelProfile:
        """The profile, from disk or measured."""
        key: dict[str, Any] = {}
        splits: dict[int, int] = {}
        captures: list[MicrobatchCapture] = []
        size_in_use = 1

        def begin() -> _Member:
            nonlocal splits, size_in_use
            captures.append(self._capture(self._num_microbatches))
            batch_size, least = self._batch_size(), self._pipeline.min_samples
            size_in_use = microbatch_sizes(batch_size, self._num_microbatches, min_samples=least)[0]
            splits = other_splits(batch_size, self._num_microbatches, min_samples=least, sizes=sizes)
            key.update(self._key(captures[0], [size_in_use, *splits]))
            self._own_model = device_model(self._pipeline.device)
            return _Member(
                global_rank=self._communicator.global_rank,
                device_model=self._own_model,
                num_threads=torch.get_num_threads(),
            )

        self._members = self._together(begin)
        key["devices"] = sorted(Counter(f"{m.device_model}, {m.num_threads} threads" for m in self._members).items())
        cache = ProfileCache(cache_folder())
        is_first = self._communicator.global_rank == 0
        # One rank decides: ranks that find other files would wait for one another.
        kept = self._together(lambda: cache.load(key, self._profile) if is_first else None)
        known = next((found for found in kept if found is not None), None)
        if known is not None:
            return known
        with contextlib.ExitStack() as stack:

            def first() -> LayerFindings:
                stack.enter_context(self._pipeline.silent())
                stack.enter_context(on_device(self._pipeline.module, self._pipeline.device))
                return self._measure(captures[0], DEFAULT_BUDGET_S, self._optimizers)

            findings: dict[int, Mapping[str, LayerFindings]] = {size_in_use: self._shared(first)}
            least_s = max(found.least_s for found in findings[size_in_use].values())
            budget_s = OTHER_SIZES_FACTOR * max(DEFAULT_BUDGET_S, least_s)
            chosen, left_out = affordable_splits(splits, least_s=least_s, size_in_use=size_in_use, budget_s=budget_s)
            for size in left_out:
                _log.info("micro-batches of %d samples are not measured: that would take too long", size)
            for size, number in chosen.items():
                found = self._measure_other(size, number)
                if found is not None:
                    findings[size] = found
        measured = assembled_profile(
            self._profile,
            findings,
            size_in_use=size_in_use,
            reference_model=next(m.device_model for m in self._members if m.global_rank == 0),
            dtype=str(compute_dtype(self._pipeline.module, self._pipeline.device)).removeprefix("torch."),
        )
        if is_first:
            cache.save(key, measured)
        return measured

    def _measure_other(self, size: int, number: int) -> Mapping[str, LayerFindings] | None:
        """What is found at another size; None, on every rank alike, where it cannot be run."""
        try:
            return self._shared(lambda: self._measure(self._capture(number), _OTHER_SIZE_BUDGET_S, ()))
        except ProfilingError as error:
            _log.info("micro-batches of %d samples are left out of the profile: %s", size, error)
            if self._pipeline.device.type == "cuda":
                gc.collect()
                torch.cuda.empty_cache()
            return None

    def _capture(self, num_microbatches: int) -> MicrobatchCapture:
        with self._pipeline.silent():
            capture = self._pipeline.capture_microbatch(self._step_name, self._args, self._kwargs, num_microbatches)
            capture.trace.layers = align_layers(capture.trace, capture.table, capture.layer_keys)
        return capture

    def _batch_size(self) -> int:
        return self._pipeline.batch_size(self._step_name, self._args, self._kwargs)

    def _measure(self, capture: MicrobatchCapture, budget_s: float, optimizers: Sequence[Optimizer]) -> LayerFindings:
        module = self._pipeline.module
        members = [m.global_rank for m in self._members if m.device_model == self._own_model]
        return measure_share(
            capture.trace,
            capture.table,
            module,
            getattr(module, self._step_name),
            capture.args,
            capture.kwargs,
            device=self._pipeline.device,
            budget_s=budget_s,
            optimizers=optimizers,
            member_index=members.index(self._communicator.global_rank),
            num_members=len(members),
        )

    def _shared(self, work: Callable[[], LayerFindings]) -> dict[str, LayerFindings]:
        """What the ranks of each device model find together."""
        told = self._together(work)
        by_model: dict[str, list[LayerFindings]] = {}
        for member, findings in zip(self._members, told, strict=True):
            by_model.setdefault(member.device_model, []).append(findings)
        return {model: join_findings(findings) for model, findings in by_model.items()}

    def _together(self, work: Callable[[], T]) -> list[T]:
        """What every rank's work gives, on all of them.

        Raises:
            ProfilingError: that of one fails; on every rank, so that none waits for one that has given up.
        """
        own: T | None = None
        cause: Exception | None = None
        problem = ""
        try:
            own = work()
        except Exception as error:
            cause, problem = error, f"{type(error).__name__}: {error}"
        told = self._communicator.gather_over_replicas(self._communicator.gather_in_pipeline((problem, own)))
        of_ranks = [of_rank for of_pipeline in told for of_rank in of_pipeline]
        problems = [problem for problem, _ in of_ranks if problem]
        if problems:
            raise ProfilingError(f"the layers of the step cannot be measured one by one: {problems[0]}") from cause
        return [found for _, found in of_ranks]

    def _key(self, capture: MicrobatchCapture, sizes: Sequence[int]) -> dict[str, Any]:
        pipeline = self._pipeline
        return {
            "module": pipeline.module_fingerprint,
            "step": self._step_name,
            "operations": step_digest(capture.trace, pipeline.module, [str(key) for key in capture.layer_keys]),
            "batch": leaf_shapes((self._args, self._kwargs)),
            "microbatch_sizes": list(sizes),
            "precision": precision_key(pipeline.device),
            "optimizers": optimizer_key(self._optimizers),
            "torch": torch.__version__,
        }


def device_model(device: torch.device) -> str:
    """The name of a device's model, as clusters and profiles have it."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_model(Path("/proc"))
