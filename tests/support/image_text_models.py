"""Tiny random image-text models, groups with pictures, and the plain forward pass of one sample."""

# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false
# torch and transformers declare some functions without types.

from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import wraps
from types import FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
    SmolVLMConfig,
    SmolVLMForConditionalGeneration,
)

from offbeat.messages.media import Media
from offbeat.plugins.images.pictures import MediaKind, Pictures

PLACEHOLDER = 60
_TEXT: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
}
_TOWER_OF_PIXELS: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 8,
}
_IDEFICS: dict[str, Any] = {
    "image_token_id": PLACEHOLDER,
    "scale_factor": 2,
    "pad_token_id": 0,
    "text_config": {"model_type": "llama", **_TEXT},
    "vision_config": _TOWER_OF_PIXELS,
}
_QWEN: dict[str, Any] = {
    "image_token_id": PLACEHOLDER,
    "vision_start_token_id": 61,
    "vision_end_token_id": 62,
    "video_token_id": 63,
    "tie_word_embeddings": False,
}
_AXES = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
_QWEN2_TEXT: dict[str, Any] = {**_TEXT, "rope_parameters": _AXES}
_QWEN3_TEXT: dict[str, Any] = {**_QWEN2_TEXT, "head_dim": 8}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_TOWER_OF_PATCHES: dict[str, Any] = {
    "patch_size": 8,
    "spatial_merge_size": 2,
    "temporal_patch_size": 1,
    "in_channels": 3,
    "depth": 2,
    "hidden_size": 32,
    "num_heads": 4,
}
_WIDE_TOWER: dict[str, Any] = {
    **_TOWER_OF_PATCHES,
    "intermediate_size": 64,
    "out_hidden_size": 32,
}
_QWEN2_5_TOWER: dict[str, Any] = {**_WIDE_TOWER, "window_size": 32, "fullatt_block_indexes": [1]}
_QWEN3_TOWER: dict[str, Any] = {
    **_WIDE_TOWER,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0],
}


def _of(
    model: type[Any], config: type[Any], shared: dict[str, Any], **own: Any
) -> Callable[[], PreTrainedModel]:
    """Return a function that makes a random model of a family."""
    return lambda: model(config(**deepcopy({**shared, **own})))


def _gemma3() -> PreTrainedModel:
    model: Any = Gemma3ForConditionalGeneration(
        Gemma3Config(
            image_token_index=PLACEHOLDER,
            mm_tokens_per_image=4,
            tie_word_embeddings=True,
            text_config={**_TEXT, "head_dim": 8, "sliding_window": 256},
            vision_config={**_TOWER_OF_PIXELS},
        )
    )
    projection = model.model.multi_modal_projector.mm_input_projection_weight
    torch.nn.init.normal_(projection, std=0.1)  # transformers begins with zeros
    return model


MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "idefics3": _of(
        Idefics3ForConditionalGeneration, Idefics3Config, _IDEFICS, tie_word_embeddings=False
    ),
    "smolvlm": _of(
        SmolVLMForConditionalGeneration, SmolVLMConfig, _IDEFICS, tie_word_embeddings=True
    ),
    "qwen2_vl": _of(
        Qwen2VLForConditionalGeneration,
        Qwen2VLConfig,
        _QWEN,
        text_config=_QWEN2_TEXT,
        vision_config={**_TOWER_OF_PATCHES, "embed_dim": 32},
    ),
    "qwen2_5_vl": _of(
        Qwen2_5_VLForConditionalGeneration,
        Qwen2_5_VLConfig,
        _QWEN,
        text_config=_QWEN2_TEXT,
        vision_config=_QWEN2_5_TOWER,
    ),
    "qwen3_vl": _of(
        Qwen3VLForConditionalGeneration,
        Qwen3VLConfig,
        _QWEN,
        text_config=_QWEN3_TEXT,
        vision_config=_QWEN3_TOWER,
    ),
    "qwen3_vl_moe": _of(
        Qwen3VLMoeForConditionalGeneration,
        Qwen3VLMoeConfig,
        _QWEN,
        text_config={**_QWEN3_TEXT, **_EXPERTS},
        vision_config=_QWEN3_TOWER,
    ),
    "gemma3": _gemma3,
}


