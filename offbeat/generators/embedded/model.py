"""Loads a causal LM or an image-text model, and runs the two forward passes of an engine.

Legend: B prompts, P padded prompt length, R rows, V vocabulary, H query heads, K key heads, C columns
of the cache, D head dimension.
"""

# pyright: reportPrivateUsage=false, reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false
# transformers leaves its configs and its loading functions untyped. Each use of a private name has
# an explanation.

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, get_layer_types_and_kwargs
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from offbeat.generators.embedded.cache import ClockedCache, LayerStates
from offbeat.generators.errors import UndecodableModel, advise_another_engine
from offbeat.messages.media import Media
from offbeat.models.loading import load_causal_lm
from offbeat.models.media_passes import media_arguments, write_media
from offbeat.models.media_placing import place_media_by_row
from offbeat.models.media_rules import media_rules

_NAME = "offbeat_grouped_sdpa"


def use_grouped_attention(model: PreTrainedModel) -> None:
    """Switch a model from ``sdpa`` attention to ``attend_grouped``. Leave other models unchanged.

    Changes ``model.config``, because the model belongs to the engine.
    """
    if model.config._attn_implementation != "sdpa":  # noqa: SLF001 -- the only place it is kept
        return
    AttentionInterface.register(_NAME, attend_grouped)
    AttentionMaskInterface.register(_NAME, sdpa_mask)
    model.set_attn_implementation(_NAME)


def attend_grouped(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,  # noqa: ANN401 -- any arguments of the model
) -> tuple[Tensor, None]:
    """Compute ``sdpa_attention_forward``, for one query token without copying keys and values.

    With a mask, transformers' ``sdpa`` copies the whole cache once per query head of a group. Here
    the query heads of one key head are placed along the query axis, where they share the mask.

    Args:
        module: The attention layer.
        query: [R, H, T, D].
        key: [R, K, C, D] with K dividing H.
        value: Shaped like ``key``.
        attention_mask: [R, 1, T, C] additive, or None.
        scaling: Factor of the scores; None for ``D ** -0.5``.
        kwargs: Arguments of the ordinary path.

    Returns:
        [R, T, H, D], and None for the attention weights.
    """
    rows, heads, tokens, _ = query.shape
    key_heads = key.shape[1]
    if tokens > 1 or heads == key_heads or kwargs.get("position_bias") is not None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )
    group = heads // key_heads
    if attention_mask is not None:
        attention_mask = attention_mask.expand(rows, 1, group, key.shape[2])
    grouped = query.reshape(rows, key_heads, group, query.shape[3])
    attended = scaled_dot_product_attention(
        grouped, key, value, attn_mask=attention_mask, scale=scaling
    )
    return attended.reshape(rows, 1, heads, value.shape[3]), None


_NEEDED_INPUTS = ("input_ids", "attention_mask", "position_ids", "logits_to_keep")
_CACHE_INPUTS = ("cache", "past_key_values")
"""Argument for the cache in a model's forward: since transformers 5.24, and before."""
_NO_CACHE = "dummy"
_OF_WINDOWS = ("sliding_attention", "chunked_attention")
"""Suffixes of the layer types that cache only a window."""
CacheOptions = Mapping[str, Any]
"""Arguments for the cache of a layer, as transformers names them."""


def load_model(
    path: str | Path, dtype: torch.dtype, device: torch.device | str, *, trust_remote_code: bool
) -> PreTrainedModel:
    """Load the causal LM of a Hugging Face directory in evaluation mode, without network access.

    Raises:
        WeightsMismatch: The files do not contain the model that the config describes.
    """
    model = load_causal_lm(path, dtype, trust_remote_code=trust_remote_code)
    nn.Module.to(model, device)  # in place
    return model


