"""Low-rank adapters of the torch trainer, made by PEFT: injection, names, and a merged copy.

peft is loaded only here, and only for a recipe with ``trainer.lora``. An adapted module ``X`` keeps
its matrix under ``X.base_layer.weight``, which never changes. Its adapter is under
``X.lora_A.default.weight`` and ``X.lora_B.default.weight``.
"""

# pyright: reportMissingImports=false, reportUnknownArgumentType=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# peft is an optional package with untyped functions.

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Final, TypeGuard

import torch
import xxhash
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import (
    _MODEL_TO_CONVERSION_PATTERN,  # pyright: ignore[reportPrivateUsage] -- PEFT reads it, too
)
from transformers.pytorch_utils import Conv1D

from offbeat.doors import import_object
from offbeat.plugins.lora.release import AdapterPart, merge_matrix
from offbeat.plugins.lora.section import LoraConfig
from offbeat.trainers.checkpoints.manifest import Identity
from offbeat.trainers.errors import PartPackageMissing, UntrainableModel
from offbeat.trainers.torch.sharding import Weights
from offbeat.weight_sync.manifest import Adapter

ADAPTER_FOLDER: Final = "adapter"
_WEIGHTS: Final = "adapter_model.safetensors"
_NAME: Final = "default"
_NAME_OTHERS: Final = (
    "Name linear modules of the model in trainer.lora.target_modules, or leave it out to adapt every "
    "linear module but the output head"
)
_BASE_LAYER: Final = "base_layer"
_BASE: Final = f".{_BASE_LAYER}."
_MODULES: Final = {side: f".lora_{side}.{_NAME}" for side in "AB"}
_SIDES: Final = {side: f"{module}.weight" for side, module in _MODULES.items()}
_FUSED_NAMES: Final = {
    "mixtral": frozenset({"gate", "w1", "w2", "w3"}),
    "qwen2_moe": frozenset({"gate", "gate_proj", "up_proj", "down_proj"}),
}
"""Names that PEFT 0.21 takes for experts in one tensor, by the pattern of the class's files. Dense
layers and shared experts may have linear modules with these names."""
_NAMES_BY_TYPE: Final = {
    "falcon_h1": frozenset({"out_proj"}),
    "falcon_mamba": frozenset({"out_proj", "dt_proj"}),
    "jamba": frozenset({"dt_proj"}),
    "mamba": frozenset({"out_proj", "dt_proj"}),
    "mamba2": frozenset({"out_proj"}),
    "nemotron_h": frozenset({"out_proj"}),
}
"""Names of modules whose matrix the class itself or its kernels read. An adapter on ``dt_proj``
would do nothing. PEFT 0.21 refuses ``out_proj``."""


class PeftMissing(PartPackageMissing):
    """A recipe with ``trainer.lora`` on a machine without peft.

    Fix: run ``pip install 'offbeat[lora]'``.
    """

    problem: str

    def __str__(self) -> str:
        return (
            f"trainer.lora needs peft, which this Python cannot import ({self.problem}). "
            "Install it with pip install 'offbeat[lora]', or leave trainer.lora out"
        )


def inject(model: PreTrainedModel, lora: LoraConfig) -> None:
    """Add adapters to a model, which may be without memory, and freeze everything else.

    The matrices B are 0, so the model computes the same as before. The matrices A are drawn from
    torch's generator. Adapters have the dtype of the weights next to them.

    Raises:
        PeftMissing: peft cannot be imported.
        UntrainableModel: A target is missing, is not a plain linear module, or shares its matrix.
    """
    library, name = _peft(), type(model).__name__
    check_targets(model, lora)
    # peft's "all-linear" includes the fused experts of some families, which are not linear modules.
    targeted = lora.target_modules or [*find_target_modules(model, lora)]
    try:
        library.inject_adapter_in_model(
            _config(library, targeted or "all-linear", lora, ""),
            model,
            low_cpu_mem_usage=model.device.type == "meta",
        )
    except ValueError as error:  # no module is linear
        raise UntrainableModel(name, f"takes no adapters ({error})", _NAME_OTHERS) from error
    model.eval()
    for module in find_adapted_modules(model).values():
        for part in (module.lora_A, module.lora_B):
            part.to(dtype=module.base_layer.weight.dtype)


def find_adapted_modules(model: PreTrainedModel) -> dict[str, Any]:
    """Return the modules that have an adapter, by name in the base model."""
    kind = _peft(".tuners.lora").LoraLayer
    return {name: each for name, each in model.named_modules() if isinstance(each, kind)}


def without_adapters(model: PreTrainedModel) -> AbstractContextManager[None]:
    """Return a context in which the model computes like its base.

    It scales adapters by 0 instead of switching them off. peft's switch also freezes them. FSDP2
    would then gather copies without a gradient and keep using these copies.
    """
    return _peft(".helpers").rescale_adapter_scale(model, 0.0)


