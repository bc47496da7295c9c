"""What the processes of most tests need, imported once by the process that they are all forked from.

`tests.harness` has it imported there and nowhere else.
"""

from __future__ import annotations

import gc

import lightning.pytorch
import pytest
import torch.distributed
import torchmetrics
from transformers import GPT2LMHeadModel

import lightning_autopipe.strategy

__all__ = ["GPT2LMHeadModel", "lightning", "lightning_autopipe", "pytest", "torch", "torchmetrics"]

# A collection, of which there is one at the end of every fit, would look at all that was imported, and its marks would
# make every process copy the memory that it shares with the others.
gc.collect()
gc.freeze()
