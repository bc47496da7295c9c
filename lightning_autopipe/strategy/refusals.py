"""What a pipeline cannot train, said before the first batch, with the way out."""

from __future__ import annotations

from collections.abc import Sequence

import lightning.pytorch as pl
from lightning.fabric.utilities.imports import _IS_INTERACTIVE
from lightning.pytorch.callbacks import BatchSizeFinder, Callback
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import nn
from torch.nn.parameter import UninitializedParameter

from lightning_autopipe.capture.source_lines import line_of_function
from lightning_autopipe.core.errors import ConfigurationError
from lightning_autopipe.runtime.synchronized_batch_norm import synchronized_layers
from lightning_autopipe.strategy.pruning import pruning_callbacks
from lightning_autopipe.strategy.weight_averaging import averaging_callbacks

STEP_NAMES = ("training_step", "validation_step", "test_step", "predict_step")
_PRECISION_PLUGINS = (Precision, DoublePrecision, HalfPrecision, MixedPrecision)


def refuse_unsupported(trainer: pl.Trainer, module: pl.LightningModule, precision: Precision) -> None:
    """Raises where this module, trainer or precision cannot run as a pipeline.

    Raises:
        ConfigurationError: it cannot; the message names the place and a way out.
    """
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        refuse_other_namespace(f"the callback {type(callback).__name__}", callback, Callback)
    _refuse_parameters(module)
    _refuse_steps(module)
    _refuse_precision(precision)
    if trainer.state.fn != TrainerFn.FITTING:
        return
    name = type(module).__name__
    if not module.automatic_optimization:
        raise ConfigurationError(
            f"{name}.automatic_optimization is False: manual optimization runs backward inside training_step "
            f"({line_of_function(module.training_step)}), which a pipeline cuts into stages. Leave it True and return "
            "the loss; use one optimizer with parameter groups for several learning rates"
        )
    if is_overridden("backward", module, parent=pl.LightningModule):
        raise ConfigurationError(
            f"{name}.backward is overridden ({line_of_function(module.backward)}), but a pipeline back-propagates each "
            "micro-batch itself and would not call it. Remove it; change the loss in training_step, or gradients in "
            "on_after_backward"
        )
    _refuse_groups_of_batch_norm(module)


def refuse_callbacks(callbacks: Sequence[Callback]) -> None:
    """Raises where a callback of a fit changes or compares what only a whole module in one process has.

    Raises:
        ConfigurationError: one does.
    """
    for callback in callbacks:
        name = type(callback).__name__
        if isinstance(callback, BatchSizeFinder):
            raise ConfigurationError(
                f"the callback {name} is not supported: it tries batch sizes until one process runs out of memory, and "
                "stages run out at different sizes. Remove it; with num_microbatches='auto' the search chooses "
                "micro-batches that fit the memory of every stage, and batch_size is free"
            )
    averaging, pruning = averaging_callbacks(callbacks), pruning_callbacks(callbacks)
    if averaging and pruning:
        raise ConfigurationError(
            f"the callbacks {type(averaging[0]).__name__} and {type(pruning[0]).__name__} do not go together: pruning "
            "adds masks to the module that the average, a copy made before, does not have. Remove one of them"
        )


def refuse_other_namespace(name: str, value: object, kind: type) -> None:
    """Raises where an object is made for the other of ``lightning.pytorch`` and ``pytorch_lightning``.

    Lightning would pass it over without a word: such a precision plugin, say, for ``32-true``.

    Args:
        name: What to call the object.
        value: The object, or None.
        kind: What it has to be an instance of.

    Raises:
        ConfigurationError: it is not.
    """
    if value is not None and not isinstance(value, kind):
        raise ConfigurationError(
            f"{name} is a {type(value).__module__}.{type(value).__qualname__}, which is no {kind.__module__}."
            f"{kind.__qualname__}: this strategy is for {pl.__name__}. Import it, or its base class, from there"
        )


def refuse_start_method(start_method: str, *, gather_after_fit: bool) -> None:
    """Raises where processes cannot be started in this way, or would keep what they have trained for themselves.

    Args:
        start_method: Other than ``"auto"``.
        gather_after_fit: Whether rank 0 has the whole module after a fit.

    Raises:
        ConfigurationError: they would.
    """
    if _IS_INTERACTIVE and start_method != "fork":
        raise ConfigurationError(
            f"start_method={start_method!r} starts no processes from a notebook or another interactive session: they "
            "would run the script again, or import it, and here is none. Leave it 'auto' (or set 'fork'), or put the "
            "code into a file and run that"
        )
    if start_method != "popen" and not gather_after_fit:
        raise ConfigurationError(
            f"with start_method={start_method!r} the module is trained in other processes, and comes back whole from "
            "rank 0; with gather_after_fit=False it would stay untrained here. Leave gather_after_fit=True, or set "
            "start_method='popen' (in a script)"
        )


def explain_several_optimizers(module: pl.LightningModule, error: RuntimeError) -> ConfigurationError:
    """What to raise instead of Lightning's advice to optimize manually."""
    line = line_of_function(module.configure_optimizers)
    return ConfigurationError(
        f"{type(module).__name__}.configure_optimizers ({line}) returned several optimizers, which Lightning allows "
        "under manual optimization only, and a pipeline not at all. Return one optimizer with a parameter group for "
        f"each of them (Lightning says: {error})"
    )


def _refuse_parameters(module: nn.Module) -> None:
    for name, parameter in module.named_parameters():
        if isinstance(parameter, UninitializedParameter) or (parameter.is_meta and type(parameter) is nn.Parameter):
            raise ConfigurationError(
                f"the parameter {name} has no values yet (a lazy module, or one on the meta device); give it values "
                "before the run, in __init__ or configure_model"
            )


def _refuse_steps(module: pl.LightningModule) -> None:
    for step_name in STEP_NAMES:
        if is_param_in_hook_signature(getattr(module, step_name), "dataloader_iter", explicit=True):
            raise ConfigurationError(
                f"{type(module).__name__}.{step_name} takes a dataloader_iter "
                f"({line_of_function(getattr(module, step_name))}), but only a pipeline's first stage reads "
                "data. Take the batch (batch, batch_idx) instead"
            )


def _refuse_groups_of_batch_norm(module: nn.Module) -> None:
    for name, layer in synchronized_layers(module).items():
        if layer.process_group is not None:
            raise ConfigurationError(
                f"{name} is a SyncBatchNorm with a process_group of its own, but a pipeline takes its statistics over "
                "all replicas of the stage that it is in. Leave process_group=None"
            )


def _refuse_precision(precision: Precision) -> None:
    if type(precision) not in _PRECISION_PLUGINS and not isinstance(precision, MixedPrecision):
        raise ConfigurationError(
            f"the precision plugin {type(precision).__name__} is not supported yet; set precision to 32-true, 64-true, "
            "bf16-true, bf16-mixed, 16-true or 16-mixed"
        )
