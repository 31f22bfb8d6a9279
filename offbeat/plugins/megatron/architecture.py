"""Reads a model's sizes from its Hugging Face config, and counts the operations of its passes.

Unsupported features are refused.

Also reads the parts of an image-text model: decoder, vision tower, positions of pictures.
"""

# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false
# transformers leaves its configs and its loading functions untyped.

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from transformers import AutoConfig, PreTrainedConfig, PretrainedConfig, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from offbeat.config.sections.moe import MoeConfig
from offbeat.models.loading import find_auto_class
from offbeat.models.media_rules import TEXT_ONLY, MediaRules, media_rules
from offbeat.trainers.errors import UntrainableModel
from offbeat.trainers.flops import PER_DIMENSION, PER_WEIGHT, ModelFlops
from offbeat.trainers.sides import Side, keep_side
from offbeat.weight_sync.region import Shape

IMAGE_TEXT_FAMILIES: Final = (
    "idefics3",
    "smolvlm",
    "qwen2_vl",
    "qwen2_5_vl",
    "qwen3_vl",
    "qwen3_vl_moe",
)
_INTERLEAVED: Final = ("qwen3_vl", "qwen3_vl_moe")  # neighbouring pairs belong to different axes
_AXES: Final = 3


@dataclass(frozen=True, slots=True)
class ImageTextParts:
    """Parts of an image-text model: the decoder's name, and weights outside decoder and head."""

    decoder: str  # name of its module
    tower: tuple[tuple[str, Shape], ...]
    """Names in the model and shapes of the weights outside decoder and output head."""
    tied: bool  # whether the output head is the embedding
    rules: MediaRules
    axis_of_pair: tuple[int, ...] | None
    """Position axis that turns each pair of a head's dimensions. None: there is one axis."""
    deep_layers: int
    """Number of first layers that get features of pictures added to their outputs."""


def image_text_parts(config: PreTrainedConfig) -> ImageTextParts:
    """Return the parts of a model of ``IMAGE_TEXT_FAMILIES``, which is created without memory."""
    with torch.device("meta"):
        model: PreTrainedModel = find_auto_class(config).from_config(config)
    decoder = decoder_name(model)
    head = model.get_output_embeddings()
    embedding = model.get_input_embeddings().get_parameter("weight")
    rules = media_rules(config)
    assert head is not None  # noqa: S101 -- every such family has one
    axes = (
        _axes(model, is_interleaved=config.model_type in _INTERLEAVED) if rules.has_axes else None
    )
    keep_side(model, Side.TOWER)
    tower = tuple((name, tuple(each.shape)) for name, each in model.named_parameters())
    return ImageTextParts(
        decoder=decoder,
        tower=tower,
        tied=head.get_parameter("weight") is embedding,
        rules=rules,
        axis_of_pair=axes,
        deep_layers=rules.deep_layers,
    )


def decoder_name(model: PreTrainedModel) -> str:
    """Return the name of the decoder's module in a model."""
    decoder = model.get_decoder()
    return next(name for name, each in model.named_modules() if each is decoder)


