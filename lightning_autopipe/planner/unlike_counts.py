"""Candidates of a search whose stages have unlike numbers of ranks."""

from __future__ import annotations

from lightning_autopipe.core.errors import ConfigurationError
from lightning_autopipe.core.schedule_spec import ScheduleSpec
from lightning_autopipe.planner.candidate import Candidate
from lightning_autopipe.planner.links import LinkNetwork
from lightning_autopipe.planner.microbatches import microbatch_counts
from lightning_autopipe.planner.replica_counts import ReplicaCountChoice, choose_replica_counts
from lightning_autopipe.planner.search_space import SearchSpace
from lightning_autopipe.planner.simulator import simulate
from lightning_autopipe.planner.unequal import default_windows, unequal_step_work
from lightning_autopipe.schedules.one_f_one_b import NAME as ONE_F_ONE_B


def unlike_count_candidates(space: SearchSpace, network: LinkNetwork) -> list[Candidate]:
    """The best choice with unlike numbers for each of some numbers of micro-batches; none where equal ones are as good.

    All ranks of a stage share one batch, so a step has one number of micro-batches. The schedule is 1F1B, whose depths
    are then windows, as `windowed_lists` has them.

    Args:
        space: of the search; its batch is that of a step.
        network: its devices and links, with the memory that may be filled.
    """
    if space.cuts is not None or space.partition != "auto" or space.schedule not in ("auto", ONE_F_ONE_B):
        return []
    if space.num_replicas != "auto":
        return []
    numbers = microbatch_counts(
        space.cost,
        batch_size=space.batch_size,
        num_stages=space.topology.world_size,
        min_samples=space.min_samples,
        num_wanted=None if space.num_microbatches == "auto" else space.num_microbatches,
    )
    found = []
    for number in numbers:
        try:
            choice = choose_replica_counts(
                space.cost,
                network,
                num_microbatches=number,
                num_stages=space.num_stages,
                equal=(),
                microbatch_size=space.batch_size / number,
                exchange_s=space.exchange_s,
                optimizer_state_ratio=space.optimizer_state_ratio,
            )
        except ConfigurationError:  # it does not fit the memory, with this number
            continue
        if len(set(choice.counts)) > 1:
            found.append(_candidate(space, network, choice, number))
    return found


def _candidate(
    space: SearchSpace, network: LinkNetwork, choice: ReplicaCountChoice, num_microbatches: int
) -> Candidate:
    plain_windows = default_windows(choice.counts)
    size = space.batch_size / num_microbatches
    plain_s = choice.step_s
    if choice.windows != plain_windows:
        plain = unequal_step_work(
            space.cost,
            choice.partition,
            choice.mapping,
            network=network,
            num_microbatches=num_microbatches,
            microbatch_size=size,
            exchange_s=space.exchange_s,
            optimizer_state_ratio=space.optimizer_state_ratio,
        )
        plain_s = simulate(plain).step_s
    return Candidate(
        mapping=choice.mapping,
        partition=choice.partition,
        schedule=ScheduleSpec(name=ONE_F_ONE_B, depths=() if choice.windows == plain_windows else choice.windows),
        num_microbatches=num_microbatches,
        microbatch_size=size,
        num_samples=space.batch_size,
        work=choice.step_work,
        step_s=choice.step_s,
        plain_step_s=plain_s,
    )
