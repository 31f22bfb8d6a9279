"""Loading of the causal LM of a Hugging Face directory, and facts of a model."""

# pyright: reportPrivateUsage=false, reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false
# transformers leaves its configs and its loading functions untyped. Private names are explained
# where they are used.

from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final, cast

import torch
import xxhash
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from offbeat.models.auto_class import auto_class_of
from offbeat.models.loading import load_causal_lm, support_float64
from offbeat.trainers.checkpoints.manifest import Identity
from offbeat.trainers.weights import torch_dtype
from offbeat.weight_sync.chunks import named_weights

_CALL_ON_A_CPU: Final = 1_400_000
_CALL_ON_A_GPU: Final = 6_000_000_000
"""Multiplications of a forward pass that take as long as a call of attention, over its gradient, too.

On a CPU 0.1 ms at 85 GFLOP/s, measured. On a GPU 0.1 ms at 360 TFLOP/s, an assumption: it decides
from which length on segments are computed one by one, and nothing else.
"""


def load_model(
    path: str | Path, dtype: str, device: str, *, trust_remote_code: bool
) -> PreTrainedModel:
    """Load the causal LM of a directory in evaluation mode: dropout would make logprobs random.

    Raises:
        WeightsMismatch: Its files are not those of the model that its config describes.
    """
    model = load_causal_lm(path, torch_dtype(dtype), trust_remote_code=trust_remote_code)
    return model.to(device)  # pyright: ignore[reportArgumentType] -- transformers wraps `to`


def unfilled_model(
    config: PreTrainedConfig, dtype: torch.dtype, *, trust_remote_code: bool
) -> PreTrainedModel:
    """Return the causal LM of a config on the meta device, each tensor in the dtype of a loaded one.

    Some tensors stay in float32 when a 16-bit model is loaded, such as the biases of routers; a model
    that is made of its config alone has them in 16 bits, where the steps of such a bias are lost.
    """
    with torch.device("meta"):
        model = auto_class_of(config).from_config(
            config, dtype=dtype, trust_remote_code=trust_remote_code
        )
    for pattern, kept in model._get_dtype_plan(dtype).items():  # noqa: SLF001 -- what loading reads
        for name, tensor in model.state_dict(keep_vars=True).items():
            if fnmatchcase(name, f"*{pattern}*"):
                tensor.data = tensor.data.to(kept)
    support_float64(model)
    return model


def identity(model: PreTrainedModel) -> Identity:
    """Return the identity of this model's state.

    It follows from names, shapes and dtypes of the weights, in order, and from which are frozen.
    """
    digest, count, frozen_count = xxhash.xxh3_128(), 0, 0
    frozen = {name for name, each in model.named_parameters() if not each.requires_grad}
    for name, tensor in named_weights(model):
        mark = " frozen" if name in frozen else ""
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}{mark}\n".encode())
        count += tensor.numel()
        frozen_count += tensor.numel() if name in frozen else 0
    dtype = str(model.dtype).removeprefix("torch.")
    what = f"{type(model).__name__} of {count:,} {dtype} weights"
    what += f", {frozen_count:,} of them frozen" if frozen else ""
    return Identity("torch", what, digest.hexdigest())


def linear_to_pair_ratio(model: PreTrainedModel) -> float:
    """Return the multiplications per token outside attention over those per pair of tokens inside.

    Every weight but the embeddings is used once per token; a pair takes two products (score and
    value) of all heads in every layer, which together are about as wide as the hidden state.
    """
    config = model.config.get_text_config(decoder=True)
    embedding = model.get_input_embeddings().weight
    linear = sum(each.numel() for each in model.parameters() if each.shape != embedding.shape)
    return linear / (2 * config.num_hidden_layers * config.hidden_size)


def call_to_pair_ratio(model: PreTrainedModel) -> float:
    """Return the time of a call of attention over one segment, over that of a pair of tokens."""
    hidden: int = model.config.get_text_config(decoder=True).hidden_size
    call = _CALL_ON_A_CPU if model.device.type == "cpu" else _CALL_ON_A_GPU
    return call / (2 * hidden)


def vocabulary(model: PreTrainedModel) -> int:
    """Return the number of token ids that have an embedding."""
    return len(cast("Tensor", model.get_input_embeddings().weight))


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """Return the repeated layers in their order; empty if the model does not name their class.

    They are identified by their class, which ``fully_shard`` changes: call it before sharding.
    """
    kinds = set(model._no_split_modules or ())  # noqa: SLF001 -- the only place it is said
    return [each for each in model.modules() if type(each).__name__ in kinds]
