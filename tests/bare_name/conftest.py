"""A user's environment: this package as a wheel in a virtual environment of its own, far from the checkout."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_OFFLINE = ("--no-deps", "--no-index", "--quiet", "--disable-pip-version-check")


@pytest.fixture(scope="session")
def user_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment that has a wheel of this package; nothing is downloaded.

    Everything else is found in the environment that runs the tests, by a path entry: its own path entries, such as one
    for the checkout, do not count there.
    """
    folder = tmp_path_factory.mktemp("user")
    _pip("wheel", *_OFFLINE, "--no-build-isolation", "--wheel-dir", str(folder), str(ROOT))
    (wheel,) = folder.glob("*.whl")

    venv.create(folder / "env", symlinks=True)
    python = folder / "env" / "bin" / "python"
    (site_packages,) = (folder / "env").glob("lib/python*/site-packages")
    paths = sysconfig.get_paths()
    (site_packages / "others.pth").write_text(f"{paths['purelib']}\n{paths['platlib']}\n")
    # What is found through the path entry would count as installed.
    _pip("--python", str(python), "install", *_OFFLINE, "--ignore-installed", str(wheel))
    return python


def _pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
