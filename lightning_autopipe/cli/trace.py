"""``autopipe trace FOLDER``: shows what a run with ``trace=`` has measured against its plan."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_autopipe.cli.console import make_console
from lightning_autopipe.core.errors import ConfigurationError
from lightning_autopipe.core.quantities import duration_text
from lightning_autopipe.visualization.comparison import RankSeconds, comparison_table

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

_TRACE_NAME = "trace.json"


def add_parser(subparsers: Subparsers) -> None:
    """Add this command."""
    parser = subparsers.add_parser(
        "trace",
        help="show a measured step against its plan",
        description="Shows what a run with AutoPipeStrategy(trace=FOLDER) has measured: forwards, backwards and idle "
        "time of each rank, against the plan.",
    )
    parser.add_argument("folder", metavar="FOLDER", help="what trace= named")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Show it.

    Raises:
        ConfigurationError: there is no trace of a run.
    """
    other = _read(Path(arguments.folder))
    console = make_console()
    for name, figures in other["timelines"].items():
        text = f"{name}: {duration_text(figures['step_s'])}, bubble {100 * figures['bubble_fraction']:.1f} %"
        console.print(text, markup=False, highlight=False)
    rows = [RankSeconds(**row) for row in other["ranks"]]
    console.print(comparison_table(rows, title=f"{other['title']} · step {other['typical_step']}"))
    error, drift = duration_text(other["clock_error_s"]), duration_text(other["clock_drift_s"])
    console.print(f"clocks of ranks agree to {error}; a drift of {drift} was taken out", highlight=False)


def _read(folder: Path) -> dict[str, Any]:
    path = folder / _TRACE_NAME
    try:
        other = json.loads(path.read_text(encoding="utf-8"))["otherData"]
        rows, *_ = other["ranks"], other["timelines"], other["typical_step"], other["clock_error_s"]
        [RankSeconds(**row) for row in rows]
    except OSError as error:
        raise ConfigurationError(
            f"{path}: cannot be read ({error.strerror or error}); give the folder that a run with trace= has written"
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigurationError(f"{path}: is no trace that a run with trace= has written ({error!r})") from error
    return dict(other)
