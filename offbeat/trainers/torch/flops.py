"""FLOPs of a transformers model's passes, from its modules and its config."""

# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false
# torch and transformers declare some functions without types.

from collections.abc import Iterable, Iterator

from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from offbeat.trainers.flops import PER_DIMENSION, PER_FROZEN_WEIGHT, PER_WEIGHT, ModelFlops
from offbeat.trainers.torch.routing import find_routers


def model_flops(model: PreTrainedModel) -> ModelFlops | None:
    """Return the FLOPs of a causal LM, or None if they are unknown.

    They are unknown if a weight is neither a matrix nor an expert, or if a layer has no heads.
    Experts are counted if their router is known (``routing``). Each token then counts for as many
    experts as it is sent to.
    """
    head = model.get_output_embeddings()
    config = model.config.get_text_config(decoder=True)
    matrices = [each for each in model.modules() if isinstance(each, nn.Linear | Conv1D)]
    experts = list(_expert_weights(model, config))
    counted = (*_weights(matrices), *(each for each, _ in experts))
    seen = {id(each) for each in (*counted, model.get_input_embeddings().weight)}
    tables = {id(each.weight) for each in model.modules() if isinstance(each, nn.Embedding)}
    others = (each for each in model.parameters() if id(each) not in seen | tables)
    if not isinstance(head, nn.Linear | Conv1D) or any(each.ndim > 1 for each in others):
        return None
    layers = list(_config_of_each_layer(config))
    if not all(hasattr(each, "num_attention_heads") for each in layers):
        return None
    body = ((each, 1.0) for each in _weights(each for each in matrices if each is not head))
    return ModelFlops(
        token=sum(_per_weight(each) * each.numel() * part for each, part in (*body, *experts)),
        place=_per_weight(head.weight) * head.weight.numel(),
        pair=PER_DIMENSION * sum(map(_dimensions_of_heads, layers)),
    )


def _expert_weights(
    model: PreTrainedModel, config: PreTrainedConfig
) -> Iterator[tuple[Tensor, float]]:
    """Yield the matrices of routers and experts, and which part of each a token is multiplied with.

    The experts of a layer are one tensor. Its first axis is the expert.
    """
    routers = {id(each) for each in find_routers(model)}
    for block in model.modules():
        for router in (each for each in block.children() if id(each) in routers):
            matrix = router.get_parameter("weight")
            yield matrix, 1.0
            for each in block.parameters():
                if each.ndim == 3 and len(each) == len(matrix):  # noqa: PLR2004 -- axes
                    yield each, config.num_experts_per_tok / len(matrix)


def _config_of_each_layer(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    """Yield the config of each layer: in some model families, head sizes differ by layer."""
    return (config.per_layer_config[layer] for layer in range(config.num_hidden_layers))


def _dimensions_of_heads(config: PreTrainedConfig) -> int:
    """Return the dimensions of all heads of a layer: keys and values."""
    heads: int = config.num_attention_heads
    if getattr(config, "kv_lora_rank", None):  # keys and values of different sizes
        return heads * (config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim)
    size: int = getattr(config, "head_dim", None) or config.hidden_size // heads
    return 2 * heads * size


def _per_weight(weight: Tensor) -> int:
    return PER_WEIGHT if weight.requires_grad else PER_FROZEN_WEIGHT


def _weights(modules: "Iterable[nn.Linear | Conv1D]") -> Iterator[Tensor]:
    for module in modules:
        weight = module.weight
        assert isinstance(weight, Tensor)  # noqa: S101 -- of a matrix
        yield weight
