"""Loads a causal LM from a Hugging Face directory, and refuses files of another model.

transformers initialises missing weights at random, ignores unexpected weights, and does not tie
weights that the files store separately. It only logs a line about that. A run on such a model would
train, but its results would be meaningless.

The module also chooses transformers' class for a config, and fixes rotary frequencies before the
first forward pass. With ``rope_type`` dynamic or longrope, transformers chooses frequencies by the
longest row of each batch. So a sample's log-probabilities would depend on the other samples of the
batch, and on their decoded lengths. Here the frequencies are fixed to the values for a row of
``max_model_len`` tokens. vLLM does the same with longrope.
"""

# pyright: reportPrivateUsage=false, reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false
# transformers leaves its configs and its loading functions untyped.
# transformers leaves its configs and its loading functions untyped. Private names are explained
# where they are used.

import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import structlog
import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.modeling_utils import LoadStateDictConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
from transformers.utils import GENERATION_CONFIG_NAME

from offbeat.messages.failures import FixableError
from offbeat.messages.text import list_names


def find_auto_class(config: PreTrainedConfig) -> Any:  # noqa: ANN401 -- no common base has the methods
    """Return the auto class of a config: the image-text class if it has a vision tower."""
    is_image_text = "vision_config" in config.sub_configs
    if is_image_text and type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        return AutoModelForImageTextToText
    return AutoModelForCausalLM


_FROZEN: Final = "frozen"  # a rope_type that transformers does not update


@torch.no_grad()
def freeze_rope(model: nn.Module, max_model_len: int) -> None:
    """Fix the frequencies of all rotary embeddings that would change with a batch's length.

    The embeddings compute the frequencies themselves, in one call with the last position.
    """
    for module in model.modules():
        # transformers' name on all its embeddings
        kinds: object = getattr(module, "rope_type", None)
        if isinstance(kinds, str) and _depends_on_length(kinds):
            _reach(module, max_model_len)
            module.rope_type = _FROZEN  # pyright: ignore[reportArgumentType] -- a plain attribute
        elif isinstance(kinds, Mapping):
            changing = [name for name, kind in kinds.items() if _depends_on_length(kind)]
            for name in changing:
                _reach(module, max_model_len, layer_type=name)
            if changing:
                fixed: Any = {**kinds, **dict.fromkeys(changing, _FROZEN)}
                module.rope_type = fixed


def _depends_on_length(kind: str) -> bool:
    return "dynamic" in kind or kind == "longrope"


def _reach(module: nn.Module, max_model_len: int, **layer: str) -> None:
    buffer: Tensor = next(module.buffers())
    module(buffer.float(), torch.tensor([[max_model_len - 1]], device=buffer.device), **layer)


_NAMED: Final = 3  # tensors listed in a message
_AT_ONCE: Final = 1 << 24  # elements read or compared at a time
_FLOATS: Final = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_log = structlog.stdlib.get_logger()


LOADING: Final = threading.RLock()
"""Lock to hold while transformers makes or loads a model.

Meanwhile transformers replaces functions of its classes and of torch for all threads, such as
``tie_weights``. If two threads loaded a tied model at the same time, one would miss the tied
weight.
"""


class WeightsMismatch(FixableError):
    """The weight files of a directory do not fit the model that its config describes.

    Fix: put ``config.json`` and weight files of one model together.
    """

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    reshaped: tuple[str, ...]


class WeightsUntied(FixableError):
    """``config.json`` ties two tensors, but the weight files have different values for them.

    Fix: set ``tie_word_embeddings: false`` in ``config.json``.
    """


class WeightsNotFinite(FixableError):
    """A tensor of a model has NaN or infinite values.

    Fix: download the model again, or use an older checkpoint.
    """


