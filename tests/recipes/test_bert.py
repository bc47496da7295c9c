"""The BERT module in one process."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Trainer, seed_everything

from recipes.bert import BertModule
from recipes.text import MaskedTextDataModule

pytestmark = pytest.mark.filterwarnings(
    r"ignore:.*isinstance\(treespec, LeafSpec\)",
    "ignore:.*does not have many workers",
    "ignore:.*Checkpoint directory .* exists and is not empty",
)


def make_module(**settings: Any) -> BertModule:
    return BertModule(
        **{"num_layers": 2, "hidden_size": 32, "num_heads": 2, "vocab_size": 257, "block_size": 16, "warmup_steps": 2}
        | settings
    )


@pytest.fixture
def data(tmp_path: Path) -> MaskedTextDataModule:
    text_file = tmp_path / "text.txt"
    text_file.write_text("the dog sleeps. " * 120, encoding="utf-8")
    return MaskedTextDataModule(
        text_file=str(text_file), vocab_size=257, block_size=16, batch_size=8, cache_dir=str(tmp_path)
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


def test_a_position_sees_both_sides_but_nothing_that_is_masked_out() -> None:
    torch.manual_seed(0)
    module = make_module().eval()
    tokens = torch.randint(0, 256, (1, 16))
    changed = tokens.clone()
    changed[0, 12:] = 7
    assert not torch.allclose(module(tokens)[:, :12], module(changed)[:, :12], atol=1e-4)
    mask = (torch.arange(16) < 12).long()[None]
    assert torch.allclose(module(tokens, mask)[:, :12], module(changed, mask)[:, :12], atol=1e-6)


def test_embedding_and_head_share_their_weights() -> None:
    model = make_module().model
    assert model.cls.predictions.decoder.weight is model.bert.embeddings.word_embeddings.weight


def test_config_fields_reach_the_model() -> None:
    module = make_module(dropout=0.3, config={"hidden_act": "relu", "intermediate_size": 48})
    config = module.model.config
    assert (config.hidden_dropout_prob, config.attention_probs_dropout_prob) == (0.3, 0.3)
    assert (config.hidden_act, config.intermediate_size) == ("relu", 48)
    assert make_module().model.config.intermediate_size == 4 * 32


def test_training_beats_the_unigram_entropy(tmp_path: Path, data: MaskedTextDataModule) -> None:
    seed_everything(0, verbose=False)
    module = make_module(learning_rate=1e-2, dropout=0.0, config={"initializer_range": 0.1})
    trainer = make_trainer(tmp_path, max_epochs=16)
    trainer.fit(module, datamodule=data)
    assert float(trainer.callback_metrics["val/loss"]) < data.held_out_entropy - 0.5
    assert float(trainer.callback_metrics["val/accuracy"]) > 0.5


def test_metrics_are_means_over_the_hidden_tokens(tmp_path: Path, data: MaskedTextDataModule) -> None:
    torch.manual_seed(0)
    module = make_module(config={"initializer_range": 0.1})
    trainer = make_trainer(tmp_path)
    validation = trainer.validate(module, datamodule=data, verbose=False)[0]
    test = trainer.test(module, datamodule=data, verbose=False)[0]
    predictions = trainer.predict(module, datamodule=data)
    assert predictions is not None

    module.eval()
    loss_sum, num_right, num_targets = 0.0, 0, 0
    with torch.no_grad():
        for batch, predicted in zip(data.val_dataloader(), predictions, strict=True):
            logits, labels = module(batch["input_ids"]), batch["labels"]
            hidden = labels != -100
            loss_sum += float(F.cross_entropy(logits[hidden], labels[hidden], reduction="sum"))
            num_right += int((predicted[hidden] == labels[hidden]).sum())  # type: ignore[index]
            num_targets += int(hidden.sum())
    assert validation["val/loss"] == pytest.approx(loss_sum / num_targets, rel=1e-5)
    assert validation["val/accuracy"] == pytest.approx(num_right / num_targets)
    assert test == {name.replace("val", "test"): value for name, value in validation.items()}
    assert validation["val/loss"] == pytest.approx(math.log(257), abs=1.0)


def test_every_run_validates_on_the_same_hidden_tokens(tmp_path: Path, data: MaskedTextDataModule) -> None:
    module = make_module()
    losses = []
    for seed in (1, 2):
        seed_everything(seed, verbose=False)
        losses.append(make_trainer(tmp_path).validate(module, datamodule=data, verbose=False)[0]["val/loss"])
    assert losses[0] == losses[1]


def test_checkpoint_loads_without_any_setting(tmp_path: Path, data: MaskedTextDataModule) -> None:
    trainer = make_trainer(tmp_path, max_steps=2, limit_val_batches=0)
    module = make_module(config={"hidden_act": "relu"})
    trainer.fit(module, datamodule=data)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    loaded = BertModule.load_from_checkpoint(tmp_path / "a.ckpt", weights_only=True)
    assert loaded.model.config.hidden_act == "relu"
    for name, value in module.state_dict().items():
        assert torch.equal(value, loaded.state_dict()[name]), name
    again = MaskedTextDataModule.load_from_checkpoint(tmp_path / "a.ckpt", weights_only=True)
    assert (again.vocab_size, again.block_size, again.mask_fraction) == (257, 16, 0.15)