def identity(model: PreTrainedModel, lora: LoraConfig, base: str) -> Identity:
    """Return the identity of these adapters' state, which only fits this base and this rank."""
    digest = xxhash.xxh3_128(f"{base} {lora.rank} {lora.alpha}\n".encode())
    for name, each in model.named_parameters():
        digest.update(f"{name} {tuple(each.shape)} {each.dtype}\n".encode())
    modules = ", ".join(targets(model))
    dtype = str(model.dtype).removeprefix("torch.")
    of = f"adapters of rank {lora.rank}, alpha {lora.alpha:g}, on {modules} of a {dtype}"
    return Identity("torch", f"{of} {type(model).__name__}, base {base[:8]}", digest.hexdigest())


def targets(model: PreTrainedModel) -> list[str]:
    """Return the last parts of the names of all adapted modules."""
    return sorted({name.rpartition(".")[2] for name in find_adapted_modules(model)})


class AdapterWeights:
    """The adapters of a model under the names of PEFT's files, in a fixed order."""

    def __init__(self, every: Weights) -> None:
        """``every``: all weights of the model, sharded if there are several ranks."""
        parts = {name: part for name in every.local_tensors() if (part := part_of_parameter(name))}
        self._every, self._parts = every, parts
        self._dtypes = {name: getattr(torch, dtype) for name, _, dtype in every.metas()}

    def iterate(self) -> Iterator[tuple[str, Tensor]]:
        """Yield whole matrices by name. All ranks must iterate together."""
        for name, each in self.local_tensors().items():
            whole = each.full_tensor() if isinstance(each, DTensor) else each
            yield self._parts[name].file_name, whole.to(self._dtypes[name])

    def local_tensors(self) -> dict[str, Tensor]:
        """Return this rank's part of each matrix, by the name of its parameter."""
        return {
            name: each for name, each in self._every.local_tensors().items() if name in self._parts
        }

    def metas(self) -> Iterator[tuple[str, tuple[int, ...], str]]:
        """Yield name, whole shape and dtype of each matrix."""
        for name, shape, dtype in self._every.metas():
            if name in self._parts:
                yield self._parts[name].file_name, shape, dtype


class MergedWeights:
    """The weights of the base with the adapters added, as copies under their Hugging Face names."""

    def __init__(self, every: Weights, adapter: Adapter) -> None:
        """``every``: all weights of the model, sharded if there are several ranks."""
        self._every, self._scaling = every, adapter.scaling

    def local_tensors(self) -> dict[str, Tensor]:
        """Return nothing: no rank holds a part, because sums are computed when yielded."""
        return {}

    def metas(self) -> Iterator[tuple[str, tuple[int, ...], str]]:
        """Yield name, shape and dtype of each weight."""
        for name, shape, dtype in self._every.metas():
            if not part_of_parameter(name):
                yield name.replace(_BASE, "."), shape, dtype

    def iterate(self) -> Iterator[tuple[str, Tensor]]:
        """Yield whole weights by name, in the order of ``metas``.

        All ranks must iterate together.
        """
        held = list[tuple[str, Tensor]]()  # a matrix, awaiting its adapter, and later ones
        sides = dict[str, Tensor]()
        for name, each in self._every.iterate():
            if part := part_of_parameter(name):
                sides[part.side] = each
                if len(sides) == len(_SIDES):
                    first, base = held[0]
                    yield first, merge_matrix(base, sides["A"], sides["B"], self._scaling)
                    yield from held[1:]
                    held, sides = [], {}
            elif held or name.endswith(f"{_BASE}weight"):
                held.append((name.replace(_BASE, "."), each))
            else:
                yield name, each


def save_adapter(
    adapters: Iterable[tuple[str, Tensor]],
    model: PreTrainedModel,
    lora: LoraConfig,
    base: Path,
    directory: Path,
) -> None:
    """Write an adapter directory that PEFT and vLLM load: safetensors and ``adapter_config.json``."""
    directory.mkdir()
    tensors = {name: each.detach().cpu().contiguous() for name, each in adapters}
    save_file(tensors, directory / _WEIGHTS, metadata={"format": "pt"})
    config = _config(_peft(), targets(model), lora, str(base))
    config.inference_mode = True
    config.save_pretrained(str(directory))