def load_causal_lm(
    path: str | Path, dtype: torch.dtype, *, trust_remote_code: bool
) -> PreTrainedModel:
    """Return the causal LM of a directory on the CPU, in evaluation mode, without network access.

    Raises:
        WeightsMismatch: A weight is missing or unexpected. Both are allowed for tied weights and
            weights that the class declares optional.
        WeightsUntied: The files hold different values for weights that the config ties.
        WeightsNotFinite: A weight is NaN or infinite in ``dtype``.
    """
    config = AutoConfig.from_pretrained(
        path, local_files_only=True, trust_remote_code=trust_remote_code
    )
    with LOADING:
        loaded: Any = find_auto_class(config).from_pretrained(
            path,
            config=config,
            dtype=dtype,
            trust_remote_code=trust_remote_code,
            local_files_only=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # ``info`` reports them
        )
    model, info = loaded
    _refuse(path, info)
    support_float64(model)
    for tensor, source in _apart(model):
        raise _make_untied_error(path, tensor, source)
    for name, tensor in model.state_dict().items():
        check_finite(path, name, tensor)
    if problem := generation_config_problem(path):
        _log.warning("model.generation_config", path=str(path), problem=problem)
    return model.eval()


def support_float64(model: PreTrainedModel) -> None:
    """Compute experts of a float64 model by ``eager``. torch's grouped products lack float64."""
    if model.dtype == torch.float64:
        model.set_experts_implementation("eager")


def generation_config_problem(path: str | Path) -> str:
    """Return why transformers would refuse to write a directory's generation config.

    Return an empty string if it would not.
    """
    if not (Path(path) / GENERATION_CONFIG_NAME).is_file():
        return ""
    try:
        GenerationConfig.from_pretrained(path, local_files_only=True).validate(strict=True)
    except ValueError as invalid:
        return " ".join(str(invalid).split())
    return ""


def model_without_memory(path: str | Path, *, trust_remote_code: bool) -> PreTrainedModel:
    """Return the causal LM that a directory's config describes, without memory for its weights."""
    config = AutoConfig.from_pretrained(
        path, local_files_only=True, trust_remote_code=trust_remote_code
    )
    with LOADING, torch.device("meta"):
        return find_auto_class(config).from_config(config, trust_remote_code=trust_remote_code)


def check_files(path: str | Path) -> None:
    """Check the files like ``check_headers``, for a model of transformers' own code.

    Raises:
        WeightsMismatch: A weight is missing or unexpected.
    """
    check_headers(path, model_without_memory(path, trust_remote_code=False))


