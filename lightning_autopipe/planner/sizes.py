"""How many stages, replicas and micro-batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lightning_autopipe.core.errors import ConfigurationError

Auto = Literal["auto"]

MICROBATCHES_PER_STAGE = 4
"""An automatic number of micro-batches is this many a stage: the bubble is then about a fifth of the step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineSizes:
    """The three numbers that a plan is made for."""

    num_stages: int
    num_replicas: int
    num_microbatches: int
    """Micro-batches a step and replica."""


def resolve_sizes(
    *,
    num_stages: int | Auto = "auto",
    num_replicas: int | Auto = "auto",
    num_microbatches: int | Auto = "auto",
    world_size: int,
    batch_size: int,
) -> PipelineSizes:
    """Fills in what is ``"auto"``, and checks that stages times replicas are all processes.

    With both automatic every process is a stage of one replica; with one given, the other follows from the world size.
    Micro-batches are min(4 * num_stages, batch_size). A given number may exceed the batch: the surplus stays empty.

    Args:
        num_stages: as the user set it.
        num_replicas: as the user set it.
        num_microbatches: as the user set it.
        world_size: number of processes.
        batch_size: samples in one replica's batch.

    Raises:
        ConfigurationError: a number is below 1, or stages times replicas differ from the world size.
    """
    for name, value in (
        ("num_stages", num_stages),
        ("num_replicas", num_replicas),
        ("num_microbatches", num_microbatches),
    ):
        if value != "auto":
            _check_count(name, value, f'an integer >= 1 or "auto"; set {name} on the strategy')
    _check_count("world_size", world_size, "an integer >= 1")
    _check_count("batch_size", batch_size, "an integer >= 1")
    if num_stages == "auto":
        if num_replicas == "auto":
            num_replicas = 1
        num_stages = _divide(world_size, "num_replicas", num_replicas)
    elif num_replicas == "auto":
        num_replicas = _divide(world_size, "num_stages", num_stages)
    if num_stages * num_replicas != world_size:
        raise ConfigurationError(
            f"num_stages={num_stages} x num_replicas={num_replicas} needs {num_stages * num_replicas} processes, but "
            f"{world_size} were started: set the Trainer's devices and num_nodes to match, or leave one of the two "
            '"auto"'
        )
    automatic = min(MICROBATCHES_PER_STAGE * num_stages, batch_size)
    return PipelineSizes(
        num_stages=num_stages,
        num_replicas=num_replicas,
        num_microbatches=automatic if num_microbatches == "auto" else num_microbatches,
    )


def _check_count(name: str, value: object, allowed: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigurationError(f"{name} must be {allowed}; got {value!r}")


def _divide(world_size: int, name: str, value: int) -> int:
    if world_size % value:
        divisors = ", ".join(str(number) for number in range(1, world_size + 1) if world_size % number == 0)
        raise ConfigurationError(
            f"{name}={value} does not divide the {world_size} processes: every process runs one stage of one replica; "
            f"set {name} to one of {divisors}, or start a multiple of {value} processes (the Trainer's devices and "
            "num_nodes)"
        )
    return world_size // value
