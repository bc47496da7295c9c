"""What ``autopipe plan`` plans from: what layers cost, and the devices."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lightning_autopipe.cli.numbers import whole_number
from lightning_autopipe.cluster import RankPlace, describe_host, find_cluster_file, join_hosts, load_topology
from lightning_autopipe.core.cluster import ClusterTopology, is_same_model
from lightning_autopipe.core.errors import ConfigurationError
from lightning_autopipe.core.profile import ModelProfile
from lightning_autopipe.profile_files import load_profile
from lightning_autopipe.profile_files.load import UNNAMED_DEVICE
from lightning_autopipe.schedules.gpipe import NAME as GPIPE
from lightning_autopipe.schedules.sliced import NAME as SLICED

Auto = Literal["auto"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What the layers cost, and what that says of the batch."""

    profile: ModelProfile
    source: str
    """The profile's file, or the recipe."""
    batch_size: float | None
    """Samples of one replica's batch; None where it is not known."""
    min_samples: int = 1
    optimizer_state_ratio: float = 2.0
    cuts: tuple[int, ...] | None = None
    """That the recipe asks for."""
    schedule: str | None = None
    """That the recipe's loss needs."""

    @property
    def module_fingerprint(self) -> str:
        """Of the module, where the profile knows it; else what no module has."""
        return self.profile.module_fingerprint or f"unknown, of {self.source}"

    def notes(self, topology: ClusterTopology) -> list[str]:
        """What is taken for granted of devices that were not profiled."""
        profiled = list(dict.fromkeys(table.device_model for table in self.profile.times))
        found = dict.fromkeys(device.model for device in topology.devices)
        others = [
            name
            for name in found
            if not any(is_same_model(name, model) or is_same_model(model, name) for model in profiled)
        ]
        if not others:
            return []
        measured_on = ", ".join(profiled) or UNNAMED_DEVICE
        return [f"times are those of {measured_on}; {', '.join(others)}: by the speeds that the cluster says"]


def costs_of_profile(arguments: argparse.Namespace) -> Costs:
    """What a profile's file says.

    Raises:
        ConfigurationError: an option is wrong or missing.
        PlanError: the file is not there, or no profile.
    """
    for name in ("overrides", "save_profile"):
        if getattr(arguments, name):
            raise ConfigurationError(f"{arguments.overrides or '--save-profile'} goes with --recipe")
    size = arguments.microbatch_size
    profile = load_profile(
        arguments.profile,
        time_unit=arguments.time_unit,
        microbatch_size=None if size is None else whole_number("microbatch-size", size),
        device_model=arguments.device_model,
    )
    batch_size: float | None = None
    if arguments.batch_size is not None:
        batch_size = whole_number("batch-size", arguments.batch_size)
    elif arguments.global_batch_size is None:
        sizes = {table.microbatch_size for table in profile.times} or {profile.microbatch_size or 1.0}
        if len(sizes) > 1 or arguments.microbatches == "auto":
            measured = ", ".join(f"{size:g}" for size in sorted(sizes))
            raise ConfigurationError(
                "the profile does not say how many samples a batch has: give --batch-size (of each replica) or "
                f"--global-batch-size (of a step); measured are micro-batches of {measured} samples"
            )
        batch_size = sizes.pop() * whole_number("microbatches", arguments.microbatches)
    return Costs(profile=profile, source=Path(arguments.profile).name, batch_size=batch_size)


def costs_of_recipe(arguments: argparse.Namespace, topology: ClusterTopology) -> Costs:
    """What is measured of a recipe's training step in this process.

    Raises:
        ConfigurationError: an option is wrong.
        AutoPipeError: the step cannot be traced or measured.
    """
    for name in ("time_unit", "microbatch_size", "device_model"):
        if getattr(arguments, name) is not None:
            raise ConfigurationError(f"--{name.replace('_', '-')} goes with --profile")
    if arguments.batch_size is not None:
        raise ConfigurationError("a recipe's batch is what its data say: leave out --batch-size, set data.batch_size=N")
    from lightning_autopipe.cli.recipe_profile import measure_recipe

    stages, microbatches = arguments.stages, arguments.microbatches
    step = measure_recipe(
        arguments.recipe,
        arguments.overrides,
        num_stages=topology.world_size if stages == "auto" else whole_number("stages", stages),
        num_microbatches=None if microbatches == "auto" else whole_number("microbatches", microbatches),
        with_halves=arguments.slices and arguments.schedule in ("auto", SLICED),
    )
    return Costs(
        profile=step.profile,
        source=f"recipe {arguments.recipe}",
        batch_size=step.batch_size,
        min_samples=step.min_samples,
        optimizer_state_ratio=step.optimizer_state_ratio,
        cuts=step.cuts,
        schedule=GPIPE if step.is_over_batch else None,
    )


def cluster_to_plan_for(arguments: argparse.Namespace) -> tuple[ClusterTopology, tuple[str, ...]]:
    """The devices and links, and what of this machine had to be assumed.

    Raises:
        ConfigurationError: the cluster's file is wrong, or this machine has fewer devices.
    """
    if arguments.cluster is not None:
        return load_topology(find_cluster_file(arguments.cluster)), ()
    host = describe_host(use_gpus=arguments.recipe is None or not _asks_for_cpu(arguments.overrides))
    num_devices = len(host.devices)
    is_cpu = num_devices == 1 and not host.devices[0].uuid
    wanted = num_devices if arguments.devices is None else whole_number("devices", arguments.devices)
    if wanted > num_devices and not is_cpu:
        raise ConfigurationError(
            f"--devices {wanted} is more than the {num_devices} devices of this machine; describe others in a file for "
            "--cluster"
        )
    # Processes on one CPU share it.
    places = [RankPlace(host=host, device_index=0 if is_cpu else index) for index in range(wanted)]
    return join_hosts(places), host.notes


def _asks_for_cpu(overrides: list[str]) -> bool:
    return any(override in ("trainer=cpu", "trainer.accelerator=cpu") for override in overrides)
