"""Fits in several real processes, and the same fit of the plain module in one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from lightning_autopipe.capture.absent import is_absent
from lightning_autopipe.strategy import AutoPipeStrategy
from tests.harness import run_processes
from tests.strategy.modules import numbers, quiet_trainer, seeded


@dataclass(frozen=True, kw_only=True)
class Fit:
    """One fit, given by what can be pickled."""

    module_class: type[pl.LightningModule]
    module_options: dict[str, Any] = field(default_factory=dict)
    data: Callable[..., pl.LightningDataModule]
    """Called with num_replicas."""
    strategy_options: dict[str, Any] = field(default_factory=dict)
    trainer_options: dict[str, Any] = field(default_factory=dict)
    callbacks: Sequence[Callable[[], pl.Callback]] = ()
    plugins: Sequence[Callable[[], Any]] = ()
    frozen: tuple[str, ...] = ()
    """Prefixes of parameters that are not trained."""
    logger: Callable[[], Any] | None = None
    ckpt_path: str | None = None
    after: Callable[[pl.Trainer, pl.LightningModule], Any] | None = None
    """What else to report after the fit."""


@dataclass(kw_only=True)
class Report:
    """What one rank has after a fit."""

    values: dict[str, Tensor]
    """Of the parameters that are here."""
    gradients: list[dict[str, Tensor]]
    """Before each optimizer step, of the parameters that had one here."""
    metrics: dict[str, float]
    num_reductions: int
    after: Any


def fit_plain(fit: Fit) -> Report:
    """The fit in this process, under Lightning's own strategy."""
    return _run(fit, "auto", num_processes=1, num_replicas=1)


def fit_here(fit: Fit, num_stages: int, num_replicas: int) -> Report:
    """The fit as one rank of several."""
    # Measuring makes plans that differ from run to run, and the proof runs each step twice more.
    defaults: dict[str, Any] = {"num_microbatches": 4, "timeout": 30, "profile": "flops", "verify": False}
    strategy = AutoPipeStrategy(
        num_stages=num_stages, num_replicas=num_replicas, **{**defaults, **fit.strategy_options}
    )
    return _run(fit, strategy, num_processes=num_stages * num_replicas, num_replicas=num_replicas)


def fit_all_here(fits: dict[str, Fit], num_stages: int, num_replicas: int) -> dict[str, Report]:
    """Several fits, one after the other: starting processes costs more than a fit."""
    return {name: fit_here(fit, num_stages, num_replicas) for name, fit in fits.items()}


def fit_in_processes(
    fits: dict[str, Fit], *, num_stages: int, num_replicas: int = 1, timeout_s: float = 100.0
) -> dict[str, list[Report]]:
    """For each fit the reports by global rank."""
    by_rank = run_processes(
        num_stages * num_replicas,
        fit_all_here,
        fits,
        num_stages,
        num_replicas,
        initialize_process_group=False,
        timeout_s=timeout_s,
    )
    return {name: [reports[name] for reports in by_rank] for name in fits}


def _run(fit: Fit, strategy: Any, *, num_processes: int, num_replicas: int) -> Report:
    module = seeded(fit.module_class, **fit.module_options)
    for name, parameter in module.named_parameters():
        if name.startswith(fit.frozen):
            parameter.requires_grad_(False)
    trainer = quiet_trainer(
        strategy,
        num_processes=num_processes,
        callbacks=[make() for make in fit.callbacks],
        plugins=[make() for make in fit.plugins],
        **{"logger": fit.logger() if fit.logger else False, **fit.trainer_options},
    )
    try:
        trainer.fit(module, datamodule=fit.data(num_replicas=num_replicas), ckpt_path=fit.ckpt_path)
    finally:
        torch.use_deterministic_algorithms(False)  # what Trainer(deterministic=) sets would hold for all later tests
    metrics = numbers(trainer.callback_metrics)
    num_reductions = 0
    if isinstance(strategy, AutoPipeStrategy):
        gradients = strategy.session.training.gradients
        assert gradients is not None
        replicas = gradients.ledger._replicas
        num_reductions = 0 if replicas is None else replicas.num_reductions
    owned = {name: p.detach().clone() for name, p in module.named_parameters() if not is_absent(p)}
    after = fit.after(trainer, module) if fit.after else None
    return Report(values=owned, gradients=module.gradients, metrics=metrics, num_reductions=num_reductions, after=after)


def assert_same_result(plain: Report, ranks: list[Report], *, tolerance: float = 1e-10) -> None:
    """Values, gradients and metrics of all ranks are those of the plain fit."""
    assert ranks[0].values.keys() == plain.values.keys(), "rank 0 must be whole after a fit"
    for global_rank, rank in enumerate(ranks):
        for name, value in rank.values.items():
            _assert_close(value, plain.values[name], tolerance, f"{name} on rank {global_rank}")
        assert rank.metrics == _approx(plain.metrics, 10 * tolerance), f"metrics of rank {global_rank}"
        assert len(rank.gradients) == len(plain.gradients)
    for step, expected in enumerate(plain.gradients):
        held = [name for rank in ranks for name in rank.gradients[step]]
        assert set(held) == set(expected), f"parameters with a gradient in step {step}"
        for global_rank, rank in enumerate(ranks):
            for name, gradient in rank.gradients[step].items():
                place = f"gradient of {name} in step {step} on rank {global_rank}"
                _assert_close(gradient, expected[name], tolerance, place)


def _approx(metrics: dict[str, float], tolerance: float) -> Any:
    import pytest

    return pytest.approx(metrics, rel=tolerance)


def _assert_close(value: Tensor, expected: Tensor, tolerance: float, place: str) -> None:
    difference = float((value - expected).abs().max()) if value.numel() else 0.0
    scale = max(float(expected.abs().max()) if expected.numel() else 0.0, 1e-8)
    assert difference <= tolerance * scale, f"{place}: {difference} of {scale}"
    assert torch.isfinite(value).all(), place
