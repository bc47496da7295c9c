"""What a user can set on the strategy, and which values are allowed."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

from lightning_autopipe.core.cluster import ClusterTopology
from lightning_autopipe.core.errors import ConfigurationError
from lightning_autopipe.core.partition import Partition
from lightning_autopipe.core.plan import PipelinePlan
from lightning_autopipe.schedules.catalog import TRAINING_SCHEDULES
from lightning_autopipe.schedules.interleaved import NAME as INTERLEAVED

Auto = Literal["auto"]

DEFAULT_TIMEOUT_S = 1800.0
"""How long a rank waits for another one before the run ends with an error."""

PartitionRule = Literal["auto", "uniform", "parameters"]

_PARTITION_RULES = ("auto", "uniform", "parameters")
_SCHEDULES = ("auto", *TRAINING_SCHEDULES)
_PROFILES = ("auto", "measured", "flops")
_BACKENDS = (None, "gloo", "nccl")
_CHECKPOINT_FORMATS = ("auto", "consolidated", "sharded", "sharded_async")
_START_METHODS = ("auto", "popen", "spawn", "fork", "forkserver")


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyOptions:
    """The options of `AutoPipeStrategy`, checked.

    ``"auto"`` is always allowed and means the best choice that this version makes. A value whose feature is still to
    come is refused, so that a setting is never ignored.

    Raises:
        ConfigurationError: a value is not allowed, still to come, or contradicts another one.
    """

    num_stages: int | Auto = "auto"
    """Stages of each pipeline. ``"auto"``: searched before a fit; else all processes, divided by ``num_replicas``."""
    num_replicas: int | Auto = "auto"
    """Pipelines side by side, each on its own share of the data. ``"auto"``: searched together with ``num_stages``; or
    what a given ``num_stages`` leaves; else 1."""
    num_microbatches: int | Auto = "auto"
    """Micro-batches per replica and step. ``"auto"``: searched; else four per stage, at most the batch's samples."""
    schedule: str = "auto"
    """``"1f1b"`` (few micro-batches alive at once), ``"gpipe"`` (all), ``"sliced_1f1b"`` (the first and last ones in
    halves, for a shorter start and end), ``"interleaved_1f1b"`` (several stages a rank) or ``"zero_bubble"`` (gradients
    of parameters fill gaps). ``"auto"``: searched before a fit where numbers are open, 1F1B as deep as it pays among
    them; else 1F1B."""
    partition: PartitionRule | Partition | Sequence[int] = "auto"
    """The layer index at which each stage after the first begins. ``"auto"``: the shortest step by what layers cost;
    ``"uniform"``: equally many layers on each stage; ``"parameters"``: parameters as even as possible."""
    profile: str = "auto"
    """What layers cost: ``"measured"`` seconds, or counted floating-point operations (``"flops"``). ``"auto"``:
    measured before a fit on several stages; counted where measuring fails, with a warning."""
    cut_after: Sequence[str] | None = None
    """Paths of the modules after which stages end, in the order of their calls: one fewer than stages."""
    plan: str | os.PathLike[str] | PipelinePlan | None = None
    """A plan, or the JSON file of one, to use instead of making one."""
    cluster: str | os.PathLike[str] | ClusterTopology | None = None
    """Devices and links that a fit is planned for: a topology, the file of one, or the name of an example; None or
    ``"auto"``: what the hosts tell of themselves, and what is measured between several servers; ``"measure"``: what is
    measured on one server, too."""
    split_batch: Mapping[str, int | None] | None = None
    """By leaf of the batch (keys joined by dots) the dimension that counts samples, or None for a leaf that stays
    whole. Leaves that are not named are found out by tracing."""
    loss_over: str = "microbatch"
    """``"microbatch"``: the loss is a mean over samples, so that of a batch is the weighted mean of the micro-batches'.
    ``"batch"``: it compares samples (contrastive losses); what follows the layers runs once on the whole batch."""
    verify: bool | Auto = "auto"
    """Prove the cut step against the whole one before training, on one micro-batch. ``"auto"``: where memory allows it;
    True: in any case; False: not."""
    gather_after_fit: bool = True
    """After ``fit`` the module on global rank 0 is whole; False leaves every rank its own parameters only."""
    deferred_batch_norm: bool | Auto = False
    """True: running statistics of batch normalization are updated once per step, by the whole batch over all
    micro-batches and replicas; micro-batches are normalized by their own. ``"auto"``: False."""
    merge_accumulation: bool | Auto = False
    """True: the batches of an accumulation window run as one longer pipeline, when the last of them is there.
    ``"auto"``: False."""
    shard_optimizer: bool | Auto = False
    """True: each replica of a stage keeps a share of its optimizer state. ``"auto"``: False."""
    checkpoint_format: str = "consolidated"
    """``"consolidated"`` (and ``"auto"``): one file in the plain format, written by rank 0. ``"sharded"``: a folder
    that all ranks write. ``"sharded_async"``: the same, while training goes on."""
    recompute: bool | Auto = "auto"
    """Recompute activations in the backward; True is still to come."""
    trace: str | os.PathLike[str] | None = None
    """A folder for what some steps of a fit are measured to do, which also has figures logged. None or ``"auto"``:
    nothing is measured."""
    replan: str | bool = "warn"
    """``"warn"``: tell where stages take other times than planned for long, with what a new plan would gain; only for
    plans of measured layers, not with NCCL. False: not."""
    start_method: str = "auto"
    """How Lightning starts the processes on its machine where no cluster's launcher does, as for its ``ddp``:
    ``"popen"`` runs the script again; ``"fork"``, ``"spawn"`` and ``"forkserver"`` start them from this process, which
    has the trained weights afterwards. ``"auto"``: ``"fork"`` in notebooks, else ``"popen"``."""
    process_group_backend: str | None = None
    """``"gloo"`` or ``"nccl"``. None: NCCL on CUDA devices, else gloo."""
    timeout: timedelta | float = DEFAULT_TIMEOUT_S
    """How long a rank waits for another one; a timedelta, or seconds."""

    def __post_init__(self) -> None:
        for name in ("num_stages", "num_replicas", "num_microbatches"):
            _check_count(name, getattr(self, name))
        _check_choice("schedule", self.schedule, _SCHEDULES)
        _check_choice("loss_over", self.loss_over, ("microbatch", "batch", "auto"))
        _check_choice("profile", self.profile, _PROFILES)
        _check_choice("process_group_backend", self.process_group_backend, _BACKENDS)
        _check_choice("start_method", self.start_method, _START_METHODS)
        _check_bool("gather_after_fit", self.gather_after_fit)
        _check_choice("verify", self.verify, ("auto", True, False))
        _check_choice("deferred_batch_norm", self.deferred_batch_norm, ("auto", True, False))
        _check_choice("replan", self.replan, ("auto", "warn", False))
        _check_choice("shard_optimizer", self.shard_optimizer, ("auto", True, False))
        _check_choice("checkpoint_format", self.checkpoint_format, _CHECKPOINT_FORMATS)
        self._check_trace()
        _check_choice("merge_accumulation", self.merge_accumulation, ("auto", True, False))
        self._check_loss_over()
        self._check_merge_accumulation()
        self._check_partition()
        self._check_cut_after()
        self._check_split_batch()
        self._check_plan()
        self._check_cluster()
        self._check_still_to_come()
        _check_timeout(self.timeout)

    @property
    def timeout_s(self) -> float:
        """The timeout in seconds."""
        return self.timeout.total_seconds() if isinstance(self.timeout, timedelta) else float(self.timeout)

    @property
    def trace_folder(self) -> str | None:
        """Where a trace goes; None: nowhere."""
        return None if self.trace in (None, "auto") else os.fspath(self.trace)

    @property
    def shards_optimizer(self) -> bool:
        """Whether replicas share a stage's optimizer state."""
        return self.shard_optimizer is True

    @property
    def schedule_name(self) -> str:
        """The schedule, ``"auto"`` where it is free: a loss over the batch needs all forwards before a backward."""
        return "gpipe" if self.loss_over == "batch" else self.schedule

    def _check_loss_over(self) -> None:
        if self.loss_over != "batch":
            return
        given = self.plan.schedule.name if isinstance(self.plan, PipelinePlan) else self.schedule
        if given not in ("auto", "gpipe"):
            raise ConfigurationError(
                "loss_over='batch' needs the outputs of all micro-batches before the first backward, which is "
                f"schedule='gpipe'; got {given!r}. Set schedule='gpipe' or leave it unset"
            )

    def _check_trace(self) -> None:
        if not isinstance(self.trace, (str, os.PathLike, type(None))):
            raise ConfigurationError(f"trace must be a folder's path or None; got {self.trace!r}")
        if self.trace_folder is not None and os.path.isfile(self.trace_folder):
            raise ConfigurationError(f"trace={self.trace_folder!r} must be a folder, but it is a file")

    @property
    def merges_accumulation(self) -> bool:
        """Whether accumulation windows run as one pipeline."""
        return self.merge_accumulation is True

    def _check_merge_accumulation(self) -> None:
        if not self.merges_accumulation:
            return
        if self.deferred_batch_norm is True:
            raise ConfigurationError(
                "deferred_batch_norm=True takes running statistics batch by batch, but merge_accumulation=True runs "
                "all batches of a window at once; set one of them to False"
            )
        if self.schedule_name == "gpipe" or (
            isinstance(self.plan, PipelinePlan) and self.plan.schedule.name == "gpipe"
        ):
            raise self.gpipe_window_error()

    def gpipe_window_error(self) -> ConfigurationError:
        """What to raise where GPipe and merged windows come together."""
        why = "which loss_over='batch' takes" if self.loss_over == "batch" else "as schedule or plan say"
        return ConfigurationError(
            f"GPipe ({why}) keeps the activations of all micro-batches, and merge_accumulation=True would make it keep "
            "those of all batches of a window. Set merge_accumulation=False, or another schedule"
        )

    def _check_partition(self) -> None:
        partition = self.partition
        if isinstance(partition, Partition) or (isinstance(partition, str) and partition in _PARTITION_RULES):
            return
        is_cuts = isinstance(partition, Sequence) and not isinstance(partition, str)
        if not is_cuts or any(isinstance(cut, bool) or not isinstance(cut, int) for cut in partition):
            raise ConfigurationError(
                'partition must be "auto", "uniform", "parameters", a Partition, or the list of layer indices at which '
                f"the stages after the first begin; got {partition!r}"
            )

    def _check_cut_after(self) -> None:
        cuts = self.cut_after
        if cuts is None:
            return
        is_names = isinstance(cuts, Sequence) and not isinstance(cuts, str)
        if not is_names or not cuts or not all(isinstance(path, str) and path for path in cuts):
            raise ConfigurationError(f"cut_after must be a list of module paths or None; got {cuts!r}")
        if not (isinstance(self.partition, str) and self.partition == "auto"):
            raise ConfigurationError("cut_after and partition both say where the stages begin; set one of them")
        if self.schedule == INTERLEAVED:
            return  # each rank runs several
        if isinstance(self.num_stages, int) and self.num_stages != len(cuts) + 1:
            raise ConfigurationError(
                f"cut_after names {len(cuts)} cuts, which make {len(cuts) + 1} stages, but num_stages is "
                f"{self.num_stages}"
            )

    def _check_split_batch(self) -> None:
        split = self.split_batch
        if split is None:
            return
        is_mapping = isinstance(split, Mapping) and all(
            isinstance(name, str) and (dim is None or (isinstance(dim, int) and not isinstance(dim, bool) and dim >= 0))
            for name, dim in split.items()
        )
        if not is_mapping:
            raise ConfigurationError(
                "split_batch must map leaves of the batch (their keys joined by dots) to the dimension that counts "
                f"samples, or to None for leaves that stay whole; got {split!r}"
            )

    def _check_plan(self) -> None:
        plan = self.plan
        if plan is None:
            return
        if not isinstance(plan, (str, os.PathLike, PipelinePlan)):
            raise ConfigurationError(f"plan must be a file's path, a PipelinePlan or None; got {plan!r}")
        if isinstance(plan, (str, os.PathLike)) and not os.path.isfile(plan):
            raise ConfigurationError(
                f"plan={os.fspath(plan)!r} is not a file; set the path of one, or leave plan unset"
            )
        decided = [
            name
            for name in ("num_stages", "num_replicas", "num_microbatches", "schedule")
            if getattr(self, name) != "auto"
        ]
        if not (isinstance(self.partition, str) and self.partition == "auto"):
            decided.append("partition")
        if self.cut_after is not None:
            decided.append("cut_after")
        if self.cluster not in (None, "auto"):
            decided.append("cluster")
        if decided:
            raise ConfigurationError(
                f"a plan decides {', '.join(decided)} itself; set either plan or {' and '.join(decided)}, not both"
            )

    def _check_cluster(self) -> None:
        if not isinstance(self.cluster, (str, os.PathLike, ClusterTopology, type(None))):
            raise ConfigurationError(
                'cluster must be a ClusterTopology, a file\'s path, the name of an example, "auto", "measure" or None; '
                f"got {self.cluster!r}"
            )
        if self.cluster not in (None, "auto") and self.profile == "flops":
            raise ConfigurationError(
                "planning for cluster= needs measured seconds, but profile='flops' counts operations; leave one unset"
            )

    @property
    def given_cuts(self) -> tuple[int, ...] | None:
        """The cut points that `partition` gives; None where it names a rule."""
        partition = self.partition
        if isinstance(partition, str):
            return None
        return partition.cut_points if isinstance(partition, Partition) else tuple(partition)

    def _check_still_to_come(self) -> None:
        if self.recompute != "auto" and self.recompute is not False:
            raise ConfigurationError(
                f"recompute={self.recompute!r} is not supported yet: set it to 'auto' or False, or leave it unset"
            )


def _check_count(name: str, value: object) -> None:
    if isinstance(value, str) and value == "auto":
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigurationError(f'{name} must be an integer >= 1 or "auto"; got {value!r}')


def _check_choice(name: str, value: object, allowed: Sequence[object]) -> None:
    if not any(type(value) is type(choice) and value == choice for choice in allowed):
        raise ConfigurationError(
            f"{name} must be one of {', '.join(repr(choice) for choice in allowed)}; got {value!r}"
        )


def _check_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ConfigurationError(f"{name} must be True or False; got {value!r}")


def _check_timeout(value: object) -> None:
    if isinstance(value, timedelta):
        seconds = value.total_seconds()
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        seconds = float(value)
    else:
        raise ConfigurationError(f"timeout must be a timedelta or a number of seconds; got {value!r}")
    if not (math.isfinite(seconds) and seconds > 0):
        raise ConfigurationError(f"timeout must be a finite time > 0 s; got {value!r}")
