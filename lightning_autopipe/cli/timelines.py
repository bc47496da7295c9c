"""What commands that show a timeline have in common."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_autopipe.core.cluster import ClusterTopology
from lightning_autopipe.core.errors import ConfigurationError
from lightning_autopipe.core.schedule import Schedule
from lightning_autopipe.core.timeline import Timeline
from lightning_autopipe.visualization import LinkUse, save_chrome_trace, save_picture


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownStep:
    """A simulated step, and what is needed to show it."""

    timeline: Timeline
    title: str
    schedules: tuple[Schedule, ...]
    """Of each replica."""
    ranks: tuple[tuple[int, ...], ...] = ()
    """``ranks[r][s]`` runs stage s of replica r; empty: as the timeline tells."""
    boundary_bytes: Sequence[tuple[float, float]] = ()
    uses: tuple[LinkUse, ...] = ()
    """Of links, or of the ways between ranks where links are not known."""
    cluster: ClusterTopology | None = None


def add_file_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that write a timeline to files."""
    parser.add_argument("--picture", metavar="FILE", help="draw the timeline into a file, .png or .svg")
    parser.add_argument("--trace", metavar="FILE", help="write it as a trace (JSON), to be opened in ui.perfetto.dev")


def write_files(arguments: argparse.Namespace, step: ShownStep) -> None:
    """Write what those options ask for.

    Raises:
        ConfigurationError: a file cannot be written, its name has a wrong ending, or matplotlib is not installed.
    """
    if arguments.picture is not None:
        try:
            save_picture(arguments.picture, {"predicted": step.timeline}, ranks=step.ranks, title=step.title)
        except ImportError as error:
            raise ConfigurationError(str(error)) from error
    if arguments.trace is not None:
        save_chrome_trace(
            arguments.trace,
            step.timeline,
            ranks=step.ranks,
            cluster=step.cluster,
            boundary_bytes=step.boundary_bytes,
            title=step.title,
        )
