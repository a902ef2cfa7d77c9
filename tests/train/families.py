"""Small random models of transformers' architectures, built from their configurations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from posttrain.models import tiny

ROWS = len(tiny.build_tokenizer())
# Names of sizes in all configurations; keys unknown to a configuration are dropped.
SIZES: dict[str, Any] = {
    **{"vocab_size": ROWS, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.2},
    **{"hidden_size": 32, "n_embd": 32, "d_model": 32, "word_embed_proj_dim": 32, "embedding_size": 32},
    **{"intermediate_size": 48, "n_inner": 48, "ffn_dim": 48, "ffn_hidden_size": 48, "d_ff": 48},
    **{"num_hidden_layers": 2, "n_layer": 2, "n_layers": 2, "num_layers": 2, "decoder_layers": 2},
    **{"num_attention_heads": 4, "n_head": 4, "n_heads": 4, "decoder_attention_heads": 4, "num_key_value_heads": 2},
    **{"image_size": 56, "head_dim": 8, "rotary_dim": 8, "max_position_embeddings": 128, "n_positions": 128},
    **{"num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4, "n_shared_experts": 1},
    **{"num_experts_per_tok": 2, "moe_k": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
    **{"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16},
    **{"kv_lora_rank": 8, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8},
    **{"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
    **{"state_size": 8, "attention_hidden_size": 32, "hidden_size_per_layer_input": 8, "laurel_rank": 8},
    **{"vocab_size_per_layer_input": ROWS, "num_kv_shared_layers": 0},
    **{"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": 8},
    **{"mamba_expand": 1, "mamba_dt_rank": 4},
}

# Attention with compressed keys has as many of them as queries.
KEYS = {kind: {"num_key_value_heads": 4} for kind in ("deepseek_v2", "deepseek_v3", "deepseek_v32", "axk1")}


def family(kind: str, *, seed: int = 0, **keys: Any) -> Any:
    """Return a float32 model of two layers with a vocabulary of `ROWS`; `keys` change the configuration."""
    config = _config(CONFIG_MAPPING[kind], keys)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config).float().eval()


def _config(kind: Any, keys: dict[str, Any]) -> Any:
    default = kind()
    own = {key for key in SIZES if hasattr(default, key) and not isinstance(getattr(kind, key, None), property)}
    values = {key: value for key, value in SIZES.items() if key in own}
    for key in ("layer_types", "mlp_layer_types"):
        if isinstance(layers := getattr(default, key, None), list) and key in vars(default):
            values[key] = [layers[0], layers[-1]]
    values |= {**KEYS.get(default.model_type, {}), **keys}
    parts = getattr(kind, "sub_configs", {})
    inner = {
        name: _config(type(getattr(default, name)), keys).to_dict() for name in parts if getattr(default, name, None)
    }
    return kind(**values | inner)


def save_family(kind: str, folder: Path, **keys: Any) -> Path:
    """Return the folder of the model, written by transformers alone, with the tokenizer of `tiny`."""
    family(kind, **keys).save_pretrained(folder)
    tiny.build_tokenizer().save_pretrained(folder)
    return folder
