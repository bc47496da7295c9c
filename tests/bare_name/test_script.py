"""A script that never imports this package, under both of Lightning's names."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.bare_name import script as user_script
from tests.bare_name.commands import run


@pytest.fixture
def script(tmp_path: Path) -> Path:
    return Path(shutil.copy(user_script.__file__, tmp_path))


def checkpoint_of(output: Path) -> dict[str, Any]:
    checkpoint: dict[str, Any] = torch.load(output, weights_only=True)
    return checkpoint


@pytest.fixture(scope="module")
def of_one_process(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The checkpoint of one process, under Lightning's own strategy."""
    path = tmp_path_factory.mktemp("one") / "one.ckpt"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a user's script may have its own, such as data loaders without workers
        user_script.main("auto", 1, str(path))
    return checkpoint_of(path)


@pytest.fixture(scope="module")
def of_ddp() -> dict[str, Any]:
    """The checkpoint of two processes under DDP; empty until one is needed."""
    return {}


@pytest.mark.parametrize(
    ("namespace", "strategy_module", "imports_lightning"),
    [
        ("lightning.pytorch", "lightning_autopipe.strategy.autopipe", True),
        ("pytorch_lightning", "lightning_autopipe.pytorch_lightning.autopipe", False),
    ],
)
def test_two_processes_give_the_numbers_of_one_or_of_ddp(
    user_python: Path,
    script: Path,
    of_one_process: dict[str, Any],
    of_ddp: dict[str, Any],
    namespace: str,
    strategy_module: str,
    imports_lightning: bool,
) -> None:
    """Which of them depends on what is predicted to be faster here."""
    path = script.with_name("two.ckpt")
    output = run(user_python, script, namespace, "autopipe_h", 2, path, cwd=script.parent)
    assert f"STRATEGY {strategy_module}\n" in output
    assert f"LIGHTNING {imports_lightning}\n" in output
    if "2 stages × 1 replica" in output:
        assert "Verified" in output
        expected = of_one_process
    else:
        assert "1 stage × 2 replicas" in output
        if not of_ddp:  # made once, and only where it is needed
            run(user_python, script, namespace, "ddp", 2, script.with_name("ddp.ckpt"), cwd=script.parent)
            of_ddp.update(checkpoint_of(script.with_name("ddp.ckpt")))
        expected = of_ddp
    found = checkpoint_of(path)
    torch.testing.assert_close(found["state_dict"], expected["state_dict"], rtol=0, atol=1e-12)
    torch.testing.assert_close(found["optimizer_states"], expected["optimizer_states"], rtol=0, atol=1e-12)
    if expected is of_one_process:  # DDP logs what each process has, not what all have
        torch.testing.assert_close(found["callbacks"], expected["callbacks"], rtol=0, atol=1e-12)


def test_the_variable_keeps_the_package_out_of_torch(user_python: Path, tmp_path: Path) -> None:
    code = "import torch, sys; print('lightning_autopipe' in sys.modules)"
    assert run(user_python, "-c", code, cwd=tmp_path, LIGHTNING_AUTOPIPE_AUTOLOAD="0") == "False\n"


def test_a_broken_installation_leaves_torch_alone(user_python: Path, tmp_path: Path) -> None:
    broken = tmp_path / "lightning_autopipe"
    broken.mkdir()
    (broken / "__init__.py").write_text("raise RuntimeError('half installed')")
    output = run(user_python, "-c", "import torch; print(torch.ones(2).sum())", cwd=tmp_path, PYTHONPATH=str(tmp_path))
    assert "tensor(2.)" in output
    assert "half installed" in output