def _axes(model: PreTrainedModel, *, is_interleaved: bool) -> tuple[int, ...]:
    """Return the axis of each pair of a head's dimensions of a model without memory."""
    rotary: Any = model.get_decoder().get_submodule("rotary_emb")
    sections: list[int] = rotary.mrope_section
    if not is_interleaved:
        return tuple(axis for axis in range(_AXES) for _ in range(sections[axis]))
    # The first axis gets the pairs that remain after the other axes are used up.
    turns = ((pair // _AXES, pair % _AXES) for pair in range(sum(sections)))
    return tuple(axis if turn < sections[axis] else 0 for turn, axis in turns)


_FAMILIES: Final = ("qwen2", "qwen3", "llama", "qwen2_moe", "qwen3_moe", "glm4_moe", "dots1")
_EVERY: Final = ", ".join((*_FAMILIES, *IMAGE_TEXT_FAMILIES))
_DECODERS: Final = ("qwen2_vl_text", "qwen2_5_vl_text", "qwen3_vl_text", "qwen3_vl_moe_text")
"""Decoders of image-text models."""

_WITH_QKV_BIAS: Final = ("qwen2", "qwen2_vl_text", "qwen2_5_vl_text")
_WITH_QK_NORM: Final = ("qwen3", "qwen3_moe", "dots1", "qwen3_vl_text", "qwen3_vl_moe_text")
_SOFTMAX_ROUTERS: Final = ("qwen2_moe", "qwen3_moe", "qwen3_vl_moe_text")
_SIGMOID_ROUTERS: Final = ("glm4_moe", "dots1")
_ROPES: Final = ("default", "linear", "llama3", "yarn")  # the same angles in rows of any length
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
    intermediate: int  # of the MLP of layers without experts
    vocabulary: int
    max_positions: int
    norm_eps: float
    rope_theta: float
    tied: bool  # whether the output head is the embedding
    qkv_bias: bool = False
    qk_norm: bool = False
    experts: int = 0
    expert_intermediate: int = 0  # of each expert
    shared_intermediate: int = 0  # of an expert that all tokens pass; 0: there is none
    shared_gate: bool = True  # whether that expert is behind a gate
    shared_name: str = "shared_expert"  # of its module
    dense_layers: tuple[int, ...] = ()  # layers without experts, in a model that has some
    rope_frequencies: tuple[float, ...] | None = None
    """Angle of each pair of a head's dimensions per position. None: powers of ``rope_theta``."""
    rope_scale: float = 1.0  # factor of rotated queries and keys
    experts_per_token: int = 0
    normalise_routing: bool = True  # whether the weights of a token's experts sum to 1
    sigmoid_routing: bool = False
    """Whether scores are sigmoids, and experts are chosen by score plus a bias (a buffer)."""
    routing_scale: float = 1.0  # factor of the weights of a token's experts
    routing_groups: int = 1  # equal groups of experts
    routing_groups_per_token: int = 1  # groups among which the experts of a token are chosen
    rotary_fraction: float = 1.0  # part of each head's dimensions that is rotated
    decoder: str = "model"  # Hugging Face name of the module that has embedding, layers and norm
    tower: tuple[tuple[str, Shape], ...] = ()
    """Hugging Face names and shapes of weights that turn media into features, if the model reads
    media."""
    media_rules: MediaRules = TEXT_ONLY
    axis_of_pair: tuple[int, ...] | None = None
    """Position axis that rotates each pair of a head's dimensions. None: there is one axis."""
    deep_layers: int = 0  # first layers that get features of media added to their outputs

    def has_experts(self, layer: int) -> bool:
        """Return whether a layer has experts instead of one MLP."""
        return self.experts > 0 and layer not in self.dense_layers

    @property
    def expert_layers(self) -> tuple[int, ...]:
        """Return the layers that have experts."""
        return tuple(layer for layer in range(self.layers) if self.has_experts(layer))

    @property
    def has_dense_layers(self) -> bool:
        """Return whether a layer has one MLP."""
        return not self.experts or bool(self.dense_layers)

    @property
    def layer_weights(self) -> int:
        """Return the number of elements of one layer's matrices that a token is multiplied with.

        If only some layers have experts, count a layer with experts.
        """
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.groups)
        wide = self.intermediate
        if self.experts:
            wide = self.expert_intermediate * self.experts_per_token + self.shared_intermediate
        return attention + 3 * self.hidden * wide


def read_architecture(path: str | Path) -> Architecture:
    """Read the architecture of the model in a Hugging Face directory.

    Raises:
        UntrainableModel: The model is not a mapped decoder, or has an unsupported feature.
    """
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True)
    except ValueError as unknown:
        problem = f"is not known to transformers: {str(unknown).partition('.')[0]}"
        raise UntrainableModel(str(path), problem, "Take a model of a family it has") from unknown
    name = ((config.architectures or []) + [config.model_type])[0]
    parts = _image_text(name, config)
    if parts is not None:
        config = config.get_text_config(decoder=True)
    values: dict[str, Any] = config.to_dict()
    family = values["model_type"]
    if family not in _FAMILIES and not (parts is not None and family in _DECODERS):
        problem = f"is of family {family}{_why_unmapped(values)}, not one of {_EVERY}"
        raise UntrainableModel(name, problem, _TORCH)
    for problem in _problems(values):
        raise UntrainableModel(name, problem, _TORCH)
    layers: int = values["num_hidden_layers"]
    experts = _experts(config)
    dense = _dense_layers(values) if experts else ()
    if len(dense) == layers:
        experts, dense = 0, ()
    frequencies, scale = _rotation(config)
    is_sigmoid = family in _SIGMOID_ROUTERS and experts > 0
    return Architecture(
        name=name,
        layers=layers,
        hidden=values["hidden_size"],
        heads=values["num_attention_heads"],
        groups=values["num_key_value_heads"],
        head_dim=values.get("head_dim") or values["hidden_size"] // values["num_attention_heads"],
        intermediate=values["intermediate_size"],
        vocabulary=values["vocab_size"],
        max_positions=values["max_position_embeddings"],
        norm_eps=values["rms_norm_eps"],
        rope_theta=values["rope_parameters"]["rope_theta"],
        rope_frequencies=frequencies,
        rope_scale=scale,
        tied=bool(values["tie_word_embeddings"]) if parts is None else parts.tied,
        rotary_fraction=values["rope_parameters"].get("partial_rotary_factor", 1.0),
        qkv_bias=_has_qkv_bias(values),
        qk_norm=family in _WITH_QK_NORM or bool(values.get("use_qk_norm")),
        experts=experts,
        expert_intermediate=values["moe_intermediate_size"] if experts else 0,
        shared_intermediate=_find_shared_intermediate(values) if experts else 0,
        shared_gate=not is_sigmoid,
        shared_name="shared_experts" if is_sigmoid else "shared_expert",
        dense_layers=dense,
        experts_per_token=values["num_experts_per_tok"] if experts else 0,
        normalise_routing=bool(values.get("norm_topk_prob", True)),
        sigmoid_routing=is_sigmoid,
        routing_scale=values["routed_scaling_factor"] if is_sigmoid else 1.0,
        routing_groups=values["n_group"] if is_sigmoid else 1,
        routing_groups_per_token=values["topk_group"] if is_sigmoid else 1,
        decoder="model" if parts is None else parts.decoder,
        tower=() if parts is None else parts.tower,
        media_rules=TEXT_ONLY if parts is None else parts.rules,
        axis_of_pair=None if parts is None else parts.axis_of_pair,
        deep_layers=0 if parts is None else parts.deep_layers,
    )


