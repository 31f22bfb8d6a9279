"""Loads the causal LM of a Hugging Face directory, and computes facts about a model.

With activation checkpointing, layers keep only their input, and are computed again in backward.
transformers supports this only for a model in training mode. Here the model is in evaluation mode,
without randomness, so transformers' option would silently have no effect. Only the layer's
``forward`` is repeated. The hooks of FSDP2 before and after a layer run once per pass.

A recipe can exclude parameters from training by name (``trainer.freeze``). A frozen parameter has
no gradient. So the optimizer has neither moments nor weight decay for it, and FSDP2 keeps its
shards in the dtype of the model.
"""

# pyright: reportPrivateUsage=false, reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false
# transformers leaves its configs and its loading functions untyped. Private names are explained
# where they are used.
# torch declares some functions without types.

import functools
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final, cast

import torch
import xxhash
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedConfig, PreTrainedModel

from offbeat.models.loading import LOADING, find_auto_class, load_causal_lm, support_float64
from offbeat.trainers.checkpoints.manifest import Identity
from offbeat.trainers.errors import UntrainableModel
from offbeat.trainers.parts import torch_dtype
from offbeat.weight_sync.chunks import iterate_weights

_CALL_ON_A_CPU: Final = 1_400_000
_CALL_ON_A_GPU: Final = 6_000_000_000
"""Forward-pass multiplications that take as long as the fixed cost of one attention call.

That is 0.1 ms, gradient included: measured on a CPU at 85 GFLOP/s, assumed on a GPU at 360 TFLOP/s.
The value only decides from which length on segments are computed one by one.
"""


def load_model(
    path: str | Path, dtype: str, device: str, *, trust_remote_code: bool
) -> PreTrainedModel:
    """Load the causal LM of a directory in evaluation mode. Dropout would make logprobs random.

    Raises:
        WeightsMismatch: The files do not have the weights of the model that the config describes.
    """
    model = load_causal_lm(path, torch_dtype(dtype), trust_remote_code=trust_remote_code)
    return model.to(device)  # pyright: ignore[reportArgumentType] -- transformers wraps `to`


def make_unfilled_model(
    config: PreTrainedConfig, dtype: torch.dtype, *, trust_remote_code: bool
) -> PreTrainedModel:
    """Return the causal LM of a config on the meta device, with the dtypes of a loaded model.

    When a 16-bit model is loaded, some tensors stay in float32, such as the biases of routers. In a
    model made only from its config, they have 16 bits, and small updates of such a bias would be
    lost.
    """
    with LOADING, torch.device("meta"):
        model = find_auto_class(config).from_config(
            config, dtype=dtype, trust_remote_code=trust_remote_code
        )
    for pattern, kept in model._get_dtype_plan(dtype).items():  # noqa: SLF001 -- read by loading
        for name, tensor in model.state_dict(keep_vars=True).items():
            if fnmatchcase(name, f"*{pattern}*"):
                tensor.data = tensor.data.to(kept)
    support_float64(model)
    return model


def identity(model: PreTrainedModel) -> Identity:
    """Return the identity of this model's state.

    It depends on the order, names, shapes and dtypes of the weights, and on which of them are
    frozen.
    """
    digest, count, frozen_count = xxhash.xxh3_128(), 0, 0
    frozen = {name for name, each in model.named_parameters() if not each.requires_grad}
    for name, tensor in iterate_weights(model):
        mark = " frozen" if name in frozen else ""
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}{mark}\n".encode())
        count += tensor.numel()
        frozen_count += tensor.numel() if name in frozen else 0
    dtype = str(model.dtype).removeprefix("torch.")
    what = f"{type(model).__name__} of {count:,} {dtype} weights"
    what += f", {frozen_count:,} of them frozen" if frozen else ""
    return Identity("torch", what, digest.hexdigest())


def linear_to_pair_ratio(model: PreTrainedModel) -> float:
    """Return the multiplications per token outside attention, divided by those per pair inside.

    Every weight except the embeddings is used once per token. A pair needs two products (score and
    value) in all heads of every layer. Together, the heads are about as wide as the hidden state.
    """
    config = model.config.get_text_config(decoder=True)
    embedding = model.get_input_embeddings().weight
    linear = sum(each.numel() for each in model.parameters() if each.shape != embedding.shape)
    return linear / (2 * config.num_hidden_layers * config.hidden_size)


