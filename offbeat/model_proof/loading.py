"""Loads a causal LM from a Hugging Face directory, and refuses files that are not of that model.

transformers initialises missing weights at random and ignores unexpected ones, with a line in the
log. A run on such a model would train, but its results would be meaningless.
"""

# pyright: reportPrivateUsage=false, reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false
# transformers leaves its configs and its loading functions untyped. Private names are explained
# where they are used.

from collections.abc import Collection
from pathlib import Path
from typing import Any, Final

import structlog
import torch
from safetensors import safe_open
from transformers import AutoConfig, GenerationConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.modeling_utils import LoadStateDictConfig
from transformers.utils import GENERATION_CONFIG_NAME

from offbeat.messages.failures import OffbeatError
from offbeat.multimodal.auto_class import auto_class_of

_NAMED: Final = 3  # tensors listed in a message
_log = structlog.stdlib.get_logger()


class WeightsMismatch(OffbeatError):
    """The weight files of a directory are not those of the model that its config describes."""

    path: str
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    reshaped: tuple[str, ...]

    @property
    def problem(self) -> str:
        """Return the problem, without the path and the fix."""
        parts = (
            (self.missing, "lack {} of the model ({})"),
            (self.unexpected, "hold {} that the model has no place for ({})"),
            (self.reshaped, "hold {} in another shape than the model ({})"),
        )
        problems = [said.format(_count(names), _some(names)) for names, said in parts if names]
        return f"the weight files {' and '.join(problems)}"

    @property
    def fix(self) -> str:
        """Return the fix."""
        return "Bring config.json and weight files of one model together: copy or download it again"

    def __str__(self) -> str:
        return f"{self.path}: {self.problem}. {self.fix}"


def load_causal_lm(
    path: str | Path, dtype: torch.dtype, *, trust_remote_code: bool
) -> PreTrainedModel:
    """Return the causal LM of a directory on the CPU, in evaluation mode. Reads no network.

    Raises:
        WeightsMismatch: A weight is missing or unexpected. Tied weights, and those that the class
            itself declares optional, may be either.
    """
    config = AutoConfig.from_pretrained(
        path, local_files_only=True, trust_remote_code=trust_remote_code
    )
    loaded: Any = auto_class_of(config).from_pretrained(
        path,
        config=config,
        dtype=dtype,
        trust_remote_code=trust_remote_code,
        local_files_only=True,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # they are reported in ``info`` then
    )
    model, info = loaded
    _refuse(path, info)
    if problem := generation_config_problem(path):
        _log.warning("model.generation_config", path=str(path), problem=problem)
    return model.eval()


def generation_config_problem(path: str | Path) -> str:
    """Return what transformers would refuse in a directory's generation config.

    Empty if nothing.
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
    with torch.device("meta"):
        return auto_class_of(config).from_config(config, trust_remote_code=trust_remote_code)


def check_files(path: str | Path) -> None:
    """Check the files like ``check_headers``, for a model of transformers' own code.

    Raises:
        WeightsMismatch: A weight is missing or unexpected.
    """
    check_headers(path, model_without_memory(path, trust_remote_code=False))


def check_headers(path: str | Path, model: PreTrainedModel) -> None:
    """Check files like ``load_causal_lm``, but with the headers of the safetensors files only.

    Args:
        path: Model directory.
        model: Its model without memory. Its parameters are replaced.

    Raises:
        WeightsMismatch: A weight is missing or unexpected.
    """
    stored = dict[str, torch.Tensor]()
    for file in sorted(Path(path).glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 -- no mapping
                shape = opened.get_slice(name).get_shape()
                stored[name] = torch.empty(shape, device="meta")
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


def _refuse(path: str | Path, info: dict[str, Any]) -> None:
    missing, unexpected = sorted(info["missing_keys"]), sorted(info["unexpected_keys"])
    reshaped = sorted(each[0] for each in info["mismatched_keys"])
    if missing or unexpected or reshaped:
        raise WeightsMismatch(str(path), tuple(missing), tuple(unexpected), tuple(reshaped))


def _count(names: Collection[str]) -> str:
    return f"{len(names)} tensor{'s' if len(names) > 1 else ''}"


def _some(names: Collection[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"{', '.join(list(names)[:_NAMED])}{more}"
