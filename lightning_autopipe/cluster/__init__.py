"""Devices and links of a cluster: from a file, from what hosts tell of themselves, and from measurement.

Importing this package imports no torch; `lightning_autopipe.cluster.measure`, which does, is imported by name.
"""

from __future__ import annotations

from lightning_autopipe.cluster.discovery import describe_host, local_topology
from lightning_autopipe.cluster.examples import example_names, find_cluster_file
from lightning_autopipe.cluster.flows import Flow, FlowTime, MeasuredRound, Round, fit_flow, measurement_rounds
from lightning_autopipe.cluster.hosts import HostDescription, HostDevice, RankPlace, join_hosts
from lightning_autopipe.cluster.measured import SharedFlow, measured_topology, shared_flows
from lightning_autopipe.cluster.speeds import relative_speeds, with_speeds
from lightning_autopipe.cluster.synthetic import SERVER_KINDS, ServerKind, synthetic_cluster
from lightning_autopipe.cluster.topology_file import load_topology, save_topology, topology_from_text

__all__ = [
    "SERVER_KINDS",
    "Flow",
    "FlowTime",
    "HostDescription",
    "HostDevice",
    "MeasuredRound",
    "RankPlace",
    "Round",
    "ServerKind",
    "SharedFlow",
    "describe_host",
    "example_names",
    "find_cluster_file",
    "fit_flow",
    "join_hosts",
    "load_topology",
    "local_topology",
    "measured_topology",
    "measurement_rounds",
    "relative_speeds",
    "save_topology",
    "shared_flows",
    "synthetic_cluster",
    "topology_from_text",
    "with_speeds",
]