class DecodedModel:
    """Causal LM in the form that the engine uses: prompts in, logits of the next token out.

    It keeps no copy of any weight, so the parameters may be overwritten in place between calls.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        """Wrap a model that has passed ``check_declared`` and ``proof``."""
        self._cache_input = _cache_input(model)
        use_grouped_attention(model)
        self.module = model.eval()
        self.vocabulary = model.get_input_embeddings().get_parameter("weight").shape[0]
        self.dtype = model.dtype
        self.media_rules = media_rules(model.config)

    def prefill(
        self,
        prompts: Sequence[Sequence[int]],
        lengths_B: Tensor,
        first: int = 0,
        media: Sequence[Media | None] = (),
    ) -> tuple[Tensor, LayerStates]:
        """Return the logits [B, V] after each prompt, and its keys and values, padded on the right.

        Padding needs no mask, because causal attention never looks to the right. ``first`` is the
        position of the first token, the same for all prompts. ``media`` has each prompt's media, or
        is empty.
        """
        device, padded = self.module.device, int(lengths_B.max())
        input_ids_BP = torch.zeros(len(prompts), padded, dtype=torch.int64)
        for row, prompt in enumerate(prompts):
            input_ids_BP[row, : len(prompt)] = torch.tensor(prompt)
        last, which_B = torch.unique(lengths_B - 1, return_inverse=True)
        cache, placed = DynamicCache(), None
        inputs: dict[str, Any] = {
            "position_ids": torch.arange(first, first + padded, device=device)[None]
        }
        if any(media):
            tiled_BP = np.tile(np.arange(first, first + padded), (len(prompts), 1))
            placed = place_media_by_row(self.media_rules, prompts, media, tiled_BP)
            inputs |= media_arguments(
                self.module,
                placed,
                lambda: np.tile(np.tri(padded, dtype=np.bool_), (len(prompts), 1, 1)),
                self.dtype,
            )
        with write_media(self.module, self.media_rules, placed):
            output = self.module(
                input_ids=input_ids_BP.to(device),
                use_cache=True,
                logits_to_keep=last.to(device),
                **{self._cache_input: cache},
                **inputs,
            )
        rows_B = torch.arange(len(prompts), device=device)
        layers = cast("list[DynamicLayer]", cache.layers)  # ``check_declared`` refused others
        states = [(cast("Tensor", layer.keys), cast("Tensor", layer.values)) for layer in layers]
        return output.logits[rows_B, which_B.to(device)], states

    def decode(self, cache: ClockedCache, positions_R: Tensor) -> Tensor:
        """Return logits [R, V] after the newest token of every row of the cache."""
        output = self.module(
            input_ids=cache.newest_tokens(),
            attention_mask=cache.mask(),
            position_ids=positions_R[:, None],
            use_cache=True,
            **{self._cache_input: cache},
        )
        return output.logits[:, -1]


def check_declared(model: PreTrainedModel, max_model_len: int) -> None:
    """Check that a model's config allows decoding over a cache of all earlier tokens.

    Raises:
        UndecodableModel: Its forward lacks an input, or a layer is of an unsupported kind.
    """
    _check_inputs(model)
    _check_attention(model, max_model_len)


def _check_inputs(model: PreTrainedModel) -> None:
    known = inspect.signature(model.forward).parameters
    missing = [name for name in (*_NEEDED_INPUTS, _cache_input(model)) if name not in known]
    if missing:
        raise UndecodableModel(
            type(model).__name__,
            f"its forward takes no {', '.join(missing)}",
            advise_another_engine().capitalize(),
        )


def _cache_input(model: PreTrainedModel) -> str:
    """Return the name of the cache argument of a model's forward."""
    known = inspect.signature(model.forward).parameters
    return next((name for name in _CACHE_INPUTS if name in known), _CACHE_INPUTS[0])


def _check_attention(model: PreTrainedModel, max_model_len: int) -> None:
    """Raise unless every layer attends to all earlier tokens, up to ``max_model_len``."""
    types, options = get_layer_types_and_kwargs(model.config.get_text_config(decoder=True))
    if refusal := find_undecodable_layer(types, options, max_model_len):
        raise UndecodableModel(type(model).__name__, *refusal)


def find_undecodable_layer(
    types: Sequence[str],
    options: CacheOptions | Sequence[CacheOptions],
    max_model_len: int,
) -> tuple[str, str] | None:
    """Return problem and fix of the first layer that cannot be decoded, or None if all can.

    In some models, the last layers read the cache of earlier layers. Before 5.24, transformers
    leaves such layers out of ``types``. Since 5.24 it calls them ``dummy``.

    Args:
        types: The type of each layer, from ``get_layer_types_and_kwargs``.
        options: Cache options of each layer, or (before transformers 5.19) one dict for all layers.
        max_model_len: Maximum tokens of a prompt and its response.
    """
    if isinstance(options, Mapping):
        options = [options] * len(types)
    layers = list(zip(types, options, strict=True))
    while layers and layers[-1][0] == _NO_CACHE:
        layers.pop()
    for layer, (kind, option) in enumerate(layers):
        window = option.get("sliding_window") if kind.endswith(_OF_WINDOWS) else None
        if kind == "full_attention" or (window is not None and window >= max_model_len):
            continue
        problem, fix = f"layer {layer} is {kind}", advise_another_engine().capitalize()
        if kind == _NO_CACHE:
            problem = f"layer {layer} keeps no keys and values, but later layers do"
        if window is not None:
            problem += f" over {window} tokens, fewer than max_model_len={max_model_len}"
            shorter = f"Set generator.max_model_len to {window} or less"
            fix = f"{shorter}, or {advise_another_engine()}"
        return problem, fix
    return None
