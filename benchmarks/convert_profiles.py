"""Turns profile files of public planners into this project's own JSON, for the benchmarks.

Reads every text graph and JSON file below DIR; what is in the folders `dapple`, `pipedream` and `piper` is named after
where those are from. Writes `FOLDER-NAME.json` for each, and a list of them.

Run: python benchmarks/convert_profiles.py DIR [--to FOLDER] [--time-unit FOLDER/NAME=UNIT ...]
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

from lightning_autopipe.core import AutoPipeError, ModelProfile
from lightning_autopipe.core.files import write_whole
from lightning_autopipe.profile_files import load_profile

FOLDER = Path(__file__).parent / "profiles"
SUFFIXES = (".txt", ".json")


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where a folder's files are from."""

    device_model: str
    text: str


SOURCES = {
    "dapple": Source(
        device_model="V100 (DAPPLE)",
        text="[AlibabaPAI/DAPPLE](https://github.com/AlibabaPAI/DAPPLE), `profiling_results/`: Fan et al., PPoPP 2021",
    ),
    "pipedream": Source(
        device_model="GPU of PipeDream",
        text="[msr-fiddle/pipedream](https://github.com/msr-fiddle/pipedream), `profiler/` (MIT): Narayanan et al., "
        "SOSP 2019; a sample is the profiled minibatch",
    ),
    "piper": Source(
        device_model="GPU of Piper",
        text="[msr-fiddle/piper](https://github.com/msr-fiddle/piper), `inputs/` (MIT): Tarnawski et al., NeurIPS "
        "2021; one device, without recomputation, a third of the time taken for the forward",
    ),
}
TIME_UNITS = {"piper/resnet": "ms"}
"""Of files whose times are in another unit than their form has; this one was made from a profile of PipeDream's."""


def converted(path: Path, time_units: dict[str, str]) -> ModelProfile:
    folder = path.parent.name
    source = SOURCES.get(folder)
    return load_profile(
        path,
        time_unit=time_units.get(f"{folder}/{path.stem}"),
        device_model=source.device_model if source else f"GPU of {folder}",
    )


def listed(profiles: dict[str, tuple[Path, ModelProfile]]) -> str:
    """The list of what was written, as Markdown."""
    lines = [
        "# Profiles of public planners",
        "",
        "Measured by others and published with their planners; `benchmarks/convert_profiles.py` wrote them here in the",
        "form of this project. Seconds and bytes are of one micro-batch.",
        "",
        "| file | nodes | samples | forward, s | backward, s | parameters, MB | from |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, (path, profile) in profiles.items():
        times = profile.times[0]
        source = SOURCES.get(path.parent.name)
        figures = [
            name,
            str(profile.num_layers),
            f"{times.microbatch_size:g}",
            f"{sum(times.forward_s):.3f}",
            f"{sum(times.backward_s):.3f}",
            f"{sum(layer.param_bytes for layer in profile.layers) / 1e6:.0f}",
            source.text if source else path.parent.name,
        ]
        lines.append(f"| {' | '.join(figures)} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="DIR", help="with the files, in it or in folders below")
    parser.add_argument("--to", type=Path, default=FOLDER, help="where to write (default: benchmarks/profiles)")
    parser.add_argument(
        "--time-unit", action="append", default=[], metavar="FOLDER/NAME=UNIT", help="of one file: s, ms or us"
    )
    options = parser.parse_args()
    time_units = TIME_UNITS | dict(given.partition("=")[::2] for given in options.time_unit)
    profiles: dict[str, tuple[Path, ModelProfile]] = {}
    paths = sorted(path for path in options.folder.rglob("*") if path.suffix in SUFFIXES)
    try:
        for path in paths:
            profile = converted(path, time_units)
            name = f"{path.parent.name}-{path.stem}.json"
            profiles[name] = path, profile
            write_whole(options.to / name, profile.to_json())
            print(f"{name}: {profile.num_layers} nodes")
        if not profiles:
            print(f"{options.folder}: no files that end in {' or '.join(SUFFIXES)}", file=sys.stderr)
            return 1
        write_whole(options.to / "README.md", listed(profiles))
    except AutoPipeError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