def _image_text(name: str, config: PretrainedConfig) -> ImageTextParts | None:
    """Return the parts of a model that reads media, or None for other models."""
    if "vision_config" not in config.sub_configs:
        return None
    if config.model_type not in IMAGE_TEXT_FAMILIES:
        problem = f"is of family {config.model_type} (it reads media), not one of {_EVERY}"
        raise UntrainableModel(name, problem, _TORCH)
    return image_text_parts(config)


def check_balanced(architecture: Architecture, moe: MoeConfig) -> None:
    """Refuse settings of ``trainer.moe`` that would have no effect on this model.

    Raises:
        UntrainableModel: It has no experts, or its routers have no bias to update.
    """
    if not architecture.experts and (moe.has_losses or moe.bias_update_rate):
        problem = "has no experts, which trainer.moe would balance"
        raise UntrainableModel(architecture.name, problem, "Leave trainer.moe out")
    if moe.bias_update_rate and not architecture.sigmoid_routing:
        problem = "has routers without a bias, which trainer.moe.bias_update_rate would update"
        fix = "Set trainer.moe.load_balancing_coef instead"
        raise UntrainableModel(architecture.name, problem, fix)


def check_recomputed(architecture: Architecture, *, recompute: bool) -> None:
    """Refuse ``trainer.activation_checkpointing`` for a model if it would repeat layers wrongly.

    Raises:
        UntrainableModel: Features of media are added to the outputs of its first layers.
    """
    if recompute and architecture.deep_layers:
        problem = (
            "adds features of media to what its first layers return, and "
            "trainer.activation_checkpointing repeats the layers without them"
        )
        raise UntrainableModel(
            architecture.name, problem, "Set trainer.activation_checkpointing to false"
        )