def call_to_pair_ratio(model: PreTrainedModel) -> float:
    """Return the duration of a call of attention over one segment, relative to one token pair."""
    hidden: int = model.config.get_text_config(decoder=True).hidden_size
    call = _CALL_ON_A_CPU if model.device.type == "cpu" else _CALL_ON_A_GPU
    return call / (2 * hidden)


def vocabulary(model: PreTrainedModel) -> int:
    """Return the number of token ids that have an embedding."""
    return len(cast("Tensor", model.get_input_embeddings().weight))


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """Return the repeated layers in order. Empty if the model does not name their class.

    Layers are identified by class. ``fully_shard`` changes the class, so call this before sharding.
    """
    kinds = set(model._no_split_modules or ())  # noqa: SLF001 -- the only place with the names
    return [each for each in model.modules() if type(each).__name__ in kinds]


def freeze(model: PreTrainedModel, patterns: Sequence[str]) -> None:
    """Exclude all parameters that match a pattern from training. The model may be without memory.

    Raises:
        UntrainableModel: ``frozen_parameters`` refuses the patterns.
    """
    for each in frozen_parameters(model, patterns):
        each.requires_grad = False


def frozen_parameters(model: PreTrainedModel, patterns: Sequence[str]) -> list[nn.Parameter]:
    """Return the parameters whose name in the model matches a pattern, tied parameters once.

    Raises:
        UntrainableModel: A pattern matches no name or only some names of a tied parameter, or the
            patterns match all parameters.
    """
    names_by_parameter = dict[nn.Parameter, list[str]]()
    for name, each in model.named_parameters(remove_duplicate=False):
        names_by_parameter.setdefault(each, []).append(name)
    kind, every = (
        type(model).__name__,
        [name for names in names_by_parameter.values() for name in names],
    )
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in every):
            nearest = _nearest(pattern, every)
            problem = f"has no parameter whose name matches {pattern!r} of trainer.freeze"
            fix = (
                f"The nearest name is {nearest}"
                if nearest
                else f"Names of this model begin with {', '.join(_beginnings(every))}"
            )
            raise UntrainableModel(kind, problem, fix)
    frozen = list[nn.Parameter]()
    for parameter, names in names_by_parameter.items():
        matched = [name for name in names if any(fnmatchcase(name, each) for each in patterns)]
        if matched and len(matched) < len(names):
            others = " and ".join(name for name in names if name not in matched)
            problem = (
                f"ties {' and '.join(matched)}, which trainer.freeze matches, to {others}, which "
                "it does not match"
            )
            raise UntrainableModel(
                kind, problem, "Match all of these names or none: they are one tensor"
            )
        frozen += [parameter] if matched else []
    if len(frozen) == len(names_by_parameter):
        problem = f"has no parameter to train: trainer.freeze matches all {len(frozen)}"
        raise UntrainableModel(kind, problem, "Leave a pattern out")
    return frozen


def _nearest(pattern: str, names: Sequence[str]) -> str | None:
    """Return the closest parameter name for a pattern, or None."""
    parts = pattern.removesuffix(".*").split(".")
    by_beginning = dict[str, str]()
    for name in names:
        by_beginning.setdefault(".".join(name.split(".")[: len(parts)]), name)
    nearest = get_close_matches(".".join(parts), by_beginning, n=1)
    return by_beginning[nearest[0]] if nearest else None


def _beginnings(names: Sequence[str]) -> list[str]:
    return sorted({name.partition(".")[0] for name in names})


def recompute_layers(model: PreTrainedModel) -> None:
    """Make every decoder layer be recomputed in backward. Call this once, before sharding.

    Names, weights and values are unchanged.

    Raises:
        UntrainableModel: The model does not declare which modules are its layers.
    """
    layers = decoder_layers(model)
    if not layers:
        fix = "Set trainer.activation_checkpointing to false"
        raise UntrainableModel(type(model).__name__, "names no class of decoder layers", fix)
    for layer in layers:
        _repeat(layer)


def _repeat(layer: nn.Module) -> None:
    once: Callable[..., Any] = layer.forward

    @functools.wraps(once)
    def forward(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 -- any layer's own
        if not torch.is_grad_enabled():
            return once(*args, **kwargs)
        return checkpoint(once, *args, use_reentrant=False, **kwargs)

    layer.forward = forward
