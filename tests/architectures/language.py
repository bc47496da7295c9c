"""Language models of `transformers`."""

from __future__ import annotations

from typing import Any

import torch
import transformers as tr

from tests.architectures import batches
from tests.architectures.architecture import Architecture
from tests.architectures.batches import VOCABULARY

HIDDEN: dict[str, Any] = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 24}
SMALL: dict[str, Any] = {**HIDDEN, "num_hidden_layers": 2, "vocab_size": VOCABULARY}
ROTARY: dict[str, Any] = {**SMALL, "num_key_value_heads": 1}
SEQUENCE_PAIRS: dict[str, Any] = {
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
}


def gpt2(**options: Any) -> tr.GPT2LMHeadModel:
    config = tr.GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=VOCABULARY, n_positions=16, **options)
    return tr.GPT2LMHeadModel(config)


def bert(num_layers: int = 2) -> tr.BertForMaskedLM:
    return tr.BertForMaskedLM(tr.BertConfig(**{**SMALL, "num_hidden_layers": num_layers}))


def llama() -> tr.LlamaForCausalLM:
    return tr.LlamaForCausalLM(tr.LlamaConfig(**ROTARY))


def t5(num_layers: int = 2) -> tr.T5ForConditionalGeneration:
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_heads": 2}
    config = tr.T5Config(vocab_size=VOCABULARY, num_layers=num_layers, decoder_start_token_id=0, **sizes)
    return tr.T5ForConditionalGeneration(config)


def deberta() -> tr.DebertaV2ForMaskedLM:
    relative = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 4}
    return tr.DebertaV2ForMaskedLM(tr.DebertaV2Config(max_relative_positions=8, **relative, **SMALL))


def bart() -> tr.BartForConditionalGeneration:
    tokens = {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 1}
    config = tr.BartConfig(
        vocab_size=VOCABULARY, max_position_embeddings=16, forced_eos_token_id=None, **tokens, **SEQUENCE_PAIRS
    )
    return tr.BartForConditionalGeneration(config)


def marian() -> tr.MarianMTModel:
    tokens = {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}
    config = tr.MarianConfig(
        vocab_size=VOCABULARY, max_position_embeddings=16, forced_eos_token_id=None, **tokens, **SEQUENCE_PAIRS
    )
    return tr.MarianMTModel(config)


def mixtral(experts: str) -> tr.MixtralForCausalLM:
    config = tr.MixtralConfig(num_local_experts=4, output_router_logits=True, **ROTARY)
    return with_experts(tr.MixtralForCausalLM(config), experts)


def qwen_moe(experts: str) -> tr.Qwen2MoeForCausalLM:
    sizes = {"num_experts": 4, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8}
    config = tr.Qwen2MoeConfig(decoder_sparse_step=1, output_router_logits=True, **sizes, **ROTARY)
    return with_experts(tr.Qwen2MoeForCausalLM(config), experts)


def deepseek(experts: str) -> tr.DeepseekV3ForCausalLM:
    latent = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "v_head_dim": 8, "qk_nope_head_dim": 8}
    routed = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2}
    config = tr.DeepseekV3Config(
        moe_intermediate_size=8, first_k_dense_replace=1, num_key_value_heads=2, **latent, **routed, **SMALL
    )
    return with_experts(tr.DeepseekV3ForCausalLM(config), experts)


def with_experts(model: Any, implementation: str) -> Any:
    """The default one, a grouped matrix product, has no double precision."""
    model.set_experts_implementation(implementation)
    return model


def xlnet() -> tr.XLNetLMHeadModel:
    return tr.XLNetLMHeadModel(tr.XLNetConfig(vocab_size=VOCABULARY, d_model=16, n_layer=2, n_head=2, d_inner=24))


def perceiver() -> tr.PerceiverForMaskedLM:
    latents = {"num_latents": 4, "d_latents": 16, "num_blocks": 2, "num_self_attends_per_block": 2}
    attention = {
        "num_self_attention_heads": 2,
        "num_cross_attention_heads": 2,
        "qk_channels": 16,
        "v_channels": 16,
    }
    config = tr.PerceiverConfig(vocab_size=VOCABULARY, d_model=16, max_position_embeddings=4, **latents, **attention)
    return tr.PerceiverForMaskedLM(config)