def _experts(config: PretrainedConfig) -> int:
    if config.model_type in _SOFTMAX_ROUTERS:
        return config.num_experts
    return config.n_routed_experts if config.model_type in _SIGMOID_ROUTERS else 0


def _find_shared_intermediate(values: dict[str, Any]) -> int:
    if values["model_type"] in _SIGMOID_ROUTERS:
        return values["moe_intermediate_size"] * (values["n_shared_experts"] or 0)
    return values.get("shared_expert_intermediate_size", 0)


def _has_qkv_bias(values: dict[str, Any]) -> bool:
    if values["model_type"] == "glm4_moe":
        return bool(values["attention_bias"])  # in this family none of the output's
    return bool(values.get("qkv_bias", values["model_type"] in _WITH_QKV_BIAS))


def _dense_layers(values: dict[str, Any]) -> tuple[int, ...]:
    if values["model_type"] in _SIGMOID_ROUTERS:
        return tuple(range(min(values["first_k_dense_replace"], values["num_hidden_layers"])))
    only, every = values.get("mlp_only_layers") or (), values.get("decoder_sparse_step", 1)
    layers = range(values["num_hidden_layers"])
    return tuple(layer for layer in layers if layer in only or (layer + 1) % every)


def _rotation(config: PretrainedConfig) -> tuple[tuple[float, ...] | None, float]:
    """Return frequencies and scale of scaled positions, by transformers' own formulas."""
    kind = config.rope_parameters["rope_type"]
    if kind == "default":
        return None, 1.0
    frequencies, scale = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    return tuple(frequencies.tolist()), float(scale)


def _why_unmapped(values: dict[str, Any]) -> str:
    """Return in brackets why a family is not mapped, or "" if no reason is known."""
    if "kv_lora_rank" in values:
        return " (its attention is multi-head latent attention)"
    return ""


def _problems(values: dict[str, Any]) -> list[str]:
    """Return the features of a config that this trainer would compute wrongly."""
    rotated = values["rope_parameters"]
    rope = rotated["rope_type"]
    kinds = set(values.get("layer_types") or ["full_attention"]) - {"full_attention"}
    checks = {
        f"scales its positions by {rope!r}, not by one of {', '.join(_ROPES)}": rope not in _ROPES,
        "rotates a part of each head": (
            values["model_type"] != "glm4_moe" and rotated.get("partial_rotary_factor", 1.0) != 1.0
        ),
        f"has layers of kind {', '.join(sorted(kinds))}": bool(kinds),
        f"computes its MLP with {values['hidden_act']!r}": values["hidden_act"] != "silu",
        "has biases in attention": (
            values["model_type"] != "glm4_moe" and bool(values.get("attention_bias"))
        ),
        "has biases in the MLP": bool(values.get("mlp_bias")),
    }
    return [problem for problem, found in checks.items() if found]


def architecture_flops(architecture: Architecture) -> ModelFlops | None:
    """Return the FLOPs of the model by the count of ``trainers/flops.py``, or None with a tower.

    ``6 W tokens + 6 V H places + 12 L heads head_dim pairs`` (PaLM, arXiv:2204.02311, appendix B).
    W counts the weights that a token is multiplied with: attention and MLP of every layer. In a
    layer of experts these are the token's experts, the shared expert with its gate, and the router.

    Legend: H hidden, L layers, V vocabulary.
    """
    a = architecture
    if a.tower:
        return None
    attention = 2 * a.hidden * a.head_dim * (a.heads + a.groups)
    dense = 3 * a.hidden * a.intermediate
    gate = a.hidden if a.shared_intermediate and a.shared_gate else 0
    active = a.expert_intermediate * a.experts_per_token + a.shared_intermediate
    sparse = 3 * a.hidden * active + a.experts * a.hidden + gate
    layers_of_experts = len(a.expert_layers)
    weights = (
        a.layers * attention + (a.layers - layers_of_experts) * dense + layers_of_experts * sparse
    )
    return ModelFlops(
        token=PER_WEIGHT * weights,
        place=PER_WEIGHT * a.vocabulary * a.hidden,
        pair=2 * PER_DIMENSION * a.layers * a.heads * a.head_dim,
    )
