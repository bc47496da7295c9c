"""Measures a recipe's training step in one process, to plan from it; importing this file imports torch."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lightning_autopipe.core.errors import ConfigurationError
from lightning_autopipe.core.profile import ModelProfile
from lightning_autopipe.planner.sizes import MICROBATCHES_PER_STAGE
from lightning_autopipe.profiling import optimizer_state_ratio
from lightning_autopipe.profiling.sizes import half_size
from lightning_autopipe.strategy import AutoPipeStrategy
from lightning_autopipe.strategy.measuring import measured_profile
from lightning_autopipe.strategy.training_steps import TRAINING_STEP

_DECIDED_HERE = (
    "num_stages",
    "num_replicas",
    "num_microbatches",
    "schedule",
    "partition",
    "profile",
    "plan",
    "cluster",
    "verify",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredStep:
    """A training step on one replica's batch, as measured on this machine."""

    profile: ModelProfile
    batch_size: int
    min_samples: int
    """The fewest samples that a micro-batch may have."""
    optimizer_state_ratio: float
    """Bytes of optimizer state for each byte of trainable parameters."""
    cuts: tuple[int, ...] | None
    """After the modules that the recipe's ``strategy.cut_after`` names."""
    is_over_batch: bool
    """Whether the loss is taken once over a replica's whole batch."""


def measure_recipe(
    name: str, overrides: Sequence[str], *, num_stages: int, num_microbatches: int | None, with_halves: bool
) -> MeasuredStep:
    """Reads a recipe's first batch, traces its training step on it and measures the layers; nothing is trained.

    Args:
        name: of the recipe.
        overrides: of the recipes' config, as ``python -m recipes.train`` takes them.
        num_stages: that may be planned; decides around which size of micro-batch others are measured.
        num_microbatches: whose size is to be measured and no other; None: several sizes are.
        with_halves: whether half of that size is measured, too.

    Raises:
        ConfigurationError: there are no recipes here, or the config is wrong.
        AutoPipeError: the step cannot be traced, split or measured.
    """
    cfg = _composed(_config_folder(), name, overrides)
    strategy = _MeasuringStrategy(num_stages, num_microbatches, with_halves, **_strategy_options(cfg))
    try:
        pl.seed_everything(cfg.seed, workers=True, verbose=False)
        data = instantiate(cfg.data, _convert_="all")
        module = instantiate(cfg.model, _convert_="all")
        with _quiet_lightning():
            trainer = instantiate(
                cfg.trainer,
                strategy=strategy,
                devices=1,
                num_nodes=1,
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                num_sanity_val_steps=0,
                _convert_="all",
            )
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigurationError(f"recipe {name!r}: {error}") from error
    try:
        with _quiet_lightning():
            trainer.fit(module, datamodule=data)
    except _MeasuredError as end:
        return end.step
    raise ConfigurationError(f"recipe {name!r} has nothing to train on: set its data, and limit_train_batches above 0")


class _MeasuredError(Exception):
    """Ends the run before anything is trained."""

    def __init__(self, step: MeasuredStep) -> None:
        super().__init__("the step is measured")
        self.step = step


class _MeasuringStrategy(AutoPipeStrategy):
    """Measures the first training step in place of running it."""

    def __init__(self, num_stages: int, microbatches: int | None, with_halves: bool, **options: Any) -> None:
        super().__init__(**options)
        self._stages_to_plan, self._microbatches, self._with_halves = num_stages, microbatches, with_halves

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.train_step_context(), self.session.running_step.planning(TRAINING_STEP):
            raise _MeasuredError(self._measured(args, kwargs))

    def _measured(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> MeasuredStep:
        pipeline, options = self.session.pipeline, self.options
        pipeline.store.is_cut = True  # traced as a step of several stages is
        profile = pipeline.profile(TRAINING_STEP, args, kwargs, cut_after=options.cut_after or ())
        batch_size = pipeline.splitter.batch_size(TRAINING_STEP, args, kwargs)
        stages = min(self._stages_to_plan, profile.num_layers)
        number = self._microbatches or MICROBATCHES_PER_STAGE * stages
        number = min(number, max(1, batch_size // pipeline.splitter.min_samples))
        pipeline.splitter.split_into(TRAINING_STEP, args, kwargs, number)
        halves = half_size(batch_size, number) if self._with_halves else []
        optimizers = [whole.optimizer for whole in self.session.placed_module.optimizers]
        measured = measured_profile(
            pipeline,
            profile,
            self.communicator,
            step_name=TRAINING_STEP,
            args=args,
            kwargs=kwargs,
            num_microbatches=number,
            may_fail=False,
            sizes=None if self._microbatches is None else halves,
            optimizers=optimizers,
        )
        return MeasuredStep(
            profile=replace(measured, module_fingerprint=pipeline.module_fingerprint),
            batch_size=batch_size,
            min_samples=pipeline.splitter.min_samples,
            optimizer_state_ratio=optimizer_state_ratio(optimizers),
            cuts=pipeline.planned_step.cut_points_after if options.cut_after else None,
            is_over_batch=options.loss_over == "batch",
        )


@contextlib.contextmanager
def _quiet_lightning() -> Iterator[None]:
    """What Lightning says of a run is not about measuring; warnings stay."""
    logger = logging.getLogger("lightning.pytorch")
    before = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(before)


def _config_folder() -> Path:
    """The recipes' configs, found as Python finds the recipes, also in the folder that the command is started in."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        launch = import_module("recipes.launch")
    except ImportError as error:
        raise ConfigurationError(
            f"the recipes cannot be imported ({error}); start the command in a checkout of lightning-autopipe, with "
            'what they need: pip install ".[recipes]"'
        ) from error
    launch.hush_lightning()
    return Path(launch.CONFIG_DIR)


def _composed(folder: Path, name: str, overrides: Sequence[str]) -> DictConfig:
    try:
        with initialize_config_dir(str(folder), version_base="1.3"):
            return compose("train", overrides=[f"recipe={name}", "paths.output_dir=.", *overrides])
    except HydraException as error:
        raise ConfigurationError(f"recipe {name!r}: {error}") from error


def _strategy_options(cfg: DictConfig) -> dict[str, Any]:
    """The recipe's options of the strategy, but for those that a plan decides."""
    node: Any = OmegaConf.to_container(cfg.strategy, resolve=True)
    if not isinstance(node, dict) or "_target_" not in node:
        return {}
    return {name: value for name, value in node.items() if not name.startswith("_") and name not in _DECIDED_HERE}
