"""Decode attention over grouped keys and values, without copying the cache.

With a mask, transformers' ``sdpa`` copies the whole cache once per query head of a group before it
attends. One query token needs no copy: the query heads that share a key head are laid along the
query axis instead, and the mask is the same for all of them.

Legend: R rows, H query heads, K key heads, C columns of the cache, D head dimension.
"""

# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# transformers leaves its configs and its loading functions untyped. Private names are explained
# where they are used.

from typing import Any

from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

_NAME = "offbeat_grouped_sdpa"


def use_grouped_attention(model: PreTrainedModel) -> None:
    """Switch a model that attends by ``sdpa`` to ``grouped_sdpa``; leave any other as it is.

    Changes ``model.config``: the model belongs to the engine.
    """
    if model.config._attn_implementation != "sdpa":  # noqa: SLF001 -- the only place it is kept
        return
    AttentionInterface.register(_NAME, grouped_sdpa)
    AttentionMaskInterface.register(_NAME, sdpa_mask)
    model.set_attn_implementation(_NAME)


def grouped_sdpa(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,  # noqa: ANN401 -- whatever the model hands on
) -> tuple[Tensor, None]:
    """Compute ``sdpa_attention_forward`` without copying keys and values for one query token.

    Args:
        module: The attention layer.
        query: [R, H, T, D].
        key: [R, K, C, D] with K dividing H.
        value: Shaped like ``key``.
        attention_mask: [R, 1, T, C] additive, or None.
        scaling: Factor of the scores; None for ``D ** -0.5``.
        kwargs: Passed on whenever the ordinary path is taken.

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