def make(family: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A model of a family with fixed weights, large enough that log-probabilities differ."""
    torch.manual_seed(7)
    model = MODELS[family]()
    with torch.no_grad():
        for each in model.parameters():
            if each.ndim > 1:
                each.mul_(5)
    torch.nn.Module.to(model, dtype)  # in place
    return model.eval()


def exact_norms(model: PreTrainedModel) -> PreTrainedModel:
    """Let norms compute in the model's dtype: transformers' own round to float32 inside."""
    module: Any
    for module in model.modules():
        if type(module).__name__ == "Gemma3RMSNorm":
            module.forward = _norm_of(module, module.eps, 1.0)
        elif type(module).__name__.endswith("RMSNorm") and hasattr(module, "variance_epsilon"):
            module.forward = _norm_of(module, module.variance_epsilon, 0.0)
    return model


def _norm_of(module: Any, eps: float, offset: float) -> Callable[[Tensor], Tensor]:
    def norm(hidden: Tensor) -> Tensor:
        variance = hidden.pow(2).mean(-1, keepdim=True)
        return (offset + module.weight) * (hidden * torch.rsqrt(variance + eps))

    return norm


def exact_angles(model: PreTrainedModel) -> PreTrainedModel:
    """Let Qwen's towers rotate float64 queries and keys in float64: transformers rounds to float32.

    What is rounded is a step of 1e-7 where sums in another order differ by 1e-16.
    """
    module: Any
    for module in model.modules():
        if type(module).__name__.endswith("VisionAttention"):
            plain: Any = type(module).forward
            known = plain.__globals__ | {"apply_rotary_pos_emb_vision": _rotated}
            forward = FunctionType(
                plain.__code__, known, plain.__name__, plain.__defaults__, plain.__closure__
            )
            module.forward = MethodType(forward, module)
    return model


def _rotated(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(query.dtype, torch.float32)
    cos, sin = cos.unsqueeze(-2).to(wide), sin.unsqueeze(-2).to(wide)

    def rotated(values: Tensor) -> Tensor:
        first, second = values.to(wide).chunk(2, dim=-1)
        turned = torch.cat((-second, first), dim=-1)
        return (values.to(wide) * cos + turned * sin).to(values.dtype)

    return rotated(query), rotated(key)


def patched(seed: int, *grids: tuple[int, int, int]) -> Media:
    """Random pictures of these grids of patches, as the processors of Qwen's families leave them."""
    count = sum(int(np.prod(grid)) for grid in grids) * 3 * 8 * 8
    values = np.random.default_rng(seed).standard_normal(count, np.float32)
    return Pictures(MediaKind.PATCHES, values, np.array(grids, np.int32)).media


def pictures(seed: int, count: int = 1, family: str = "idefics3") -> Media:
    """Random pictures of four tokens each, as the processor of a family leaves them."""
    if family.startswith("qwen"):
        return patched(seed, *([(1, 4, 4), (1, 8, 2)] * count)[:count])
    values = np.random.default_rng(seed).standard_normal(count * 3 * 32 * 32, np.float32)
    return Pictures(MediaKind.PIXELS, values, np.array([[3, 32, 32]] * count, np.int32)).media


def prompt_with(count: int, *text: int) -> tuple[int, ...]:
    """Token ids of a prompt with pictures, four placeholders each, and text behind them."""
    return (1, *((61, *[PLACEHOLDER] * 4, 62) * count), *text)


def picture_groups(
    counts: Sequence[int], seed: int = 0, family: str = "idefics3"
) -> list[dict[str, Any]]:
    """Groups of three random responses, behind prompts with so many pictures each."""
    rng = np.random.default_rng(seed)
    groups = list[dict[str, Any]]()
    for count in counts:
        lengths = rng.integers(1, 7, 3)
        total, text = int(lengths.sum()), rng.integers(2, 50, rng.integers(1, 5)).tolist()
        group: dict[str, Any] = {
            "prompt_ids": np.array(prompt_with(count, *text), np.int32),
            "response_ids": rng.integers(0, 50, total, dtype=np.int32),
            "response_offsets": np.cumsum([0, *lengths]).astype(np.int64),
            "loss_mask": rng.random(total) >= 0.2,
            "weight_versions": np.zeros(total, np.int32),
            "rewards": rng.random(3).astype(np.float32),
        }
        for name in ("generation_logprobs", "policy_logprobs", "reference_logprobs"):
            group[name] = (-4 + rng.normal(0, 0.3, total)).astype(np.float32)
        if count:
            group |= pictures(int(rng.integers(1000)), count, family)
        groups.append(group)
    return groups


def logprobs_with_features_in_the_prompt_alone(
    model: Any, prompt: Sequence[int], response: Sequence[int], media: Media
) -> Tensor:
    """Log-probabilities of a response that may have placeholder ids, which stay tokens."""
    ids = torch.tensor([[*prompt, *response]])
    given = Pictures.of(media)
    shape = (1, len(given.sizes), *given.sizes[0].tolist())
    pixels = torch.from_numpy(given.values).view(shape).to(model.dtype)
    features = model.get_image_features(pixel_values=pixels).pooler_output
    embedded = model.get_input_embeddings()(ids).clone()
    is_picture = torch.tensor([*prompt, *response]) == model.config.image_token_id
    is_picture[len(prompt) :] = False
    embedded[0, is_picture] = torch.cat(list(features))  # one by one since transformers 5.24
    logits = model(inputs_embeds=embedded, use_cache=False).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(-1, torch.tensor(response)[:, None])[:, 0]


def native_inputs(model: PreTrainedModel, ids: Tensor, media: Media | None) -> dict[str, Tensor]:
    """What transformers' own forward pass over ids takes for pictures."""
    if media is None:
        return {}
    given = Pictures.of(media)
    values = torch.from_numpy(given.values).to(model.dtype)
    if given.kind is MediaKind.PIXELS:
        pixels = values.view(len(given.sizes), *given.sizes[0].tolist())
        if type(model) is Gemma3ForConditionalGeneration:
            return {"pixel_values": pixels, "token_type_ids": (ids == PLACEHOLDER).int()}
        return {"pixel_values": pixels[None]}
    return {
        "pixel_values": values.view(-1, 3 * 8 * 8),
        "image_grid_thw": torch.from_numpy(given.sizes.astype(np.int64)),
        "mm_token_type_ids": (ids == PLACEHOLDER).int(),
    }


def plain_logprobs(
    model: PreTrainedModel, prompt: Sequence[int], response: Sequence[int], media: Media | None
) -> Tensor:
    """Log-probabilities of a response by transformers' own pass over ids and pictures, one row.

    A response must have no placeholder id: transformers would look for its picture.
    """
    ids = torch.tensor([[*prompt, *response]])
    further = native_inputs(model, ids, media)
    logits = model(
        input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False, **further
    ).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(-1, torch.tensor(response)[:, None])[:, 0]


class HalvesPictures(Idefics3ForConditionalGeneration):
    """A model whose own pass does something to pictures that its tower alone does not."""

    @wraps(Idefics3ForConditionalGeneration.forward)  # whose inputs have the names of its version
    def forward(self, *, pixel_values: Any = None, **further: Any) -> Any:
        return super().forward(
            pixel_values=None if pixel_values is None else pixel_values / 2, **further
        )