def check_targets(model: PreTrainedModel, lora: LoraConfig) -> None:
    """Check the targets before peft, which ignores some of these problems and only warns of others.

    The model may be without memory. peft is not needed.

    Raises:
        UntrainableModel: A target is missing, is not a plain linear module, or shares its matrix.
    """
    name, embedding = type(model).__name__, model.get_input_embeddings().weight
    modules = dict(model.named_modules())
    for target in lora.target_modules:
        found = [path for path in modules if _is_targeted(path, target)]
        if not found:
            raise UntrainableModel(name, f"has no module {target}", _linear_names_said(model))
        for path in sorted(found):
            module = modules[path]
            if not _is_plain(module):
                problem = f"has {path}, which is not a linear module but {type(module).__name__}"
                raise UntrainableModel(name, problem, _NAME_OTHERS)
            if module.weight is embedding:
                problem = f"has {path}, whose matrix is tied to the embeddings"
                raise UntrainableModel(name, problem, _NAME_OTHERS)
            if _last_part(path) in _find_unsupported_names(model):
                problem = f"has {path}, which PEFT cannot adapt in this class"
                raise UntrainableModel(name, problem, _NAME_OTHERS)
    if any(isinstance(each, Conv1D) for each in modules.values()):
        problem = "has matrices of transposed axes (Conv1D)"
        raise UntrainableModel(name, problem, "Leave trainer.lora out")
    _check_own_matrices(model, lora)


def _check_own_matrices(model: PreTrainedModel, lora: LoraConfig) -> None:
    """Check that no two targets share a matrix: a release has it once, but their sums differ."""
    paths_by_matrix = dict[Tensor, list[str]]()
    for path, module in find_target_modules(model, lora).items():
        paths_by_matrix.setdefault(module.weight, []).append(path)
    for path, *others in paths_by_matrix.values():
        if others:
            problem = f"has {path}, whose matrix is that of {others[0]}, too"
            raise UntrainableModel(type(model).__name__, problem, _NAME_OTHERS)


def find_target_modules(model: PreTrainedModel, lora: LoraConfig) -> dict[str, nn.Linear]:
    """Return the linear modules that ``inject`` adapts, by name. The model may be without memory.

    peft is not needed. Targets that ``check_targets`` refuses are left out.
    """
    head, unsupported = model.get_output_embeddings(), _find_unsupported_names(model)
    return {
        path: module
        for path, module in model.named_modules()
        if _is_plain(module)
        and _last_part(path) not in unsupported
        and (
            any(_is_targeted(path, each) for each in lora.target_modules)
            if lora.target_modules
            else module is not head
        )
    }


def find_unsupported_modules(model: PreTrainedModel) -> list[str]:
    """Return the names of linear modules that PEFT cannot adapt in a model's class."""
    names = _find_unsupported_names(model)
    return [
        path
        for path, module in model.named_modules()
        if _is_plain(module) and _last_part(path) in names
    ]


def _find_unsupported_names(model: PreTrainedModel) -> frozenset[str]:
    kind: str = model.config.model_type
    fused = _FUSED_NAMES.get(_MODEL_TO_CONVERSION_PATTERN.get(kind, ""), frozenset())
    return fused | _NAMES_BY_TYPE.get(kind, frozenset())


def _last_part(path: str) -> str:
    return path.rpartition(".")[2]


def _is_plain(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Return whether a module is a plain linear layer. Some routers return more than that."""
    return isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward


def _is_targeted(path: str, target: str) -> bool:
    return f".{path}".endswith(f".{target}")


def _linear_names_said(model: PreTrainedModel) -> str:
    every = find_target_modules(model, LoraConfig(rank=1))
    names = sorted({path.rpartition(".")[2] for path in every})
    return f"{_NAME_OTHERS}: {', '.join(names)}" if names else _NAME_OTHERS


def find_base(model: nn.Module, module: str) -> str:
    """Return the name of the module that holds a linear module's matrix: itself, if not adapted."""
    children = dict(model.get_submodule(module).named_children())
    return f"{module}.{_BASE_LAYER}" if _BASE_LAYER in children else module


def name_side(module: str, side: str) -> str:
    """Return the name of the module that is side A or B of a linear module's adapter."""
    return f"{module}{_MODULES[side]}"


def part_of_parameter(name: str) -> AdapterPart | None:
    """Return which part of an adapter this parameter is, or None for other parameters."""
    for side, ending in _SIDES.items():
        if name.endswith(ending):
            return AdapterPart(name.removesuffix(ending), side)
    return None


def _config(library: Any, targeted: str | Sequence[str], lora: LoraConfig, base: str) -> Any:  # noqa: ANN401 -- peft may not be installed
    return library.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        target_modules=targeted if isinstance(targeted, str) else list(targeted),
        lora_dropout=0.0,  # dropout would make log-probabilities random
        bias="none",
        task_type="CAUSAL_LM",
        base_model_name_or_path=base or None,
    )


def _peft(submodule: str = "") -> Any:  # noqa: ANN401 -- it may not be installed
    try:
        return import_object(f"peft{submodule}")
    except ImportError as error:
        raise PeftMissing(str(error)) from error
