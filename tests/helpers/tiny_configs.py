"""A tiny configuration for every causal language model that transformers can build.

Most configurations use one of a few names for each size. `SMALL` has the value of each name here.
`SPECIAL` has what a model type needs in addition. A type that cannot be built is in `NOT_BUILT`,
with the reason.
"""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig, PretrainedConfig

VOCAB_SIZE = 259  # of the byte tokenizer
END = 256  # its end of text

SIZES: dict[int, str] = {
    VOCAB_SIZE: "vocab_size n_vocab vocab_size_per_layer_input audio_vocab_size",
    512: "max_position_embeddings n_positions n_ctx max_seq_len model_max_length n_tokens",
    128: "intermediate_size ffn_dim n_inner dff ffn_hidden_size decoder_ffn_dim encoder_ffn_dim "
    "moe_intermediate_size dim_ff expert_ffn_hidden_size",
    64: "hidden_size d_model n_embd dim emb_dim n_embed word_embed_proj_dim embedding_size "
    "shared_expert_intermediate_size block_dim d_embed ple_dim lru_width attention_hidden_size",
    32: "q_lora_rank moe_latent_size shape_embed_dim pronunciation_embed_dim mamba_d_ssm_head",
    16: "head_dim dim_head d_kv kv_channels kv_lora_rank linear_key_head_dim linear_value_head_dim "
    "index_head_dim qk_nope_head_dim mamba_head_dim hidden_size_per_layer_input d_head "
    "mamba_d_head global_head_dim laurel_rank gated_norm_rank rotary_dim",
    12: "v_head_dim",  # differs from the size of the keys, so that a mistake shows
    8: "qk_rope_head_dim mamba_n_heads mamba_d_state ssm_state_size state_size mamba_num_heads",
    4: "num_attention_heads n_head n_heads num_heads decoder_attention_heads "
    "encoder_attention_heads num_experts num_local_experts n_routed_experts moe_num_experts "
    "linear_num_key_heads linear_num_value_heads",
    2: "num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers "
    "num_key_value_heads num_kv_heads num_experts_per_tok num_experts_per_token moe_topk moe_k "
    "index_n_heads "
    "num_encoder_layers num_decoder_layers depth",
    1: "n_group topk_group n_shared_experts num_shared_experts mamba_n_groups n_groups",
}
SMALL: dict[str, Any] = {name: size for size, names in SIZES.items() for name in names.split()}
SMALL |= {
    "is_decoder": True,  # for models that can also be encoders
    "initializer_range": 0.3,  # large, so that the output varies
    "init_std": 0.3,
    "bos_token_id": 0,
    "eos_token_id": END,
    "pad_token_id": END,
}

LATENT = {"num_key_value_heads": 4, "head_dim": 8}  # each query head has keys of its own

# In these models, layers of the second kind need sizes that no other model has.
ONE_KIND = {"dots3_note_text", "qwen4_exp_text"}

SPECIAL: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {"rope_parameters": {
        kind: {"rope_type": "default", "rope_theta": 10000.0}
        for kind in ("full_attention", "sliding_attention")}},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
             "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2}},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "falcon_h1": {"mamba_d_ssm": 128},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "hy_v4": LATENT,
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 0},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "reformer": {"is_decoder": True, "attn_layers": ["local", "lsh"], "axial_pos_shape": [16, 32],
                 "axial_pos_embds_dim": [32, 32]},
    "longcat_flash": {"ffn_hidden_size": 64, "expert_ffn_hidden_size": 64, "zero_expert_num": 2},
    "xmod": {"default_language": "en_XX"},
    "bamba": {"attn_layer_indices": [1]},
    "deepseek_v4": {"compress_rate_hca": 16},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm3": {"layer_types": ["conv", "full_attention"]},
    "zamba": {"num_hidden_layers": 4, "layer_types": ["mamba", "hybrid", "mamba", "hybrid"],
              "attention_hidden_size": 128, "attention_head_dim": 32, "n_mamba_heads": 2,
              "num_key_value_heads": 4},
    "zamba2": {"num_hidden_layers": 4, "layer_types": ["mamba", "hybrid", "mamba", "hybrid"],
               "attention_hidden_size": 128, "attention_head_dim": 32, "n_mamba_heads": 8,
               "mamba_headdim": 16, "hybrid_layer_ids": [1, 3], "mamba_ngroups": 1,
               "num_key_value_heads": 4},
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip

_NO_DECODER = "transformers cannot build its decoder from the configuration of the whole model"
_NEEDS_MODEL = "it drafts for another model, and reads that model's keys and values"
NOT_BUILT: dict[str, str] = {
    "blt": "a second model cuts its bytes into patches; the two have no tiny configuration",
    "dots3_note": "its text and its other parts must fit each other; `dots3_note_text` is tried",
    "gemma3n": "it needs the library Pillow; `gemma3n_text` is tried",
    "gemma4_assistant": _NEEDS_MODEL,
    "gemma4_unified_assistant": _NEEDS_MODEL,
    "musicgen": _NO_DECODER,
    "musicgen_melody": _NO_DECODER,
}

# Windows and similar limits, shorter than the contexts of the sweep. The defaults are longer.
SMALL_WINDOWS: dict[str, int] = {
    "sliding_window": 16,
    "window_size": 16,
    "attention_chunk_size": 16,
    "floor_scale": 8,
    "local_attention": 16,
    "index_topk": 8,
}


def tiny_config(model_type: str, *, small_windows: bool = False, **extra: Any) -> PretrainedConfig:
    """Return a configuration of about two layers. `extra` replaces values of the tables."""
    known = AutoConfig.for_model(model_type).to_dict()
    values = _small(known, SMALL | (SMALL_WINDOWS if small_windows else {}))
    return AutoConfig.for_model(model_type, **values | SPECIAL.get(model_type, {}) | extra)


def _small(known: dict[str, Any], sizes: dict[str, Any]) -> dict[str, Any]:
    """Return the part of `sizes` that a configuration knows, also for configurations inside it."""
    values = {k: v for k, v in sizes.items() if k in known}
    if "qk_rope_head_dim" in known and "kv_lora_rank" in known:
        values |= {k: v for k, v in LATENT.items() if k in known}
    kinds = list(dict.fromkeys(known.get("layer_types") or []))
    if len(kinds) == 2 and known.get("model_type") not in ONE_KIND:
        values["layer_types"] = kinds  # the default may have the same kind for the first layers
    for name, inner in known.items():
        if isinstance(inner, dict) and (name.endswith("_config") or name in ("decoder", "encoder")):
            values[name] = _small(inner, sizes)
    return values
