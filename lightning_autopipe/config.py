"""The strategy's options as a Hydra config, so that ``strategy: autopipe_h`` works in any Hydra application.

`register_configs` is called by this package's Hydra plugin when a Hydra application starts. Its defaults list can
then have the entry ``strategy: autopipe_h``, or ``strategy@trainer.strategy: autopipe_h`` to have the options under
``trainer.strategy``; instantiating that node gives the strategy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hydra.core.config_store import ConfigStore

CONFIG_GROUP = "strategy"
CONFIG_NAME = "autopipe_h"


@dataclass(kw_only=True)
class AutoPipeConfig:
    """What a user can set: the parameters of `lightning_autopipe.AutoPipeStrategy`, with its defaults.

    ``"auto"`` is always accepted and means the best choice that is implemented. A value that is still to come is
    refused with an error that says so.
    """

    _target_: str = "lightning_autopipe.AutoPipeStrategy"
    _convert_: str = "all"

    num_stages: int | str = "auto"
    """Stages that the module is cut into, each with a process of its own. ``"auto"``: as many as train most samples per
    second and fit the devices' memory, by a search before a fit; where nothing can be searched, and for evaluations
    alone, all processes, shared between the replicas. More stages need less memory each, and more micro-batches to keep
    them busy."""

    num_replicas: int | str = "auto"
    """Copies of the pipeline, which share the data (data parallelism): each reads batches of its own, as under DDP.
    ``"auto"``: searched together with num_stages, or the number of processes divided by a given num_stages.
    ``num_stages * num_replicas`` is the number of processes. 1: a step is one batch, whatever the number of devices."""

    num_microbatches: int | str = "auto"
    """Pieces that a replica's batch is split into along the batch dimension. ``"auto"``: searched, by what small ones
    take; where nothing can be searched four per stage, at most one per sample. More of them leave stages idle for less
    time, but make each piece of work smaller. The result is the same, except for modules with batch normalization,
    which see the statistics of a micro-batch."""

    schedule: str = "auto"
    """Order of the stages' forwards and backwards. ``"1f1b"``: backward as early as possible, so that a stage keeps
    activations of at most as many micro-batches as there are stages. ``"gpipe"``: all forwards, then all backwards;
    activations of all micro-batches are kept. ``"sliced_1f1b"``: 1F1B whose first and last micro-batches go through as
    two halves, for a shorter begin and end. ``"interleaved_1f1b"``: several stages a process, each with fewer layers.
    ``"zero_bubble"``: gradients of parameters wait, and fill the gaps. ``"auto"``: where a number is left open the
    fastest of all these by simulation, with as many micro-batches in flight as it pays and memory allows; else 1F1B."""

    partition: Any = "auto"
    """How layers are shared between stages, in contiguous runs. ``"auto"``: so that the simulated step is as short as
    possible. ``"uniform"``: equally many layers on each stage. ``"parameters"``: parameters as even as possible. A list
    of layer indices, such as ``[4, 8]``: those at which the second and later stages begin."""

    profile: str = "auto"
    """What layers are balanced by. ``"measured"``: the seconds that forward and backward of each take on this device
    for one micro-batch, which are measured at start for a few seconds; the plan then also predicts time and memory of
    each stage. ``"flops"``: their floating-point operations, counted without running anything, the same in every run.
    ``"auto"``: measured before a fit on several stages, else counted; counted also where measuring fails, with a
    warning."""

    cut_after: list[str] | None = None
    """Module paths after which to cut, such as ``["model.transformer.h.5"]``. None: the planner chooses. One
    path fewer than stages, in the order of the calls."""

    plan: str | None = None
    """A plan file (JSON) to run instead of planning anew; it decides stages, replicas, devices, micro-batches, schedule
    and partition, and is refused for another module or cluster. None: plan at start."""

    cluster: str | None = None
    """Devices and links to plan for: a file that describes them, or the name of an example. None or ``"auto"``: what
    the hosts tell of themselves; links between several servers are measured at start, for at most ten seconds.
    ``"measure"``: those on one server, too."""

    # Typed as a mapping that may be None, it could not be set on the command line: OmegaConf fails.
    split_batch: Any = None
    """For leaves of the batch whose meaning tracing cannot tell, by their keys joined by dots: the dimension that
    counts samples, or null for a leaf that goes whole to every micro-batch. None: traced."""

    loss_over: str = "microbatch"
    """What the loss is computed over. ``"microbatch"``: each micro-batch, then the weighted mean, which equals the
    loss of the whole batch where that is a mean over samples or tokens. ``"batch"``: for losses that compare samples
    (contrastive, with in-batch negatives), layers run by micro-batch and what follows them once on a replica's whole
    batch; this takes the GPipe schedule, which keeps the activations of all micro-batches."""

    verify: bool | str = "auto"
    """Whether to check, before training, that one micro-batch gives the same loss and gradients through all stages as
    through the uncut module. ``"auto"``: where memory allows it; True: in any case; False: not."""

    gather_after_fit: bool = True
    """Whether the module on rank 0 is made whole after ``fit``. False saves the memory; parameters of other stages then
    have no values on rank 0, and only checkpoints hold them all."""

    deferred_batch_norm: bool | str = False
    """Whether batch normalization updates its running statistics once per step, by the whole batch over all
    micro-batches and replicas, as on one device; each micro-batch is normalized by its own statistics all the same.
    ``"auto"`` and False: once per micro-batch (of replica 0), as under gradient accumulation."""

    merge_accumulation: bool | str = False
    """Whether the batches of an accumulation window (``accumulate_grad_batches``) run as one longer pipeline, which is
    filled and emptied once a window. ``training_step`` and ``backward`` of all but the last one then only keep the
    batch: what they give Lightning as the loss is NaN, which is neither logged nor propagated. Numbers, logged values
    and random draws are the same; batches of a window are on the device together, and where losses have weights of
    their own (tokens), so are gradients of two or three of them. ``"auto"`` and False: batch by batch."""

    shard_optimizer: bool | str = False
    """Whether the replicas of a stage share its optimizer state (ZeRO-1): each keeps that of a part of the parameters,
    updates these and sends them to the others after each step. Numbers are the same; with two replicas AdamW's state
    takes half the memory. ``"auto"`` and False: every replica keeps all of its stage's."""

    checkpoint_format: str = "consolidated"
    """What a checkpoint is. ``"consolidated"`` (and ``"auto"``): one file in the format of a plain module, which rank 0
    writes. ``"sharded"``: a folder on a file system that all machines share, which all ranks write at once, by
    torch.distributed.checkpoint; ``autopipe consolidate`` makes a plain file of it. ``"sharded_async"``: the same
    from a copy in host memory while training goes on; it is complete when the next one begins, or the run ends. Both
    forms are resumed by any layout, whatever this says."""

    recompute: bool | str = "auto"
    """Whether activations are computed again during backward to save memory. Only ``"auto"`` and False are accepted so
    far, and both do without; a module's own ``torch.utils.checkpoint`` works."""

    trace: str | None = None
    """A folder, on the machine of rank 0, for what steps 5 to 7 of a fit are measured to do beside what was predicted:
    a trace to open in Perfetto and a picture. Bubble, step time, samples per second, memory and bytes between stages
    then also go to the Trainer's loggers. None: nothing is measured."""

    replan: str | bool = "warn"
    """``"warn"``: where stages take more than 20 % longer or less than planned, by the median of 50 steps, say so once,
    with what a new plan would gain; only for plans of measured layers, not with NCCL. False: not."""

    start_method: str = "auto"
    """How Lightning starts the processes where no cluster's launcher does. ``"popen"``: it runs the script again.
    ``"fork"``, ``"spawn"``, ``"forkserver"``: from its own process, which has the trained weights afterwards.
    ``"auto"``: ``"fork"`` in notebooks, else ``"popen"``."""

    process_group_backend: str | None = None
    """Backend of torch.distributed, ``"gloo"`` or ``"nccl"``. None: NCCL on CUDA devices, else gloo."""

    timeout: float = 1800.0
    """Seconds that a process waits for another before the run fails. Shorter finds a lost process sooner, but must be
    longer than the slowest step, checkpoint and start of a worker."""


def register_configs() -> None:
    """Put `AutoPipeConfig` into Hydra's config store as ``strategy/autopipe_h``; calling it again changes nothing."""
    ConfigStore.instance().store(
        group=CONFIG_GROUP, name=CONFIG_NAME, node=AutoPipeConfig, provider="lightning_autopipe"
    )
