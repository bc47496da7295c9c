"""Models of `transformers` that see or hear."""

from __future__ import annotations

from typing import Any

import torch
import transformers as tr

from tests.architectures import batches
from tests.architectures.architecture import Architecture
from tests.architectures.batches import IMAGE_SIZE, VOCABULARY, numbers, token_ids
from tests.architectures.language import HIDDEN, ROTARY, SEQUENCE_PAIRS, SMALL

IMAGE_TOKEN = VOCABULARY - 1
SEEING: dict[str, Any] = {**HIDDEN, "num_hidden_layers": 2, "image_size": IMAGE_SIZE}


def vit() -> tr.ViTForImageClassification:
    return tr.ViTForImageClassification(tr.ViTConfig(patch_size=8, **SEEING))


def resnet() -> tr.ResNetForImageClassification:
    config = tr.ResNetConfig(embedding_size=4, hidden_sizes=[4, 8], depths=[1, 2], num_labels=2)
    return tr.ResNetForImageClassification(config)


def swin() -> tr.SwinForImageClassification:
    config = tr.SwinConfig(
        image_size=IMAGE_SIZE, patch_size=2, embed_dim=8, depths=[2, 2], num_heads=[2, 2], window_size=4
    )
    return tr.SwinForImageClassification(config)


def convnext() -> tr.ConvNextForImageClassification:
    config = tr.ConvNextConfig(hidden_sizes=[4, 8], depths=[2, 2], num_stages=2, patch_size=2)
    return tr.ConvNextForImageClassification(config)


def segformer() -> tr.SegformerForSemanticSegmentation:
    config = tr.SegformerConfig(
        num_encoder_blocks=2,
        depths=[1, 1],
        sr_ratios=[2, 1],
        hidden_sizes=[8, 16],
        num_attention_heads=[1, 2],
        patch_sizes=[7, 3],
        strides=[4, 2],
        mlp_ratios=[2, 2],
        decoder_hidden_size=16,
        num_labels=3,
    )
    return tr.SegformerForSemanticSegmentation(config)


def masked_autoencoder() -> tr.ViTMAEForPreTraining:
    decoder = {"decoder_hidden_size": 16, "decoder_num_attention_heads": 2, "decoder_intermediate_size": 24}
    return tr.ViTMAEForPreTraining(tr.ViTMAEConfig(patch_size=4, decoder_num_hidden_layers=1, **decoder, **SEEING))


def yolos() -> tr.YolosForObjectDetection:
    sizes = {**SEEING, "image_size": [IMAGE_SIZE, IMAGE_SIZE]}
    return tr.YolosForObjectDetection(tr.YolosConfig(patch_size=8, num_detection_tokens=4, num_labels=3, **sizes))


def clip() -> tr.CLIPModel:
    config = tr.CLIPConfig(
        text_config={"max_position_embeddings": 16, "eos_token_id": 1, **SMALL},
        vision_config={"patch_size": 8, **SEEING},
        projection_dim=8,
    )
    return tr.CLIPModel(config)


def llava() -> tr.LlavaForConditionalGeneration:
    config = tr.LlavaConfig(
        text_config=tr.LlamaConfig(**ROTARY),
        vision_config=tr.CLIPVisionConfig(patch_size=8, **SEEING),
        image_token_index=IMAGE_TOKEN,
        image_seq_length=4,
    )
    return tr.LlavaForConditionalGeneration(config)


def wav2vec2() -> tr.Wav2Vec2ForCTC:
    config = tr.Wav2Vec2Config(
        conv_dim=(8, 8),
        conv_stride=(4, 2),
        conv_kernel=(8, 3),
        num_feat_extract_layers=2,
        num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2,
        ctc_loss_reduction="mean",
        mask_time_length=4,
        layerdrop=0.0,
        **SMALL,
    )
    model = tr.Wav2Vec2ForCTC(config)
    model.wav2vec2.masked_spec_embed.requires_grad_(False)  # unused without draws, and the trace ends at the loss
    return model


def whisper() -> tr.WhisperForConditionalGeneration:
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 3}
    config = tr.WhisperConfig(
        vocab_size=VOCABULARY,
        num_mel_bins=8,
        max_source_positions=10,
        max_target_positions=10,
        suppress_tokens=None,
        begin_suppress_tokens=None,
        **tokens,
        **SEQUENCE_PAIRS,
    )
    return tr.WhisperForConditionalGeneration(config)


def patch_tst() -> tr.PatchTSTForPrediction:
    config = tr.PatchTSTConfig(
        num_input_channels=2,
        context_length=16,
        patch_length=4,
        patch_stride=4,
        d_model=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        ffn_dim=24,
        prediction_length=4,
    )
    return tr.PatchTSTForPrediction(config)


def boxes() -> dict[str, Any]:
    box = {"class_labels": torch.tensor([1]), "boxes": torch.tensor([[0.5, 0.5, 0.2, 0.2]])}
    return {"pixel_values": batches.images()["pixel_values"].float(), "labels": [box, box]}


def captioned_images() -> dict[str, Any]:
    ids = token_ids(below=IMAGE_TOKEN)
    no_target = torch.full((2, 4), -100)
    return {
        "input_ids": torch.cat([torch.full((2, 4), IMAGE_TOKEN), ids], 1),
        "pixel_values": batches.images()["pixel_values"],
        "labels": torch.cat([no_target, ids[:, :4], no_target[:, :1]], 1),
    }


PERCEPTION = {
    "ViT": Architecture(kind="vision transformer", network=vit, batch=batches.images),
    "ResNet": Architecture(kind="convolutional, residual", network=resnet, batch=batches.images),
    "ConvNeXt": Architecture(kind="convolutional, separable", network=convnext, batch=batches.images),
    "Swin": Architecture(kind="vision, shifted windows", network=swin, batch=batches.images),
    "SegFormer": Architecture(
        kind="segmentation",
        network=segformer,
        batch=lambda: {"pixel_values": numbers(2, 3, 32, 32), "labels": torch.arange(2 * 32 * 32).view(2, 32, 32) % 3},
    ),
    "ViT-MAE": Architecture(
        kind="masked autoencoder",
        network=masked_autoencoder,
        batch=lambda: {"pixel_values": numbers(2, 3, 16, 16), "noise": numbers(2, 16, seed=1)},
    ),
    "YOLOS": Architecture(
        kind="detection, matched boxes",
        network=yolos,
        batch=boxes,
        dtype=torch.float32,
        remark="float32: its loss has no other precision",
    ),
    "CLIP": Architecture(
        kind="contrastive, two towers",
        network=clip,
        batch=lambda: {"input_ids": token_ids(), "pixel_values": numbers(2, 3, 16, 16), "return_loss": True},
        remark="the loss is over the whole batch: equal with one micro-batch, another loss with several",
    ),
    "LLaVA": Architecture(kind="images and text", network=llava, batch=captioned_images),
    "Wav2Vec2": Architecture(
        kind="speech, connectionist temporal classification",
        network=wav2vec2,
        batch=lambda: {"input_values": numbers(2, 200), "labels": token_ids(4)},
        remark="without LayerDrop: a layer that a draw leaves out takes its cuts along",
    ),
    "Whisper": Architecture(
        kind="speech, encoder-decoder",
        network=whisper,
        batch=lambda: {"input_features": numbers(2, 8, 20), "labels": token_ids(4)},
    ),
    "PatchTST": Architecture(
        kind="time series",
        network=patch_tst,
        batch=lambda: {"past_values": numbers(2, 16, 2), "future_values": numbers(2, 4, 2, seed=1)},
    ),
}
