"""The processes of a run, as they introduce themselves to each other, and whether they fit together."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from lightning_autopipe.core.errors import ConfigurationError
from lightning_autopipe.runtime.liveness import ProcessIdentity


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One process, as it introduces itself to the others."""

    global_rank: int
    world_size: int
    node_rank: int
    local_rank: int
    num_nodes: int
    """What the Trainer was told."""
    num_devices: int
    """The Trainer's devices on this node."""
    backend: str
    """Of the default process group."""
    accelerator_id: str | None = None
    """Which accelerator, among those of all nodes; None on a CPU."""
    settings: dict[str, str] = field(default_factory=dict)
    """What the user set, by name, as text: the same on all processes."""
    host: str = field(default_factory=socket.gethostname)
    process: str = field(default_factory=lambda: f"{os.getpid()}")
    identity: ProcessIdentity = field(default_factory=ProcessIdentity.of_this_process)

    def to_json(self) -> str:
        """As text for a store."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Member:
        """What `to_json` wrote."""
        values = json.loads(text)
        return cls(**{**values, "identity": ProcessIdentity(**values["identity"])})

    def __str__(self) -> str:
        return (
            f"global rank {self.global_rank} (node {self.node_rank}, local rank {self.local_rank}, process "
            f"{self.process} on {self.host})"
        )


def check_members(members: Sequence[Member]) -> None:
    """Check that the processes of a run fit together; all of them find the same error.

    Args:
        members: By global rank.

    Raises:
        ConfigurationError: they do not.
    """
    check_world_size(members)
    first = members[0]
    for member in members:
        for name, value in first.settings.items():
            if member.settings.get(name) != value:
                raise ConfigurationError(
                    f"{name} is {member.settings.get(name)} on {member}, but {value} on {first}: give the strategy the "
                    "same options, and the same plan file, on all processes"
                )
    by_node: dict[int, list[Member]] = {}
    for member in members:
        by_node.setdefault(member.node_rank, []).append(member)
    for member in members:
        if member.num_nodes != len(by_node):
            raise ConfigurationError(
                f"the processes run on {len(by_node)} nodes, but the Trainer's num_nodes is {member.num_nodes} on "
                f"{member}: set num_nodes={len(by_node)}"
            )
    for node_rank, on_node in sorted(by_node.items()):
        _check_node(node_rank, on_node)
    _check_accelerators(members)


def check_world_size(members: Sequence[Member]) -> None:
    """Check that processes of a run count the same number of them.

    Raises:
        ConfigurationError: they do not.
    """
    first = members[0]
    for member in members:
        if member.world_size != first.world_size:
            raise ConfigurationError(
                f"world size is {member.world_size} for {member}, but it is {first.world_size} for {first}: start all "
                "processes by one launcher. Lightning's own takes the same number of devices on every node; torchrun "
                "starts unlike numbers"
            )


def _check_node(node_rank: int, members: Sequence[Member]) -> None:
    local_ranks = sorted(member.local_rank for member in members)
    if local_ranks != list(range(len(members))):
        raise ConfigurationError(
            f"the {len(members)} processes of node {node_rank} have the local ranks {local_ranks} and not 0 to "
            f"{len(members) - 1}: {'; '.join(map(str, members))}. Each needs a local rank of its own (LOCAL_RANK, or "
            "SLURM_LOCALID), and each machine a node rank of its own (NODE_RANK, GROUP_RANK or SLURM_NODEID)"
        )
    for member in members:
        if member.num_devices not in (1, len(members)):
            raise ConfigurationError(
                f"on node {node_rank} the launcher started {len(members)} processes, but the Trainer has "
                f"{member.num_devices} devices there: set devices={len(members)}, or start {member.num_devices} "
                "processes (torchrun --nproc-per-node, srun --ntasks-per-node)"
            )


def _check_accelerators(members: Sequence[Member]) -> None:
    by_accelerator: dict[str, Member] = {}
    for member in members:
        if member.backend != "nccl" or member.accelerator_id is None:
            continue
        other = by_accelerator.setdefault(member.accelerator_id, member)
        if other is not member:
            raise ConfigurationError(
                f"{other} and {member} run on one GPU ({member.accelerator_id}), which NCCL refuses: set "
                "process_group_backend='gloo', or give each process a GPU of its own (devices)"
            )
