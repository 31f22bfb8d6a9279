"""Tiny random models of many families of transformers, by the name of the family.

Windows are short and weights large, so that what a family does otherwise than plain causal attention
shows within a few tokens.
"""

from typing import Any, Final

import torch
import transformers
from transformers import PreTrainedModel

VOCABULARY: Final = 64
_VOCABULARY: Final[dict[str, Any]] = {"vocab_size": VOCABULARY, "initializer_range": 0.2}
_TOKENS: Final[dict[str, Any]] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_LLAMA: Final[dict[str, Any]] = {
    **_VOCABULARY,
    **_TOKENS,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
_HEADS: Final[dict[str, Any]] = {**_LLAMA, "head_dim": 8}
_EXPERTS: Final[dict[str, Any]] = {
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "decoder_sparse_step": 1,
}
_GPT2: Final[dict[str, Any]] = {
    **_VOCABULARY,
    **_TOKENS,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 128,
}
_DEEPSEEK: Final[dict[str, Any]] = {
    **_LLAMA,
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
_MAMBA_2: Final[dict[str, Any]] = {
    "mamba_n_heads": 4,
    "mamba_n_groups": 1,
    "mamba_d_state": 8,
    "mamba_chunk_size": 8,
}
# Of the releases of Falcon-H1; trained weights make up for them, random ones do not.
_MULTIPLIERS: Final[dict[str, Any]] = {
    "mamba_d_ssm": 32,
    "mamba_d_head": 8,
    "embedding_multiplier": 5.656854249492381,
    "lm_head_multiplier": 0.0390625,
    "mlp_multipliers": [0.8838834764831844, 0.5859375],
    "ssm_in_multiplier": 1.25,
    "ssm_out_multiplier": 0.23570226039551584,
    "ssm_multipliers": [0.35, 0.25, 0.35, 0.5, 0.35],
    "attention_out_multiplier": 0.9375,
    "key_multiplier": 0.39,
}

FAMILIES: Final[dict[str, dict[str, Any]]] = {
    # plain causal attention
    "Llama": _LLAMA,
    "Qwen2": _LLAMA,
    "Qwen3": _HEADS,
    "Phi": _LLAMA,
    "Phi3": _LLAMA,
    "Olmo": _LLAMA,
    "Olmo2": _LLAMA,
    "Granite": _LLAMA,
    "SmolLM3": _LLAMA,
    "Starcoder2": _LLAMA,
    "StableLm": _LLAMA,
    "Cohere": _LLAMA,
    "Glm": _HEADS,
    "Glm4": _HEADS,
    "Nemotron": _LLAMA,
    "Persimmon": _LLAMA,
    "Arcee": _LLAMA,
    "Ernie4_5": _HEADS,
    "Helium": _HEADS,
    "HunYuanDenseV1": _HEADS,
    "SeedOss": _HEADS,
    "DiffLlama": _LLAMA,
    "BitNet": _LLAMA,
    "Gemma": _HEADS,
    "GPT2": _GPT2,
    "GPTBigCode": _GPT2,
    "GPTJ": {**_GPT2, "rotary_dim": 4},
    "CodeGen": {**_GPT2, "rotary_dim": 4},
    "GPTNeoX": _LLAMA,
    "BioGpt": _LLAMA,
    "OPT": {
        **_LLAMA,
        "ffn_dim": 48,
        "word_embed_proj_dim": 32,
        "init_std": 0.2,
    },
    "XGLM": {
        **_VOCABULARY,
        "d_model": 32,
        "num_layers": 2,
        "attention_heads": 4,
        "ffn_dim": 48,
        "max_position_embeddings": 128,
        "init_std": 0.2,
    },
    "Falcon": _LLAMA,
    # experts
    "Qwen2Moe": {**_LLAMA, **_EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 16},
    "Qwen3Moe": {**_HEADS, **_EXPERTS, "num_experts": 4},
    "Olmoe": {**_LLAMA, **_EXPERTS, "num_experts": 4},
    "Mixtral": {**_LLAMA, **_EXPERTS, "num_local_experts": 4},
    "Phimoe": {**_LLAMA, "num_local_experts": 4},
    "GraniteMoe": {**_LLAMA, **_EXPERTS, "num_local_experts": 4},
    "JetMoe": {**_LLAMA, "kv_channels": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
    "DeepseekV2": {**_DEEPSEEK, "q_lora_rank": None, "topk_method": "greedy"},
    "DeepseekV3": {**_DEEPSEEK, "q_lora_rank": 16, "n_group": 2, "topk_group": 1},
    # windows, chunks, caps, sinks
    "Mistral": {**_LLAMA, "sliding_window": 8},
    "Ministral": {**_HEADS, "layer_types": ["sliding_attention"] * 2, "sliding_window": 8},
    "Gemma2": {
        **_HEADS,
        "sliding_window": 8,
        "query_pre_attn_scalar": 8,
        "attn_logit_softcapping": 5.0,
    },
    "Gemma3Text": {**_HEADS, "num_hidden_layers": 6, "sliding_window": 8},
    "Gemma3nText": {
        **_HEADS,
        "num_hidden_layers": 5,
        "sliding_window": 8,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCABULARY,
        "laurel_rank": 4,
        "altup_num_inputs": 2,
        "num_kv_shared_layers": 0,
    },
    "Gemma4Text": {
        **_HEADS,
        "num_hidden_layers": 6,
        "sliding_window": 8,
        "global_head_dim": 16,  # of layers with full attention
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCABULARY,
        "num_kv_shared_layers": 0,
    },
    "Cohere2": {**_LLAMA, "num_hidden_layers": 4, "sliding_window": 8, "logit_scale": 1.0},
    "Exaone4": {**_LLAMA, "num_hidden_layers": 4, "sliding_window": 8},
    "Olmo3": {**_LLAMA, "num_hidden_layers": 4, "sliding_window": 8},
    "GptOss": {
        **_HEADS,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 8,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    },
    "Llama4Text": {
        **_HEADS,
        "num_hidden_layers": 4,
        "intermediate_size_mlp": 48,
        "num_local_experts": 2,
        "attention_chunk_size": 8,
        "use_qk_norm": False,
    },
    "Llama4Text:tuned": {
        **_HEADS,
        "num_hidden_layers": 4,
        "intermediate_size_mlp": 48,
        "num_local_experts": 2,
        "use_qk_norm": False,
        "attention_chunk_size": 4096,
        "floor_scale": 24,  # from here on, counted along the row, attention is sharper
        "attn_scale": 2.0,
    },
    "GPTNeo": {
        **_VOCABULARY,
        **_TOKENS,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_layers": 2,
        "num_heads": 4,
        "attention_types": [[["global", "local"], 1]],
        "window_size": 8,
        "max_position_embeddings": 128,
    },
    # linear biases instead of positions
    "Bloom": {**_VOCABULARY, "hidden_size": 32, "n_layer": 2, "n_head": 4},
    "Mpt": {**_VOCABULARY, "d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 128},
    "Falcon:alibi": {**_LLAMA, "alibi": True},
    # recurrent, and hybrids of both
    "Mamba": {**_VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8},
    "Mamba2": {
        **_VOCABULARY,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_heads": 4,
        "head_dim": 16,
        "state_size": 8,
        "n_groups": 2,
        "chunk_size": 8,
    },
    "xLSTM": {
        **_VOCABULARY,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_blocks": 2,
        "num_heads": 2,
        "head_dim": 16,
        "qk_dim_factor": 1.0,
        "v_dim_factor": 1.0,
        "chunk_size": 8,
    },
    "Rwkv": {
        **_VOCABULARY,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "attention_hidden_size": 32,
        "intermediate_size": 48,
        "context_length": 128,
    },
    "FalconH1": {**_LLAMA, **_MAMBA_2, "mamba_d_ssm": 32, "mamba_d_head": 8},
    "FalconH1:multiplied": {**_LLAMA, **_MAMBA_2, **_MULTIPLIERS},
    "FalconH1:flat": {
        **_LLAMA,
        **_MAMBA_2,
        **_MULTIPLIERS,
        "lm_head_multiplier": 0.01,
        "ssm_out_multiplier": 0.05,
    },
    "RecurrentGemma": {
        **_HEADS,
        "num_hidden_layers": 3,
        "lru_width": 32,
        "attention_window_size": 8,
    },
    "Zamba2": {
        **_LLAMA,
        "num_hidden_layers": 4,
        "num_key_value_heads": 4,
        "mamba_d_state": 8,
        "n_mamba_heads": 4,
        "mamba_headdim": 16,
        "mamba_ngroups": 1,
        "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
        "chunk_size": 8,
        "num_mem_blocks": 1,
    },
    "NemotronH": {
        **_HEADS,
        **_EXPERTS,
        "num_hidden_layers": 4,
        "layers_block_type": ["mamba", "attention", "mlp", "moe"],
        "mamba_num_heads": 4,
        "mamba_head_dim": 8,
        "ssm_state_size": 8,
        "n_groups": 1,
        "chunk_size": 8,
        "n_routed_experts": 4,
        "moe_shared_expert_intermediate_size": 16,
    },
    "Bamba": {**_LLAMA, **_MAMBA_2, "attn_layer_indices": [1], "mamba_d_head": 16},
    "Jamba": {
        **_LLAMA,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
    },
    "GraniteMoeHybrid": {
        **_LLAMA,
        **_MAMBA_2,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "layer_types": ["mamba", "attention"],
        "mamba_d_head": 16,
        "shared_intermediate_size": 16,
    },
    "Qwen3Next": {
        **_HEADS,
        **_EXPERTS,
        "num_hidden_layers": 4,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "num_experts": 4,
        "shared_expert_intermediate_size": 16,
    },
    "Lfm2": {**_LLAMA, "layer_types": ["conv", "full_attention"], "block_multiple_of": 8},
    "MiniMax": {
        **_HEADS,
        "layer_types": ["linear_attention", "full_attention"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "block_size": 8,
    },
}
"""Arguments of each family's config; what follows a colon tells two of a family apart."""

LONG_ROPES: Final[dict[str, dict[str, Any]]] = {
    "dynamic": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4},
    "longrope": {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0] * 4,
        "long_factor": [1.0, 2.0, 4.0, 8.0],
        "original_max_position_embeddings": 16,
    },
}
"""Rotary frequencies that transformers chooses by the longest row of a batch."""

_MODELS: Final = {
    "Gemma3Text": "Gemma3ForCausalLM",
    "Gemma3nText": "Gemma3nForCausalLM",
    "Gemma4Text": "Gemma4ForCausalLM",
    "GPT2": "GPT2LMHeadModel",
    "Llama4Text": "Llama4ForCausalLM",
}


def family_model(name: str, **changes: Any) -> PreTrainedModel:
    """A random model of a family in evaluation mode; keywords change its config."""
    family = name.partition(":")[0]
    config = getattr(transformers, f"{family}Config")(**{**FAMILIES[name], **changes})
    torch.manual_seed(0)
    model = getattr(transformers, _MODELS.get(family, f"{family}ForCausalLM"))(config)
    return model.eval()
