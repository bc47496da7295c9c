"""``autopipe cluster [FILE]``: shows a cluster."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from lightning_autopipe.cli.console import make_console, print_notes
from lightning_autopipe.cluster import (
    describe_host,
    example_names,
    find_cluster_file,
    load_topology,
    local_topology,
    save_topology,
)
from lightning_autopipe.visualization.cluster_tables import device_table, link_table, server_table, topology_tree

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

_MAX_ROWS = 40


def add_parser(subparsers: Subparsers) -> None:
    """Add this command."""
    parser = subparsers.add_parser(
        "cluster",
        help="show servers, devices and links of a cluster file, or of this machine",
        description="Shows the servers, devices and links of a cluster file, or those of this machine.",
        epilog=f"Examples: {', '.join(example_names())}.",
    )
    parser.add_argument("file", nargs="?", metavar="FILE", help="a YAML or JSON file, or the name of an example")
    parser.add_argument("-o", "--output", metavar="FILE", help="also write it to a file (.yaml or .json), to be edited")
    parser.add_argument("--all", action="store_true", help="all rows of long tables")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Show what was asked for.

    Raises:
        ConfigurationError: the file is not there, or wrong.
    """
    console = make_console()
    notes: tuple[str, ...] = ()
    if arguments.file is None:
        host = describe_host()
        topology, notes = local_topology(host), host.notes
    else:
        topology = load_topology(find_cluster_file(arguments.file))
    if arguments.output is not None:
        save_topology(topology, arguments.output)
    max_rows = max(topology.world_size, len(topology.links)) if arguments.all else _MAX_ROWS
    for table in (server_table, device_table, link_table):
        if table is not link_table or topology.links:
            console.print(table(topology, max_rows=max_rows))
    console.print(topology_tree(topology))
    print_notes(console, notes)
