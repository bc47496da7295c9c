"""The part of the strategy that knows the module: its run, its gradients, its optimizers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_autopipe.capture.compiled_calls import Compiler
from lightning_autopipe.core.errors import ConfigurationError
from lightning_autopipe.core.timeline import StepEnd
from lightning_autopipe.runtime.synchronized_batch_norm import SynchronizedForward
from lightning_autopipe.strategy.clipping import PipelineClipping
from lightning_autopipe.strategy.compiled import StagewiseCompilation, taken_apart
from lightning_autopipe.strategy.grad_scaler import SharedScaling, scaler_of
from lightning_autopipe.strategy.gradient_norms import SharedGradientNorms
from lightning_autopipe.strategy.hook_log import HookLog
from lightning_autopipe.strategy.lightning_patches import LightningPatches
from lightning_autopipe.strategy.options import StrategyOptions
from lightning_autopipe.strategy.placement import fill_placeholders
from lightning_autopipe.strategy.planning_strategy import PlanningStrategy
from lightning_autopipe.strategy.predictions import unsilence_writers
from lightning_autopipe.strategy.pruning import PruningOfWhole, pruning_callbacks
from lightning_autopipe.strategy.refusals import explain_several_optimizers, refuse_callbacks, refuse_unsupported
from lightning_autopipe.strategy.shared_decisions import SharedDecisions
from lightning_autopipe.strategy.stopping import SharedStopping
from lightning_autopipe.strategy.termination import SharedTermination
from lightning_autopipe.strategy.training_steps import TRAINING_STEP
from lightning_autopipe.strategy.weight_averaging import AveragesOfParts, average_parts, averaging_callbacks


class Installable(Protocol):
    """A change of objects of Lightning's and torch's, for one run."""

    def install(self) -> None:
        """Makes the change."""

    def remove(self) -> None:
        """Undoes it."""


class ModuleStrategy(PlanningStrategy):
    """Setup and teardown of a run, gradients and optimizer steps."""

    _module: pl.LightningModule | None = None
    _compiler: Compiler | None = None
    """How the module itself was given to `torch.compile`."""

    def __init__(self, options: StrategyOptions, **components: Any) -> None:
        super().__init__(options, **components)
        self._installed: list[Installable] = []
        """What is changed for one run in objects of Lightning's and torch's."""
        self._termination: SharedTermination | None = None
        self._hook_log: HookLog | None = None
        self._is_accumulating = False
        self._has_synchronized_layers = False
        """Whether `sync_batchnorm=True` has changed the module for this run."""
        self._compilation = StagewiseCompilation()

    # Beginning and end of a run -----------------------------------------------

    @property
    def _lightning_module(self) -> pl.LightningModule | None:
        """What the Trainer is given, which it sets before it asks whether a strategy takes compiled modules."""
        return self._module

    @_lightning_module.setter
    def _lightning_module(self, module: pl.LightningModule | None) -> None:
        self._compiler = taken_apart(module) or (self._compiler if module is self._module else None)
        self._module = module

    def __getstate__(self) -> dict[str, Any]:
        # To a spawned process: torch drops what it has compiled from modules, too.
        return {name: value for name, value in super().__getstate__().items() if name != "_compiler"}

    @contextlib.contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        """Lightning enters this for ``configure_model``: no rank makes more than its own stage's parameters."""
        with self._building():
            yield

    @contextlib.contextmanager
    def _building(self) -> Iterator[list[nn.Module]]:
        """A context for what makes the module, and copies of it that are added to the list."""
        module = self.lightning_module
        assert module is not None
        before = list(module.parameters())
        with self.naming_first_error(), self._configured.building(module, self.communicator) as built:
            yield built
        after = list(module.parameters())
        if len(before) != len(after) or any(p is not q for p, q in zip(before, after, strict=True)):
            self._session = None  # it knows a module that is no more

    def setup_environment(self) -> None:
        super().setup_environment()
        module = self.lightning_module
        assert module is not None
        if self.trainer.state.fn != TrainerFn.FITTING:
            return
        refuse_callbacks(self.callbacks)
        if averaging_callbacks(self.callbacks) or pruning_callbacks(self.callbacks):
            self._make_whole(module)  # they copy it in their setup, which comes next
        if averaging_callbacks(self.callbacks):
            self._install(AveragesOfParts(self.callbacks, self._building, self._configured.recording))

    def setup(self, trainer: pl.Trainer) -> None:
        assert self.accelerator is not None
        module = self.lightning_module
        assert module is not None
        self.accelerator.setup(trainer)
        self._install(SynchronizedForward())
        if trainer.state.fn == TrainerFn.FITTING and self._layer_sync is not None:
            self._change_layers(self._layer_sync.apply)
            self._has_synchronized_layers = True
        refuse_unsupported(trainer, module, self.precision_plugin)
        self._compilation.begin()
        self._begin_session(module)
        self._compilation.serve(self.session.pipeline, self._compiler)
        decisions = SharedDecisions(self.any_rank)
        self._termination = SharedTermination(trainer, decisions, self._follow_signals)
        self._hook_log = HookLog(trainer, self.communicator)
        running_step = self.session.running_step
        self._install(
            LightningPatches(trainer, self.communicator, share_attributes=running_step.attributes.share),
            self._termination,
            SharedStopping(trainer, decisions),
            self._hook_log,
            running_step.metrics,
        )
        if trainer.state.fn == TrainerFn.FITTING:
            self.session.placed_module.copies = average_parts(
                self.callbacks,
                self._gather_copy,
                gathers_module=self.options.checkpoint_format in ("sharded", "sharded_async"),
            )
            self.setup_optimizers(trainer)
        self._install(
            PruningOfWhole(
                self.callbacks,
                module,
                parts=self.session.placed_module,
                whole=self._changing_names,
            )
        )
        self.setup_precision_plugin()
        self._share_decisions(module)

    def _share_decisions(self, module: pl.LightningModule) -> None:
        """Lets gradients of all stages decide where torch and Lightning would take those of one."""
        surroundings: Any = {"is_in_step": lambda: self.is_in_step, "communicator": self.communicator}
        self._install(
            PipelineClipping(
                self.precision_plugin, module, counts=self.session.training.counts_in_norm, **surroundings
            ),
            SharedScaling(self.precision_plugin, self.any_rank),
            SharedGradientNorms(**surroundings),
        )

    def _install(self, *changes: Installable) -> None:
        for change in changes:
            change.install()
            self._installed.append(change)

    def _change_layers(self, change: Callable[[nn.Module], nn.Module]) -> None:
        """Lets Lightning put other layers in the place of normalizations, with the same parameters and buffers."""
        assert self.lightning_module is not None
        self.model = change(self.lightning_module)
        if self._session is not None:
            self._session.pipeline.store.clear()  # traces of the layers before

    def _begin_session(self, module: pl.LightningModule) -> None:
        known = self._session
        if known is not None and known.module is module and known.communicator is self._communicator:
            if self.trainer.state.fn == TrainerFn.FITTING and known.planned_step not in (None, TRAINING_STEP):
                # Planned for an evaluation; training may use parameters that it does not.
                known.placed_module.gather_everywhere()
            else:
                return
        else:
            self._collect_parts(module)
            with self._configured.recording():
                self.model = self.precision_plugin.convert_module(module)
        self._choose_plan(module)
        self._session = self._new_session(module)

    def _collect_parts(self, module: pl.LightningModule) -> None:
        """Makes a module usable that another strategy object has trained: rank 0 has all of it, others have parts."""
        if not self.communicator.broadcast_in_world(self._configured.has_values_for(module)):
            raise ConfigurationError(
                "an earlier run with gather_after_fit=False has left each process a part of this module only; set "
                "gather_after_fit=True there, or load a checkpoint into a new module"
            )
        if not self._configured.has_values_for(module):
            fill_placeholders(module)  # global rank 0 sends the values before the first step

    def _follow_signals(self) -> None:
        assert self._termination is not None
        try:
            self._termination.follow()
        except SIGTERMException:
            self._ends_together = True
            raise

    def _make_whole(self, module: pl.LightningModule) -> None:
        """Gives every rank all parameters. Collective over all ranks."""
        session = self._session
        if session is not None and session.module is module:
            session.placed_module.gather_everywhere()
            session.is_ready = False  # in the middle of a fit, too, as LearningRateFinder does
        else:
            self._collect_parts(module)

    @contextlib.contextmanager
    def _changing_names(self) -> Iterator[None]:
        """A context in which the module is whole, in host memory, and may rename parameters. Collective."""
        assert self.lightning_module is not None
        with self.naming_first_error(), torch.inference_mode(False):
            self._make_whole(self.lightning_module)
            self.session.placed_module.leave_device()
            with self.session.placed_module.renaming():
                yield

    def _gather_copy(self, copy: nn.Module) -> Mapping[str, Tensor]:
        return {} if self.is_interrupted else self.session.placed_module.gather_copy(copy)

    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        assert self.lightning_module is not None
        try:
            with self._configured.recording():
                super().setup_optimizers(trainer)
        except RuntimeError as error:
            if "multiple optimizers" in str(error):
                raise explain_several_optimizers(self.lightning_module, error) from error
            raise
        self.session.placed_module.note_optimizers(self.optimizers)

    def model_to_device(self) -> None:
        """Nothing: parameters move once it is known which ones stay here."""

    def teardown(self) -> None:
        session = self._session
        if session is not None:
            session.training.watch = session.pipeline.observer = None
            if session.is_ready and self.options.gather_after_fit and not self.is_interrupted:
                # Not only after a fit: an evaluation after it must not leave rank 0 with less.
                session.placed_module.gather_on_rank_zero()
            elif session.planned_step is None and not self.is_interrupted:
                session.placed_module.make_all()  # there was no batch
            session.end_run()
        if self._has_synchronized_layers:
            assert self._layer_sync is not None
            self._change_layers(self._layer_sync.revert)
            self._has_synchronized_layers = False
        while self._installed:
            self._installed.pop().remove()
        self._compilation.end()
        if self.lightning_module is not None and self.lightning_module._trainer is not None:
            unsilence_writers(self.callbacks)
        self._loaders.clear()
        self._is_accumulating = False
        super().teardown()

    # Gradients and optimizers -------------------------------------------------

    @contextlib.contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Lightning enters this for batches that only accumulate."""
        self._is_accumulating = True
        try:
            yield
        finally:
            self._is_accumulating = False

    def finish_loss(self, loss: Tensor) -> Tensor:
        """What Lightning back-propagates: a loss divided by the batches of a window, and scaled for float16."""
        num_batches = self.trainer.accumulate_grad_batches
        loss = loss / num_batches if num_batches > 1 else loss
        scaler = scaler_of(self.precision_plugin)
        return loss if scaler is None else scaler.scale(loss)

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Adds the gradients that the schedule left; the hooks around a backward run as ever."""
        module = self.lightning_module
        assert module is not None
        if self.session.training.has_stored:
            return closure_loss  # of a batch that waits: there is nothing yet to add
        self.pre_backward(closure_loss)
        closure_loss = self.precision_plugin.pre_backward(closure_loss, module)
        self.session.training.commit_gradients(reduce=not self._is_accumulating)
        closure_loss = self.precision_plugin.post_backward(closure_loss, module)
        self.post_backward(closure_loss)
        return closure_loss

    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.naming_first_error():
            result = super().optimizer_step(*args, **kwargs)
        if self._hook_log is not None:
            self._hook_log.flush_batch()
        watch = self.session.training.watch
        if watch is not None:
            watch.recorder.note_rest(StepEnd.OPTIMIZER)
        return result
