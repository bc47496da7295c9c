"""A notebook that never imports this package, run by nbclient in a kernel of the user's environment."""

from __future__ import annotations

from pathlib import Path

import nbformat

from tests.bare_name.commands import run

MODULE = """
import sys
import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader

class Regression(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))

    def training_step(self, batch, batch_idx):
        return self.net(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

quiet = dict(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
"""
FIT = """
trainer = pl.Trainer(strategy="autopipe_h", devices=1, max_epochs=2, **quiet)
trainer.fit(Regression(), DataLoader(torch.randn(16, 4), batch_size=8))
print("STEPS", trainer.global_step, trainer.strategy.plan.layout.num_stages, sys.prefix)
"""
TWO_PROCESSES = """
for _ in range(2):
    module = Regression()
    before = module.net[0].weight.detach().clone(), module.net[2].weight.detach().clone()
    trainer = pl.Trainer(strategy="autopipe_h", devices=2, max_epochs=2, **quiet)
    trainer.fit(module, DataLoader(torch.randn(16, 4), batch_size=8))
    moved = not torch.equal(before[0], module.net[0].weight), not torch.equal(before[1], module.net[2].weight)
    print("MOVED", *moved, trainer.strategy.plan.layout.world_size, trainer.state.status)
"""
AN_ERROR = """
class Fails(Regression):
    def training_step(self, batch, batch_idx):
        if self.current_epoch == 1:
            raise ValueError("a reason in a step")
        return super().training_step(batch, batch_idx)

import multiprocessing
try:
    trainer = pl.Trainer(strategy="autopipe_h", devices=2, max_epochs=2, **quiet)
    trainer.fit(Fails(), DataLoader(torch.randn(16, 4), batch_size=8))
except Exception as error:
    print("a reason in a step" in str(error), multiprocessing.active_children())
"""
SPAWN = """
from lightning_autopipe import AutoPipeStrategy

try:
    pl.Trainer(strategy=AutoPipeStrategy(start_method="spawn"), devices=2, **quiet)
except Exception as error:
    print(type(error).__name__, error)
"""

EXECUTE = """
import nbclient, nbformat
notebook = nbformat.read("notebook.ipynb", as_version=4)
nbclient.execute(notebook, timeout=60, kernel_name="python3")
nbformat.write(notebook, "notebook.ipynb")
"""


def test_a_notebook(user_python: Path, tmp_path: Path) -> None:
    path = tmp_path / "notebook.ipynb"
    cells = [nbformat.v4.new_code_cell(source) for source in (MODULE, FIT, TWO_PROCESSES, AN_ERROR, SPAWN)]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), path)
    run(user_python, "-c", EXECUTE, cwd=tmp_path)
    executed = nbformat.read(path, as_version=4)
    outputs = ["".join(output.get("text", "") for output in cell.outputs) for cell in executed.cells]
    _, fit, two_processes, an_error, spawn = outputs
    assert f"STEPS 4 1 {user_python.parents[1]}" in fit
    assert two_processes.count("MOVED True True 2 TrainerStatus.FINISHED") == 2, two_processes
    assert "samples/s" in two_processes  # the plan
    assert "True []" in an_error, an_error
    assert "ConfigurationError start_method='spawn' starts no processes from a notebook" in spawn, spawn
