"""The part of the strategy that writes and reads checkpoints."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.fabric.utilities.types import _PATH
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.optim import Optimizer

from lightning_autopipe.strategy.checkpoint_loading import file_loader, load_any
from lightning_autopipe.strategy.consolidated_checkpoints import ConsolidatedCheckpoints
from lightning_autopipe.strategy.finetuning import complete_group_names
from lightning_autopipe.strategy.module_strategy import ModuleStrategy
from lightning_autopipe.strategy.optimizers import unwrapped
from lightning_autopipe.strategy.options import StrategyOptions
from lightning_autopipe.strategy.random_state import (
    RANDOM_STATE,
    default_sampler_seed,
    gather_random_state,
    resume_generators,
)
from lightning_autopipe.strategy.sharded_checkpoints import ShardedCheckpoints
from lightning_autopipe.strategy.state_gathering import whole_state_dict


class CheckpointStrategy(ModuleStrategy):
    """State of module, optimizers and random generators, to and from files and folders."""

    def __init__(self, options: StrategyOptions, **components: Any) -> None:
        super().__init__(options, **components)
        self._resumed_random_state: Mapping[str, Any] | None = None
        """Of the checkpoint, until the first batch is trained on."""
        self._known_checkpoints: ConsolidatedCheckpoints | ShardedCheckpoints | None = None

    def teardown(self) -> None:
        try:
            if self._known_checkpoints is not None and not self.is_interrupted:
                self._known_checkpoints.wait()
        finally:
            self._resumed_random_state = None
            super().teardown()

    # State --------------------------------------------------------------------

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The state of the optimizer on the whole module; complete on global rank 0."""
        session = self.session
        whole = next(w for w in session.placed_module.optimizers if w.optimizer is unwrapped(optimizer))
        if self.is_interrupted:
            return whole.state_dict(whole.local_states())
        with self.naming_first_error():
            return self._checkpoints.optimizer_state(session.placed_module, whole)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        for whole, state in zip(self.session.placed_module.optimizers, checkpoint["optimizer_states"], strict=True):
            whole.load_state_dict(state)
        random_state = checkpoint.get(RANDOM_STATE)
        if random_state is not None:
            self.session.pipeline.seed = random_state["seed"]
            self._sampler_seed = random_state["sampler_seed"]
            self._resumed_random_state = random_state
            fetcher: Any = self.trainer.fit_loop._data_fetcher
            if fetcher is not None and fetcher.length is not None:
                # Begun before this was known: some schedulers ask how many steps there will be. Nothing is read yet.
                iter(fetcher)

    def resume_random_state(self) -> None:
        """Lets this process draw on as the run did that the checkpoint is of.

        Called right before data are read, until the first batch is trained on: what Lightning and the user do until
        then (looking whether a loader can be iterated; beginning the epoch that had ended when the checkpoint was
        written) draws as well.
        """
        if self._resumed_random_state is not None:
            resume_generators(self._resumed_random_state, self.communicator)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The plain module's keys; on global rank 0 with all values."""
        if self.is_interrupted:
            return whole_state_dict(self.session.module, {})
        with self.naming_first_error():
            return self._checkpoints.module_state(self.session.placed_module)

    # Files and folders --------------------------------------------------------

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: _PATH, storage_options: Any | None = None) -> None:
        is_whole_world_here = not self.is_interrupted or self.world_size == 1
        if self._session is not None and "optimizer_states" in checkpoint and is_whole_world_here:
            checkpoint[RANDOM_STATE] = gather_random_state(
                self.communicator,
                seed=self.session.pipeline.seed,
                sampler_seed=default_sampler_seed() if self._sampler_seed is None else self._sampler_seed,
            )
        if self.is_interrupted and not self._is_whole_here:
            if self.is_global_zero:
                rank_zero_warn(
                    f"no checkpoint is written to {os.fspath(filepath)!r}: an exception ended the run, and other "
                    "processes cannot be asked for their part any more. Resume from the last regular checkpoint"
                )
            return
        if self._session is not None:
            complete_group_names(checkpoint, self.callbacks, self._session.placed_module.optimizers)
        with self.naming_first_error():
            self._checkpoints.save(checkpoint, filepath, self.checkpoint_io, storage_options)
            is_last = self._termination is not None and self._termination.is_requeueing
            if is_last or not self.session.is_ready:  # nothing comes later that would wait
                self._checkpoints.wait()

    @property
    def _is_whole_here(self) -> bool:
        """Whether rank 0 can write a checkpoint without the other ranks."""
        if self.world_size == 1 or self._session is None:
            return True
        is_file = isinstance(self._checkpoints, ConsolidatedCheckpoints)
        return is_file and not self._session.placed_module.is_spread

    def remove_checkpoint(self, filepath: _PATH) -> None:
        self._checkpoints.remove(filepath, self.checkpoint_io)

    def load_checkpoint(self, checkpoint_path: _PATH, weights_only: bool | None = None) -> dict[str, Any]:
        if self._known_checkpoints is not None:
            self._known_checkpoints.wait()
        return load_any(file_loader(self.checkpoint_io, checkpoint_path), checkpoint_path, weights_only)

    @property
    def _checkpoints(self) -> ConsolidatedCheckpoints | ShardedCheckpoints:
        """How checkpoints are written; kept as long as the processes are the same."""
        known = self._known_checkpoints
        if known is None or known.communicator is not self.communicator:
            if self.options.checkpoint_format in ("sharded", "sharded_async"):
                known = ShardedCheckpoints(
                    self.communicator,
                    in_background=self.options.checkpoint_format == "sharded_async",
                    timeout_s=self.options.timeout_s,
                    backend=self.options.process_group_backend,
                )
            else:
                known = ConsolidatedCheckpoints(self.communicator, [Path(self.trainer.default_root_dir)])
            self._known_checkpoints = known
        return known

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        assert self.lightning_module is not None
        self._make_whole(self.lightning_module)
        with self._configured.recording():
            super().load_model_state_dict(checkpoint, strict=strict)
