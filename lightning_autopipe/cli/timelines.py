"""What commands that show a timeline have in common."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_autopipe.core.cluster import ClusterTopology
from lightning_autopipe.core.errors import ConfigurationError
from lightning_autopipe.core.timeline import Timeline
from lightning_autopipe.visualization import save_chrome_trace, save_picture


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownStep:
    """A simulated step, and what is needed to show it."""

    timeline: Timeline
    title: str
    boundary_bytes: Sequence[tuple[float, float]] = ()
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
            save_picture(arguments.picture, {"predicted": step.timeline}, title=step.title)
        except ImportError as error:
            raise ConfigurationError(str(error)) from error
    if arguments.trace is not None:
        save_chrome_trace(
            arguments.trace,
            step.timeline,
            cluster=step.cluster,
            boundary_bytes=step.boundary_bytes,
            title=step.title,
        )


def step_title(schedule_name: str, num_stages: int, num_replicas: int, num_microbatches: int) -> str:
    """``1f1b · 4 stages × 2 replicas · 8 micro-batches``."""
    stages = f"{num_stages} stage{'' if num_stages == 1 else 's'}"
    replicas = f" × {num_replicas} replicas" if num_replicas > 1 else ""
    microbatches = f"{num_microbatches} micro-batch{'' if num_microbatches == 1 else 'es'}"
    return f"{schedule_name} · {stages}{replicas} · {microbatches}"
