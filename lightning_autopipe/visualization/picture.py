"""Draws timelines as pictures, with matplotlib (the extra ``plot``)."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_autopipe.core.errors import ConfigurationError
from lightning_autopipe.core.files import write_whole
from lightning_autopipe.core.timeline import Timeline
from lightning_autopipe.visualization.lanes import Ranks

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMATS = ("png", "svg")
_DOTS_PER_INCH = 144
_STYLE = {
    # Text stays text: small files, and words that can be searched and copied.
    "svg.fonttype": "none",
    # Without it every run would give other ids.
    "svg.hashsalt": "lightning_autopipe",
    # The first one comes with the library and is measured; the others stand in where a viewer of SVG lacks it.
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial", "Helvetica"],
    # Names may hold a dollar sign.
    "text.parse_math": False,
    "font.size": 8,
}


def timeline_figure(timelines: Mapping[str, Timeline], *, ranks: Ranks = (), title: str = "") -> Figure:
    """One timeline, or several above each other on one axis of time, such as predicted above measured.

    A lane for each rank, its actions with the numbers of their micro-batches where they fit, grey where it is idle, and
    a line for each message that takes time.

    Args:
        timelines: by name; the name stands above each one, and may be empty.
        ranks: ``ranks[r][s]`` runs stage s of replica r; empty: as the timelines tell.
        title: of the whole picture.

    Raises:
        ConfigurationError: there is no timeline.
        ImportError: matplotlib is not installed.
        PlanError: a timeline does not tell which rank runs what.
    """
    if not timelines:
        raise ConfigurationError("a picture needs at least one timeline")
    with _plain_matplotlib():
        from lightning_autopipe.visualization._drawing import draw

        return draw(timelines, ranks, title)


def timeline_svg(timelines: Mapping[str, Timeline], *, ranks: Ranks = (), title: str = "") -> str:
    """The picture as SVG text: equal timelines give equal text. Arguments and errors as of `timeline_figure`."""
    return _rendered(timelines, ranks, title, "svg").decode("utf-8")


def save_picture(
    path: str | os.PathLike[str], timelines: Mapping[str, Timeline], *, ranks: Ranks = (), title: str = ""
) -> None:
    """Write the picture to a file, whole or not at all: PNG or SVG, as its name ends.

    Arguments and errors as of `timeline_figure`, and:

    Raises:
        ConfigurationError: the name ends in none of the two, or the file cannot be written.
    """
    picture_format = Path(path).suffix.lower().removeprefix(".")
    if picture_format not in FORMATS:
        raise ConfigurationError(f"a picture's file name ends in .png or .svg, got {os.fspath(path)!r}")
    write_whole(path, _rendered(timelines, ranks, title, picture_format))


def _rendered(timelines: Mapping[str, Timeline], ranks: Ranks, title: str, picture_format: str) -> bytes:
    figure = timeline_figure(timelines, ranks=ranks, title=title)
    nothing: Sequence[str] = ("Date", "Creator", "Format", "Type") if picture_format == "svg" else ("Software",)
    with _plain_matplotlib():
        buffer = io.BytesIO()
        figure.savefig(buffer, format=picture_format, dpi=_DOTS_PER_INCH, metadata=dict.fromkeys(nothing))
        return buffer.getvalue()


@contextmanager
def _plain_matplotlib() -> Iterator[None]:
    """The library with its own defaults, whatever the user has set, and those set again afterwards."""
    try:
        import matplotlib.style
    except ImportError as error:
        raise ImportError(
            "pictures of timelines need matplotlib, which cannot be imported: install it with "
            f"pip install 'lightning-autopipe[plot]' ({error})"
        ) from error
    with matplotlib.style.context(["default", _STYLE]):
        yield
