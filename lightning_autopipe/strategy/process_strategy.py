"""The half of the strategy that knows processes and groups, and nothing of modules."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.utilities.distributed import (
    _all_gather_ddp_if_available,
    _get_default_process_group_backend_for_device,
    _sync_ddp,
)
from lightning.fabric.utilities.imports import _IS_INTERACTIVE
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.fabric.utilities.seed import _collect_rng_states, reset_seed
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerStatus
from torch import Tensor
from torch.distributed import ReduceOp

from lightning_autopipe.core.layout import ParallelLayout
from lightning_autopipe.core.plan import PipelinePlan
from lightning_autopipe.runtime.failure import FailureMonitor
from lightning_autopipe.runtime.members import Member, check_members
from lightning_autopipe.runtime.process_groups import ProcessGroups, create_process_groups
from lightning_autopipe.strategy.communicator import Communicator
from lightning_autopipe.strategy.environment import (
    check_place,
    given_plan,
    join_processes,
    make_communicator,
    resolve_layout,
    settings_as_text,
)
from lightning_autopipe.strategy.launcher import ScriptLauncher, WorkerLauncher, forget_another_launch, with_given_ranks
from lightning_autopipe.strategy.options import StrategyOptions
from lightning_autopipe.strategy.random_state import default_sampler_seed
from lightning_autopipe.strategy.refusals import refuse_start_method
from lightning_autopipe.strategy.trace_files import check_folder

T = TypeVar("T")


class ProcessStrategy(ParallelStrategy):
    """Processes, groups and collectives of a pipeline.

    Lightning's collectives mean all ranks outside a step. Inside a step only the last stages reach them, so there, and
    wherever Lightning means the replicas, they are over the ranks of one stage.
    """

    options: StrategyOptions

    def __init__(self, options: StrategyOptions, **components: Any) -> None:
        forget_another_launch()
        super().__init__(**components)
        self.options = options
        self._num_nodes = 1
        self._given_plan: PipelinePlan | None = given_plan(options)
        self._found_plan: PipelinePlan | None = None
        """What a search has chosen for the module at hand."""
        self._layout: ParallelLayout | None = None
        self._groups: ProcessGroups | None = None
        self._communicator: Communicator | None = None
        self._monitor: FailureMonitor | None = None
        self._random_state_at_start: dict[str, Any] | None = None
        self._sampler_seed: int | None = None
        """Of the run that a checkpoint resumes."""
        self._ends_together = False
        """Whether all ranks have agreed to raise in this place: checkpoints can still be written."""

    # Processes ----------------------------------------------------------------

    @property
    def is_distributed(self) -> bool:
        """What Lightning's connector asks strategies that it does not know."""
        return True

    @property
    def root_device(self) -> torch.device:
        devices = self.parallel_devices
        assert devices is not None
        # One device is that of every process here: a CPU, the only GPU that each process sees, or one that they share.
        return devices[self.local_rank if len(devices) > 1 else 0]

    @property
    def cluster_environment(self) -> ClusterEnvironment | None:
        """Who has started the processes, and tells each its rank."""
        return self._cluster_environment

    @cluster_environment.setter
    def cluster_environment(self, environment: ClusterEnvironment | None) -> None:
        self._cluster_environment = with_given_ranks(environment)

    @property
    def num_nodes(self) -> int:
        """Number of machines."""
        return self._num_nodes

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        self._num_nodes = num_nodes

    @property
    def num_processes(self) -> int:
        """Processes that Lightning's own launcher starts on this machine."""
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    def layout(self) -> ParallelLayout:
        """Stages and replicas of this run.

        Raises:
            ConfigurationError: the options do not fit the number of processes.
            PlanError: the given plan is for another number.
        """
        if self._layout is None or self._layout.world_size != self.world_size:
            self._layout = resolve_layout(self.options, self.plan_to_run, self.world_size)
        return self._layout

    @property
    def plan_to_run(self) -> PipelinePlan | None:
        """What the user gave or a search has chosen; None: made from the first batch."""
        return self._given_plan or self._found_plan

    @property
    def communicator(self) -> Communicator:
        """This rank's groups for objects."""
        assert self._communicator is not None, "setup_environment comes first"
        return self._communicator

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        kwargs = {"num_replicas": self.layout.num_replicas, "rank": self.layout.replica_index(self.global_rank)}
        if self._sampler_seed not in (None, default_sampler_seed()):
            kwargs["seed"] = self._sampler_seed
        return kwargs

    @property
    def is_in_step(self) -> bool:
        """Whether the user's step runs."""
        return False

    @property
    def is_silent(self) -> bool:
        """Whether it runs for a plan or a trace: every rank does that at its own pace, with nothing to exchange."""
        return False

    @property
    def is_interrupted(self) -> bool:
        """Whether an exception is being handled: other ranks may be gone, so nothing may wait for them."""
        trainer = None if self.lightning_module is None else self.lightning_module._trainer
        is_interrupted = trainer is not None and trainer.state.status == TrainerStatus.INTERRUPTED
        return is_interrupted and not self._ends_together

    def set_world_ranks(self) -> None:
        """Tells the cluster environment and Lightning's rank-zero functions who this process is."""
        if self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        rank_zero_only.rank = self.global_rank  # type: ignore[attr-defined]

    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        # What one process can tell alone is refused in the Trainer's own line.
        check_place(self._introduction(), self.parallel_devices or ())
        if self.options.trace_folder is not None and self.global_rank == 0:
            check_folder(self.options.trace_folder)
        assert self.layout
        if self.world_size > 1:
            self._launcher = self._make_launcher()

    def _make_launcher(self) -> Any:
        assert self.cluster_environment is not None
        start_method: Any = self.options.start_method
        if start_method == "auto":
            start_method = "fork" if _IS_INTERACTIVE else "popen"
        if self.cluster_environment.creates_processes_externally:
            start_method = "popen"  # Lightning starts none
        else:
            refuse_start_method(start_method, gather_after_fit=self.options.gather_after_fit)
        if start_method != "popen":
            return WorkerLauncher(self, start_method)
        return ScriptLauncher(self.cluster_environment, self.num_processes, self.num_nodes)

    def setup_environment(self) -> None:
        super().setup_environment()
        reset_seed()
        self.set_world_ranks()
        if self.world_size > 1:
            self._start_processes()
        else:
            check_members([self._introduction()])
        world_group = None if self._groups is None else self._groups.control
        # Kept from run to run with what depends on it, unless the processes have met anew.
        if self._communicator is None or self._communicator.world_group is not world_group:
            self._make_communicator()

    def _start_processes(self) -> None:
        assert self.cluster_environment is not None
        if not dist.is_initialized():
            join_processes(
                self.cluster_environment,
                self._introduction(),
                device=self.root_device,
                timeout_s=self.options.timeout_s,
            )
        self._make_groups()
        self._monitor = FailureMonitor(self.layout)
        self._monitor.start()

    def _make_groups(self) -> None:
        self._groups = create_process_groups(
            self.layout, timeout_s=self.options.timeout_s, backend=self.options.process_group_backend
        )

    def _make_communicator(self) -> None:
        self._communicator = make_communicator(self._groups, self.layout, self.root_device)
        self._communicator.guard = self.naming_first_error

    def _run_by(self, plan: PipelinePlan | None) -> None:
        """Takes the places that a plan gives to the ranks, or the usual ones. Collective over all ranks."""
        before = self.layout
        self._found_plan, self._layout = plan, None
        if self.layout == before or self._monitor is None:
            return
        self._make_groups()
        self._make_communicator()
        self._monitor.layout = self.layout

    def _introduction(self) -> Member:
        assert self.parallel_devices
        backend = self.options.process_group_backend
        return Member(
            global_rank=self.global_rank,
            world_size=self.world_size,
            node_rank=self.node_rank,
            local_rank=self.local_rank,
            num_nodes=self.num_nodes,
            num_devices=len(self.parallel_devices),
            settings=settings_as_text(self.options, self._given_plan),
            backend=backend or _get_default_process_group_backend_for_device(self.parallel_devices[0]),
        )

    def naming_first_error(self) -> contextlib.AbstractContextManager[None]:
        """A context in which an error that another rank's failure has caused is raised as that failure."""
        if self._monitor is None or self._ends_together:
            return contextlib.nullcontext()
        return self._monitor.guard()

    def on_exception(self, exception: BaseException) -> None:
        if self._monitor is not None and not self._ends_together:
            self._monitor.report(exception)

    def teardown(self) -> None:
        # All leave the run together: one that still fails would tell it to nobody, and the others wait in the next run.
        self.barrier("teardown")
        self._ends_together = False
        if self._monitor is not None:
            self._monitor.stop()
            self._monitor = None
        assert self.cluster_environment is not None
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        assert self.accelerator is not None
        self.accelerator.teardown()
        self.checkpoint_io.teardown()

    # Collectives --------------------------------------------------------------

    def barrier(self, name: str | None = None) -> None:
        if name == "run-stage":
            # Where a loader opened for planning has to draw as if it were opened after the sanity check.
            self._random_state_at_start = _collect_rng_states()
        if self._groups is None or self.is_interrupted or self.is_silent:
            return
        if self.is_in_step:
            self.communicator.gather_over_replicas(None)
        else:
            dist.barrier(group=self._groups.control)

    def broadcast(self, obj: T, src: int = 0) -> T:
        if self._communicator is None or self.is_interrupted or self.is_silent:
            return obj
        if self.is_in_step:
            values = self._communicator.gather_over_replicas(obj)
            return values[self.layout.replica_index(src)]  # type: ignore[no-any-return]
        return self._communicator.broadcast_in_world(obj, source=src)  # type: ignore[no-any-return]

    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: ReduceOp | str | None = "mean") -> Any:
        """Reduces a tensor over the replicas (or the group that is given); anything else is given back as it is."""
        if not isinstance(tensor, Tensor) or self._groups is None or self.is_silent:
            return tensor
        if group is None:
            if self.layout.num_replicas == 1:
                return tensor
            group = self._groups.stage
        return _sync_ddp(tensor, group=group, reduce_op=reduce_op)

    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        """The tensors of all replicas, stacked (or of the group that is given); with one replica the tensor itself."""
        if self._groups is None:
            return tensor
        if group is None or group is dist.group.WORLD:
            if self.layout.num_replicas == 1:
                return tensor
            group = self._groups.stage
        if self.is_silent:
            return torch.stack([tensor] * dist.get_world_size(group))
        return _all_gather_ddp_if_available(tensor, group=group, sync_grads=sync_grads)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """One decision for all ranks: ``all`` or any of theirs."""
        return not self.any_rank([not decision])[0] if all else self.any_rank([decision])[0]

    def any_rank(self, decisions: Sequence[bool]) -> list[bool]:
        """For each decision whether it is True on any rank."""
        if self._groups is None or self.is_interrupted or self.is_silent:
            return list(decisions)
        votes = torch.tensor([int(decision) for decision in decisions])
        with self.naming_first_error():
            dist.all_reduce(votes, op=dist.ReduceOp.MAX, group=self._groups.control)
        return [bool(vote) for vote in votes.tolist()]
