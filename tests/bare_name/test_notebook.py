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
try:
    pl.Trainer(strategy="autopipe_h", devices=2, **quiet)
except Exception as error:
    print(type(error).__name__, error)
"""


EXECUTE = """
import nbclient, nbformat
notebook = nbformat.read("notebook.ipynb", as_version=4)
nbclient.execute(notebook, timeout=60, kernel_name="python3")
nbformat.write(notebook, "notebook.ipynb")
"""


def test_a_notebook_trains_in_its_own_process(user_python: Path, tmp_path: Path) -> None:
    path = tmp_path / "notebook.ipynb"
    cells = [nbformat.v4.new_code_cell(source) for source in (MODULE, FIT, TWO_PROCESSES)]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), path)
    run(user_python, "-c", EXECUTE, cwd=tmp_path)
    executed = nbformat.read(path, as_version=4)
    _, fit, two_processes = ("".join(output.get("text", "") for output in cell.outputs) for cell in executed.cells)
    assert f"STEPS 4 1 {user_python.parents[1]}" in fit
    assert "ConfigurationError 2 processes cannot be started from a notebook" in two_processes
    assert "set devices=1" in two_processes
