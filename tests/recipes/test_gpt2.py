"""The GPT-2 module in one process."""

from __future__ import annotations

import ast
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer, seed_everything

import recipes
from recipes.gpt2 import GPT2Module
from recipes.text import TextDataModule

pytestmark = pytest.mark.filterwarnings(
    r"ignore:.*isinstance\(treespec, LeafSpec\)",
    "ignore:.*does not have many workers",
    "ignore:.*Checkpoint directory .* exists and is not empty",
)


def make_module(**settings: Any) -> GPT2Module:
    return GPT2Module(
        **{"num_layers": 2, "hidden_size": 32, "num_heads": 2, "vocab_size": 300, "block_size": 16, "warmup_steps": 2}
        | settings
    )


@pytest.fixture
def data(tmp_path: Path) -> TextDataModule:
    text_file = tmp_path / "text.txt"
    text_file.write_text("the quick brown fox jumps over the lazy dog, and the dog sleeps. " * 60, encoding="utf-8")
    return TextDataModule(
        text_file=str(text_file), vocab_size=300, block_size=16, batch_size=4, cache_dir=str(tmp_path)
    )


def make_trainer(tmp_path: Path, **settings: Any) -> Trainer:
    return Trainer(
        accelerator="cpu",
        devices=1,
        default_root_dir=tmp_path,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"enable_checkpointing": False, "num_sanity_val_steps": 0} | settings,
    )


def test_module_and_data_know_nothing_of_pipelines() -> None:
    root = Path(recipes.__file__).parent
    for path in root.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not any(name.startswith("lightning_autopipe") for name in names), path


def test_loss_starts_at_the_logarithm_of_the_vocabulary() -> None:
    torch.manual_seed(0)
    tokens = torch.randint(0, 300, (4, 17))
    loss = make_module().eval().loss({"input_ids": tokens[:, :-1], "labels": tokens[:, 1:]})
    assert loss.item() == pytest.approx(math.log(300), abs=0.1)


def test_a_position_sees_nothing_after_it() -> None:
    torch.manual_seed(0)
    module = make_module().eval()
    tokens = torch.randint(0, 300, (1, 16))
    changed = tokens.clone()
    changed[0, 9:] = 7
    assert torch.equal(module(tokens)[:, :9], module(changed)[:, :9])
    assert not torch.equal(module(tokens)[:, 9:], module(changed)[:, 9:])


def test_config_fields_reach_the_model() -> None:
    module = make_module(dropout=0.3, config={"activation_function": "relu"})
    assert module.model.config.resid_pdrop == 0.3
    assert module.model.config.activation_function == "relu"
    assert isinstance(module, LightningModule)


def test_training_lowers_the_loss(tmp_path: Path, data: TextDataModule) -> None:
    seed_everything(0, verbose=False)
    module = make_module(learning_rate=5e-3, dropout=0.0)
    trainer = make_trainer(tmp_path, max_epochs=4)
    trainer.fit(module, datamodule=data)
    assert float(trainer.callback_metrics["val/loss"]) < math.log(300) - 2.0
    assert float(trainer.callback_metrics["train/loss"]) < math.log(300) - 2.0
    assert float(trainer.callback_metrics["val/loss"]) < data.held_out_entropy


def test_learning_rate_follows_the_steps(tmp_path: Path, data: TextDataModule) -> None:
    trainer = make_trainer(tmp_path, max_epochs=1, limit_val_batches=0)
    trainer.fit(make_module(learning_rate=1e-2, final_learning_rate_fraction=0.25), datamodule=data)
    assert trainer.global_step == len(data.train_dataloader())
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(2.5e-3)


def test_losses_are_means_over_tokens_and_predictions_sums(tmp_path: Path, data: TextDataModule) -> None:
    torch.manual_seed(0)
    module = make_module()
    trainer = make_trainer(tmp_path)
    validation = trainer.validate(module, datamodule=data, verbose=False)[0]["val/loss"]
    test = trainer.test(module, datamodule=data, verbose=False)[0]["test/loss"]
    predictions = trainer.predict(module, datamodule=data)
    assert predictions is not None

    module.eval()
    sums, num_tokens, sums_by_sequence = 0.0, 0, []
    with torch.no_grad():
        for batch in data.val_dataloader():
            for tokens, labels in zip(batch["input_ids"], batch["labels"], strict=True):
                losses = F.cross_entropy(module(tokens[None])[0], labels, reduction="none")
                sums_by_sequence.append(float(losses.sum()))
                sums += float(losses.sum())
                num_tokens += int((labels >= 0).sum())
    last = data.val_dataloader().dataset[len(sums_by_sequence) - 1]  # type: ignore[arg-type]
    assert len(last["labels"]) < 16, "the case needs a short last block"
    assert validation == pytest.approx(sums / num_tokens, rel=1e-5)
    assert test == pytest.approx(validation)
    assert torch.cat(list(predictions)).tolist() == pytest.approx(sums_by_sequence, rel=1e-4)  # type: ignore[arg-type]


def test_checkpoint_loads_without_any_setting(tmp_path: Path, data: TextDataModule) -> None:
    trainer = make_trainer(tmp_path, max_steps=2, limit_val_batches=0)
    module = make_module(config={"activation_function": "relu"})
    trainer.fit(module, datamodule=data)
    trainer.save_checkpoint(tmp_path / "a.ckpt")

    loaded = GPT2Module.load_from_checkpoint(tmp_path / "a.ckpt", weights_only=True)
    for name, value in module.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name
    assert loaded.model.config.activation_function == "relu"

    loaded_data = TextDataModule.load_from_checkpoint(tmp_path / "a.ckpt", weights_only=True)
    assert loaded_data.tokenizer is not None
    assert data.tokenizer is not None
    assert loaded_data.tokenizer.to_str() == data.tokenizer.to_str()
    assert loaded_data.block_size == 16