def check_headers(path: str | Path, model: PreTrainedModel) -> None:
    """Check files like ``load_causal_lm``, but only with the headers of the safetensors files.

    Values are compared only for tied weights, if the files hold both.

    Args:
        path: Model directory.
        model: The directory's model without memory. This call replaces the model's parameters.

    Raises:
        WeightsMismatch: A weight is missing or unexpected.
        WeightsUntied: The files hold different values for weights that the config ties.
    """
    stored, files = dict[str, Tensor](), dict[str, Path]()
    for file in sorted(Path(path).glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 -- no mapping
                shape = opened.get_slice(name).get_shape()
                stored[name] = torch.empty(shape, device="meta")
                files[name] = file
    # The steps of ``from_pretrained``, which accepts a device map only if accelerate is installed.
    mapping: Any = get_model_conversion_mapping(model)
    load = LoadStateDictConfig(
        pretrained_model_name_or_path=str(path),
        ignore_mismatched_sizes=True,
        device_map={"": "meta"},
        dtype=model.dtype,
        weight_mapping=mapping,
    )
    info, _ = model._load_pretrained_model(model, stored, None, load)  # noqa: SLF001 -- as above
    model.mark_tied_weights_as_initialized(info)
    model.tie_weights(missing_keys=info.missing_keys, recompute_mapping=False)
    model._adjust_missing_and_unexpected_keys(info)  # noqa: SLF001 -- as above
    _refuse(path, info.to_dict())
    for tensor, source in _apart(model):
        if not _hold_equal(files, tensor, source):
            raise _make_untied_error(path, tensor, source)


def check_values(path: str | Path, most_bytes: int) -> tuple[int, int]:
    """Check that the values of safetensors files are finite, reading parts of tensors.

    Args:
        path: Model directory.
        most_bytes: No further tensor is read after this many bytes.

    Returns:
        Bytes read, and bytes of all tensors.

    Raises:
        WeightsNotFinite: A value is NaN or infinite in the dtype of the files.
    """
    read = total = 0
    for file in sorted(Path(path).glob("*.safetensors")):
        total += file.stat().st_size
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 -- no mapping
                for part in _parts(opened, name) if read < most_bytes else ():
                    read += part.nbytes
                    if not _is_finite(part):
                        check_finite(path, name, opened.get_tensor(name))
    return read, total


def check_finite(path: str | Path, name: str, tensor: Tensor) -> None:
    """Check that all values of a tensor are finite, without a copy of the tensor.

    Raises:
        WeightsNotFinite: Some values are not finite.
    """
    if all(map(_is_finite, tensor.detach().reshape(-1).split(_AT_ONCE))):
        return
    count = int(tensor.isfinite().logical_not().sum())
    dtype = str(tensor.dtype).removeprefix("torch.")
    problem = f"{count} of the {tensor.numel()} values of {name} are not finite in {dtype}"
    fix = "Copy or download the model again, or use an earlier checkpoint of it"
    raise WeightsNotFinite(str(path), problem, fix)


def _is_finite(part: Tensor) -> bool:
    if part.dtype not in _FLOATS or not part.numel():
        return True
    return bool(torch.stack(part.aminmax()).isfinite().all())


def _apart(model: PreTrainedModel) -> Iterator[tuple[str, str]]:
    """Yield tensors that the config ties but the model stores separately, with the tied tensor."""
    declared: dict[str, str] = model.get_expanded_tied_weights_keys(all_submodels=True)
    for tensor, source in declared.items():
        if model.get_parameter_or_buffer(tensor) is not model.get_parameter_or_buffer(source):
            yield tensor, source


def _hold_equal(files: Mapping[str, Path], *names: str) -> bool:
    """Return whether two tensors in the files are equal.

    Also return True if one of them has a different name in the files.
    """
    held = [each if each in files else each.partition(".")[2] for each in names]
    if not all(each in files for each in held):
        return True  # the start of a run compares the loaded weights
    first, second = held
    with (
        safe_open(files[first], framework="pt") as one,
        safe_open(files[second], framework="pt") as other,
    ):
        return all(map(torch.equal, _parts(one, first), _parts(other, second)))


def _parts(opened: Any, name: str) -> Iterator[Tensor]:  # noqa: ANN401 -- safetensors has no type
    """Yield a tensor in parts of whole rows."""
    view = opened.get_slice(name)
    shape: list[int] = view.get_shape()
    if not shape:
        yield opened.get_tensor(name)
        return
    rows = max(1, _AT_ONCE // max(1, math.prod(shape[1:])))
    for first in range(0, shape[0], rows):
        yield view[first : first + rows]


def _refuse(path: str | Path, info: dict[str, Any]) -> None:
    missing, unexpected = sorted(info["missing_keys"]), sorted(info["unexpected_keys"])
    reshaped = sorted(each[0] for each in info["mismatched_keys"])
    parts = (
        (missing, "lack {} of the model ({})"),
        (unexpected, "contain {} that the model lacks ({})"),
        (reshaped, "contain {} with a different shape than in the model ({})"),
    )
    problems = [
        said.format(_count(names), list_names(names, _NAMED)) for names, said in parts if names
    ]
    if problems:
        raise WeightsMismatch(
            str(path),
            f"the weight files {' and '.join(problems)}",
            "Bring config.json and weight files of one model together: copy or download it again",
            tuple(missing),
            tuple(unexpected),
            tuple(reshaped),
        )


def _make_untied_error(path: str | Path, tensor: str, tied_to: str) -> WeightsUntied:
    problem = (
        f"config.json ties {tensor} to {tied_to}, but the weight files have different values "
        "for them"
    )
    fix = (
        f"Set tie_word_embeddings to false in config.json, or remove {tensor} from the weight files"
    )
    return WeightsUntied(str(path), problem, fix)


def _count(names: Sequence[str]) -> str:
    return f"{len(names)} tensor{'s' if len(names) > 1 else ''}"
