"""Interleaved 1F1B: several stages a rank, so that a pipeline fills and drains in less time."""

from __future__ import annotations

from lightning_autopipe.core.errors import ConfigurationError
from lightning_autopipe.core.schedule import Schedule
from lightning_autopipe.schedules._build import backward, check_counts, forward

NAME = "interleaved_1f1b"


def interleaved_1f1b(num_ranks: int, num_microbatches: int, stages_per_rank: int) -> Schedule:
    """1F1B in which each rank runs several stages, stage s on rank ``s % num_ranks``.

    Stages are a v-th of a rank's work, and so is what the last rank waits for at the begin, and the first one at the
    end. Micro-batches go in *rounds* of at least R (all of them, where there are fewer): a rank runs the forwards of a
    round on its first stage, then on its second one, and so on; backwards the other way round. Micro-batches that are
    no multiple of R are spread over the rounds, so that none is too short to keep all ranks busy. Warm-up are the
    forwards of the longest round on all stages but the last, and twice as many as ranks follow, the second of which
    hides what a message takes; then one forward and one backward in turn. One stage a rank is 1F1B.

    Two ranks with two stages each, three micro-batches, every action one slot long::

        rank 0 (stages 0, 2) | 0F0 0F1 0F2 2F0 2F1 2F2 2B0 .   2B1 .   2B2 0B0 0B1 0B2
        rank 1 (stages 1, 3) | .   1F0 1F1 1F2 3F0 3B0 3F1 3B1 3F2 3B2 1B0 1B1 1B2 .

    Args:
        num_ranks: R.
        num_microbatches: M.
        stages_per_rank: v.

    Raises:
        ConfigurationError: a number is below 1, or there is one rank for several stages.

    Source:
        Narayanan et al., *Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM*, SC 2021
        (for multiples of R).
    """
    check_counts(num_ranks=num_ranks, num_microbatches=num_microbatches, stages_per_rank=stages_per_rank)
    if num_ranks == 1 and stages_per_rank > 1:
        raise ConfigurationError(
            f"stages_per_rank={stages_per_rank} needs at least 2 ranks in a pipeline, got 1: a rank that runs all "
            "stages has nothing to interleave; set stages_per_rank to 1"
        )
    rounds = _rounds(num_ranks, num_microbatches)
    of_rank = range(stages_per_rank)
    forwards = [(turn, index) for members in rounds for turn in of_rank for index in members]
    backwards = [(turn, index) for members in rounds for turn in reversed(of_rank) for index in members]
    actions_by_rank = []
    for rank in range(num_ranks):
        todo = [forward(turn * num_ranks + rank, index) for turn, index in forwards]
        num_following = (num_ranks - 1 - rank) * (1 if stages_per_rank == 1 else 2)
        num_warmup = (stages_per_rank - 1) * max(map(len, rounds)) + num_following
        actions = todo[:num_warmup]
        for position, (turn, index) in enumerate(backwards):
            actions += todo[num_warmup + position : num_warmup + position + 1]
            actions.append(backward(turn * num_ranks + rank, index))
        actions_by_rank.append(tuple(actions))
    return Schedule(
        name=NAME,
        actions_by_rank=tuple(actions_by_rank),
        num_microbatches=num_microbatches,
        stages_per_rank=stages_per_rank,
    )


def _rounds(num_ranks: int, num_microbatches: int) -> list[range]:
    """Micro-batches that go through a rank's stages together: as many rounds as can be full, of nearly equal size."""
    num_rounds = max(1, num_microbatches // num_ranks)
    bounds = [num_microbatches * index // num_rounds for index in range(num_rounds + 1)]
    return [range(bounds[index], bounds[index + 1]) for index in range(num_rounds)]
