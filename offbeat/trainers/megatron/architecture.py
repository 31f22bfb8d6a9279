"""Sizes of a model, read from its Hugging Face config; unsupported features are refused."""

# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false
# transformers leaves its configs and its loading functions untyped.

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from transformers import AutoConfig

from offbeat.trainers.errors import UntrainableModel

_FAMILIES: Final = ("qwen2", "qwen3", "llama", "qwen3_moe")
_TORCH: Final = "Train it with trainer.backend: torch"


@dataclass(frozen=True, slots=True)
class Architecture:
    """The sizes of a decoder of the Llama kind: gated MLP, RMS norms, rotary positions."""

    name: str
    layers: int
    hidden: int
    heads: int
    groups: int  # key-value heads
    head_dim: int
    intermediate: int  # of the MLP, or of each expert
    vocabulary: int
    max_positions: int
    norm_eps: float
    rope_theta: float
    tied: bool  # whether the output head is the embedding
    qkv_bias: bool = False
    qk_norm: bool = False
    experts: int = 0
    experts_per_token: int = 0
    normalise_routing: bool = True  # whether the weights of a token's experts sum to 1

    @property
    def layer_weights(self) -> int:
        """Return the number of elements of one layer's matrices that a token is multiplied with."""
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.groups)
        return attention + 3 * self.hidden * self.intermediate * max(1, self.experts_per_token)


def read_architecture(path: str | Path) -> Architecture:
    """Read the architecture of the model in a Hugging Face directory.

    Raises:
        UntrainableModel: Not a decoder that is mapped here, or it has an unsupported feature.
    """
    config = AutoConfig.from_pretrained(path, local_files_only=True)
    values: dict[str, Any] = config.to_dict()
    family = values["model_type"]
    name = (values.get("architectures") or [family])[0]
    if family not in _FAMILIES:
        raise UntrainableModel(name, f"is none of {', '.join(_FAMILIES)}", _TORCH)
    for problem in _problems(values):
        raise UntrainableModel(name, problem, _TORCH)
    experts = config.num_experts if family == "qwen3_moe" else 0
    return Architecture(
        name=name,
        layers=values["num_hidden_layers"],
        hidden=values["hidden_size"],
        heads=values["num_attention_heads"],
        groups=values["num_key_value_heads"],
        head_dim=values.get("head_dim") or values["hidden_size"] // values["num_attention_heads"],
        intermediate=values["moe_intermediate_size" if experts else "intermediate_size"],
        vocabulary=values["vocab_size"],
        max_positions=values["max_position_embeddings"],
        norm_eps=values["rms_norm_eps"],
        rope_theta=values["rope_parameters"]["rope_theta"],
        tied=bool(values["tie_word_embeddings"]),
        qkv_bias=family == "qwen2",
        qk_norm=family in ("qwen3", "qwen3_moe"),
        experts=experts,
        experts_per_token=values["num_experts_per_tok"] if experts else 0,
        normalise_routing=bool(values.get("norm_topk_prob", True)),
    )


def _problems(values: dict[str, Any]) -> list[str]:
    """Return the features of a config that this trainer would compute wrongly."""
    rope = values["rope_parameters"]["rope_type"]
    kinds = set(values.get("layer_types") or ["full_attention"]) - {"full_attention"}
    checks = {
        f"scales its positions by {rope!r}": rope != "default",
        f"has layers of kind {', '.join(sorted(kinds))}": bool(kinds),
        f"computes its MLP with {values['hidden_act']!r}": values["hidden_act"] != "silu",
        "has biases in attention": bool(values.get("attention_bias")),
        "has biases in the MLP": bool(values.get("mlp_bias")),
        "mixes dense layers and layers of experts": bool(values.get("mlp_only_layers"))
        or values.get("decoder_sparse_step", 1) != 1,
    }
    return [problem for problem, found in checks.items() if found]