LANGUAGE = {
    "GPT-2": Architecture(kind="decoder", network=gpt2, batch=batches.causal_padded),
    "BERT": Architecture(kind="encoder, masked tokens", network=bert, batch=batches.masked),
    "ALBERT": Architecture(
        kind="encoder that uses one layer three times",
        network=lambda: tr.AlbertForMaskedLM(tr.AlbertConfig(**{**SMALL, "embedding_size": 8, "num_hidden_layers": 3})),
        batch=batches.masked,
    ),
    "DistilBERT": Architecture(
        kind="distilled encoder",
        network=lambda: tr.DistilBertForMaskedLM(
            tr.DistilBertConfig(vocab_size=VOCABULARY, dim=16, n_layers=2, n_heads=2, hidden_dim=24)
        ),
        batch=batches.masked,
    ),
    "ELECTRA": Architecture(
        kind="encoder, replaced tokens",
        network=lambda: tr.ElectraForPreTraining(tr.ElectraConfig(embedding_size=8, **SMALL)),
        batch=lambda: {"input_ids": token_rows(), "labels": (token_rows() > 8).long()},
    ),
    "RoBERTa": Architecture(
        kind="encoder, sequence classification",
        network=lambda: tr.RobertaForSequenceClassification(tr.RobertaConfig(max_position_embeddings=20, **SMALL)),
        batch=lambda: {"input_ids": token_rows(), "labels": torch.tensor([0, 1])},
    ),
    "DeBERTa": Architecture(kind="encoder, disentangled attention", network=deberta, batch=batches.masked),
    "XLNet": Architecture(kind="permuted decoder, two attention streams", network=xlnet, batch=batches.masked_whole),
    "FNet": Architecture(
        kind="encoder, Fourier transforms",
        network=lambda: tr.FNetForMaskedLM(
            tr.FNetConfig(vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=2, intermediate_size=24)
        ),
        batch=batches.masked_whole,
    ),
    "Perceiver": Architecture(
        kind="latent array, cross-attention",
        network=perceiver,
        batch=lambda: {"inputs": token_rows(), "labels": token_rows()},
    ),
    "Llama": Architecture(kind="rotary decoder", network=llama, batch=batches.causal_padded),
    "Qwen3": Architecture(
        kind="rotary decoder, normalised heads",
        network=lambda: tr.Qwen3ForCausalLM(tr.Qwen3Config(head_dim=8, **ROTARY)),
        batch=batches.causal_padded,
    ),
    "Gemma 2": Architecture(
        kind="rotary decoder, sliding windows, tied head",
        network=lambda: tr.Gemma2ForCausalLM(tr.Gemma2Config(head_dim=8, sliding_window=4, **ROTARY)),
        batch=batches.causal_padded,
    ),
    "GPT-NeoX": Architecture(
        kind="rotary decoder, parallel halves",
        network=lambda: tr.GPTNeoXForCausalLM(tr.GPTNeoXConfig(**SMALL)),
        batch=batches.causal_padded,
    ),
    "BLOOM": Architecture(
        kind="decoder, linear biases",
        network=lambda: tr.BloomForCausalLM(tr.BloomConfig(vocab_size=VOCABULARY, hidden_size=16, n_layer=2, n_head=2)),
        batch=batches.causal_padded,
    ),
    "Mixtral": Architecture(
        kind="mixture of experts",
        network=lambda: mixtral("batched_mm"),
        batch=batches.causal_padded,
    ),
    "Qwen2-MoE": Architecture(
        kind="mixture of experts, grouped matrix products",
        network=lambda: qwen_moe("grouped_mm"),
        batch=batches.causal_padded,
        dtype=torch.float32,
        remark="float32: grouped products have no other precision here",
    ),
    "DeepSeek-V3": Architecture(
        kind="mixture of experts, latent attention",
        network=lambda: deepseek("batched_mm"),
        batch=batches.causal_padded,
    ),
    "Mamba": Architecture(
        kind="state space",
        network=lambda: tr.MambaForCausalLM(
            tr.MambaConfig(vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=2, state_size=4)
        ),
        batch=batches.causal,
    ),
    "Mamba-2": Architecture(
        kind="state space, chunked scan",
        network=lambda: tr.Mamba2ForCausalLM(
            tr.Mamba2Config(
                vocab_size=VOCABULARY,
                hidden_size=16,
                num_hidden_layers=2,
                state_size=4,
                num_heads=4,
                head_dim=8,
                n_groups=1,
                chunk_size=4,
            )
        ),
        batch=batches.causal,
    ),
    "RWKV": Architecture(
        kind="recurrent, linear attention",
        network=lambda: tr.RwkvForCausalLM(
            tr.RwkvConfig(
                vocab_size=VOCABULARY,
                hidden_size=16,
                num_hidden_layers=2,
                attention_hidden_size=16,
                intermediate_size=24,
            )
        ),
        batch=batches.causal,
    ),
    "T5": Architecture(kind="encoder-decoder, shared position bias", network=t5, batch=batches.sequence_pairs),
    "BART": Architecture(kind="encoder-decoder", network=bart, batch=batches.sequence_pairs),
    "Marian": Architecture(kind="encoder-decoder, fixed positions", network=marian, batch=batches.sequence_pairs),
}


def token_rows() -> torch.Tensor:
    return batches.token_ids(4)
