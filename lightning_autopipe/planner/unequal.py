"""One pipeline whose stages have unlike numbers of ranks: who takes which micro-batch, in which order, priced."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise

from lightning_autopipe.core.errors import ConfigurationError
from lightning_autopipe.core.mapping import DeviceMapping
from lightning_autopipe.core.partition import Partition
from lightning_autopipe.core.schedule import Action, Schedule
from lightning_autopipe.planner.cost import CostModel, Work
from lightning_autopipe.planner.links import LinkNetwork
from lightning_autopipe.planner.memory import stage_memory
from lightning_autopipe.planner.reduction import GradientBytes
from lightning_autopipe.planner.shares import share_microbatches
from lightning_autopipe.planner.workload import StageWork, StepWork, UnitWork
from lightning_autopipe.schedules._build import backward, forward

Windows = tuple[int, ...]
"""By stage, how many micro-batches of the whole pipeline a forward may be ahead of the next backward of its rank."""


def unequal_step_work(
    cost: CostModel,
    partition: Partition,
    mapping: DeviceMapping,
    *,
    network: LinkNetwork | None = None,
    num_microbatches: int,
    microbatch_size: float | None = None,
    windows: Windows | None = None,
    exchange_s: float = 0.0,
    optimizer_state_ratio: float = 2.0,
) -> StepWork:
    """One step of a pipeline whose stages may have unlike numbers of ranks, for `simulate`.

    The micro-batches are dealt to the ranks of each stage, in turn or by speed; a micro-batch goes from its rank on one
    stage to its rank on the next one. Each rank runs `windowed_lists`; gradients are summed over the ranks of a stage.

    Args:
        cost: of the layers.
        partition: layers of each stage.
        mapping: ranks of each stage.
        network: devices and links; None: devices like the profiled one, and whatever is sent is there at once.
        num_microbatches: of a step, over all ranks of a stage together.
        microbatch_size: samples; None: as profiled.
        windows: see `windowed_lists`; None: `default_windows`.
        exchange_s: what all ranks take to agree on one number at the step's end.
        optimizer_state_ratio: bytes of optimizer state for each byte of trainable parameters.

    Raises:
        ConfigurationError: a stage has more ranks than there are micro-batches, or windows do not fit the stages.
        PlanError: the partition is of other layers or another number of stages than the mapping.
    """
    counts = [len(ranks) for ranks in mapping.stage_ranks]
    gradient_bytes = GradientBytes(cost).of_stages(partition.cut_points)
    works: list[list[StageWork]] = []
    for stage_index, ranks in enumerate(mapping.stage_ranks):
        layers = partition.stage_layers(stage_index)
        memory = stage_memory(
            cost,
            layers,
            num_microbatches=num_microbatches,
            microbatch_size=microbatch_size,
            optimizer_state_ratio=optimizer_state_ratio,
        )
        works.append([])
        for rank in ranks:
            device = network.topology.devices[rank] if network else None
            forward_s, backward_s = (
                cost.action_s(work, layers, device=device, microbatch_size=microbatch_size)
                for work in (Work.FORWARD, Work.BACKWARD)
            )
            optimizer_s = cost.work_s(Work.OPTIMIZER, layers, device=device, microbatch_size=microbatch_size)
            unit = UnitWork(
                forward_s=forward_s,
                backward_s=backward_s,
                sent_bytes=cost.sent_bytes(layers.stop, microbatch_size=microbatch_size),
                gradient_bytes=cost.gradient_bytes(layers.start, microbatch_size=microbatch_size),
            )
            works[-1].append(
                StageWork(
                    units=(unit,),
                    optimizer_s=optimizer_s,
                    reduced_bytes=gradient_bytes[stage_index],
                    fixed_bytes=memory.fixed_bytes,
                    stash_bytes=memory.stash_bytes,
                    working_bytes=memory.working_bytes,
                )
            )
    owners = tuple(
        deal_microbatches(num_microbatches, [work.units[0].forward_s + work.units[0].backward_s for work in of_stage])
        for of_stage in works
    )
    lists = windowed_lists(owners, default_windows(counts) if windows is None else windows)
    # The first rank of each stage, then the second ones, as replicas follow each other.
    order = [(stage, index) for index in range(max(counts)) for stage, count in enumerate(counts) if index < count]
    return StepWork(
        stages=(tuple(works[stage][index] for stage, index in order),),
        schedules=(
            Schedule(
                name="1f1b",
                actions_by_rank=tuple(lists[stage][index] for stage, index in order),
                num_microbatches=num_microbatches,
            ),
        ),
        ranks=(tuple(mapping.stage_ranks[stage][index] for stage, index in order),),
        stage_indices=tuple(stage for stage, _ in order),
        network=network,
        tied_bytes=tuple(cost.tied_bytes(partition).items()),
        exchange_s=exchange_s,
    )


def deal_microbatches(num_microbatches: int, microbatch_s: Sequence[float]) -> tuple[int, ...]:
    """Which of a stage's ranks takes each micro-batch: alike ones in turn, faster ones more often, each at least one.

    Args:
        num_microbatches: of a step.
        microbatch_s: by rank, what a micro-batch takes there.

    Raises:
        ConfigurationError: there are more ranks than micro-batches.
    """
    if not all(seconds > 0 for seconds in microbatch_s):
        microbatch_s = [1.0] * len(microbatch_s)
    counts = share_microbatches(num_microbatches, microbatch_s, microbatch_s)
    turns = [((turn + 0.5) / count, owner) for owner, count in enumerate(counts) for turn in range(count)]
    return tuple(owner for _, owner in sorted(turns))


def default_windows(counts: Sequence[int]) -> Windows:
    """Windows that keep all ranks of the later stages busy, in whole turns; alike counts: as deep as plain 1F1B.

    Args:
        counts: ranks of each stage.

    Source:
        Tarnawski et al., *Piper*, NeurIPS 2021: a stage has as many micro-batches in flight as it and all later stages
        have ranks.
    """
    windows: list[int] = []
    num_later = 0
    for count in reversed(counts):
        windows.append(-(-num_later // count) * count)
        num_later += count
    return tuple(reversed(windows))


@lru_cache(maxsize=64)
def windowed_lists(owners: tuple[tuple[int, ...], ...], windows: Windows) -> tuple[tuple[tuple[Action, ...], ...], ...]:
    """1F1B for stages with unlike numbers of ranks.

    Before the backward of micro-batch m a rank of stage s runs those of its forwards that are of micro-batches up to
    m + ``windows[s]``, and no others. With d ranks that take turns this is 1F1B with ``windows[s] // d`` forwards as
    warm-up. Two ranks, then one, windows (2, 0), forwards and backwards alike long::

        stage 0, rank 0 | F0 F2 .  B0 F4 .  .  B2 .  .  .  B4
        stage 0, rank 1 | F1 F3 .  .  .  B1 .  .  .  B3 .  .
        stage 1         | .  F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 .

    Windows never rise from stage to stage, so that nothing waits for ever. For if actions waited for each other in a
    circle: it goes from a backward of j on stage s to a later forward of the same rank, of k > j + ``windows[s]``;
    forwards that wait for it are of k or later, on s or later stages; one of those, of k', stands before a backward of
    j' on its rank, on a stage s' >= s, so k' <= j' + ``windows[s']``, hence j' > j. The circle would never close.

    Args:
        owners: ``owners[s][m]`` is the rank, counted within stage s, that has micro-batch m.
        windows: of each stage.

    Returns:
        ``[s][i]``: what rank i of stage s computes, in order.

    Raises:
        ConfigurationError: there is not one window >= 0 for each stage, or they rise.
    """
    if len(windows) != len(owners) or any(window < 0 for window in windows):
        raise ConfigurationError(f"windows={tuple(windows)}: give each of the {len(owners)} stages one, 0 or more")
    if any(later > before for before, later in pairwise(windows)):
        raise ConfigurationError(
            f"windows={tuple(windows)}: a stage is to run further ahead than the one before it, from which it gets its "
            "micro-batches; set windows that never rise"
        )
    return tuple(
        tuple(_windowed_list(stage_index, of_stage, rank, window) for rank in range(max(of_stage) + 1))
        for stage_index, (of_stage, window) in enumerate(zip(owners, windows, strict=True))
    )


def _windowed_list(stage_index: int, owners: Sequence[int], rank: int, window: int) -> tuple[Action, ...]:
    own = [index for index, owner in enumerate(owners) if owner == rank]
    actions: list[Action] = []
    num_forwards = 0
    for microbatch_index in own:
        while num_forwards < len(own) and own[num_forwards] <= microbatch_index + window:
            actions.append(forward(stage_index, own[num_forwards]))
            num_forwards += 1
        actions.append(backward(stage_index, microbatch_index))
    return tuple(actions)
