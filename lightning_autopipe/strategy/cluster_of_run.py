"""Devices and links of the run's own processes."""

from __future__ import annotations

import os

import torch

from lightning_autopipe.cluster import (
    RankPlace,
    describe_host,
    find_cluster_file,
    join_hosts,
    load_topology,
    measured_topology,
)
from lightning_autopipe.cluster.measure import measure_links
from lightning_autopipe.core.cluster import ClusterTopology
from lightning_autopipe.core.errors import AutoPipeError, ConfigurationError
from lightning_autopipe.strategy.communicator import Communicator
from lightning_autopipe.strategy.environment import accelerator_id

MEASURE = "measure"
"""Value of ``cluster`` that measures links also where all processes are on one server."""

_MEASURING_BUDGET_S = 10.0


def discovered_topology(communicator: Communicator, device: torch.device) -> ClusterTopology:
    """What each rank's host tells of itself, joined. Collective over all ranks.

    Raises:
        ConfigurationError: hosts that do not fit together; on every rank alike.
    """
    own: RankPlace | str
    try:
        host = describe_host(use_gpus=device.type == "cuda")
        uuid = accelerator_id(device)
        index = 0 if uuid is None else host.device_index(uuid.removeprefix("GPU "))
        own = RankPlace(host=host, device_index=index)
    except AutoPipeError as error:
        own = str(error)
    told = communicator.gather_in_world(own)
    places = [place for place in told if isinstance(place, RankPlace)]
    if len(places) < len(told):
        raise ConfigurationError(next(problem for problem in told if isinstance(problem, str)))
    return join_hosts(places)


def given_topology(cluster: str | os.PathLike[str] | ClusterTopology, world_size: int) -> ClusterTopology:
    """The topology that a user gave.

    Raises:
        ConfigurationError: its file is wrong, or it has another number of devices than there are processes.
    """
    if not isinstance(cluster, ClusterTopology):
        cluster = load_topology(find_cluster_file(os.fspath(cluster)))
    if cluster.world_size != world_size:
        raise ConfigurationError(
            f"cluster= describes {cluster.world_size} devices, but {world_size} processes were started, one for each "
            "device: describe as many, or set the Trainer's devices and num_nodes to match"
        )
    return cluster


def links_measured(
    topology: ClusterTopology, communicator: Communicator, device: torch.device, *, timeout_s: float
) -> ClusterTopology:
    """The same devices with links as they are measured now. Collective over all ranks.

    Raises:
        PipelineRuntimeError: a rank did not answer in time.
    """
    is_nccl = device.type == "cuda" and torch.distributed.get_backend() == "nccl"
    measured = measure_links(
        [one.server for one in topology.devices],
        group=None if is_nccl else communicator.world_group,
        device=device if is_nccl else "cpu",
        budget_s=_MEASURING_BUDGET_S,
        timeout_s=min(timeout_s, 30.0),
    )
    return measured_topology(topology, measured)
