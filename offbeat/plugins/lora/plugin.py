"""Adapters next to a frozen model, for the torch trainer: ``trainer.lora``."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Final

from offbeat.config.problems import Clash
from offbeat.messages.finding import Finding
from offbeat.plugins.lora.section import LoraConfig, lora_section
from offbeat.trainers.trainer_plugin import AddedModules, TrainerPart

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

    from offbeat.config.run import RunConfig
    from offbeat.plugins.lora.release import BaseWeights
    from offbeat.trainers.spec import TrainerSpec
    from offbeat.trainers.torch.torch_trainer import TorchParts
    from offbeat.weight_sync.chunks import GatheredSource


class Lora(TrainerPart):
    """Trains adapters of a frozen model."""

    key = "lora"
    section = LoraConfig
    doc = "Train adapters instead of the model: less memory, smaller releases (docs/lora.md)."
    backend = "torch"
    is_fixed = True
    has_common_name = True
    packages: ClassVar[Mapping[str, str]] = {"peft": "lora"}
    freezes_model = True
    additions = "adapters"
    size_key = "trainer.lora.rank"

    def find_clashes(self, config: "RunConfig") -> Iterator[Clash]:
        """Yield settings that cannot work if adapters are trained."""
        from offbeat.plugins.lora.clashes import adapter_clashes

        yield from adapter_clashes(config)

    def find_clashes_of_real_runs(self, config: "RunConfig") -> Iterator[Clash]:
        """Yield release settings that exclude adapters or gain nothing from them."""
        from offbeat.plugins.lora.clashes import adapter_release_clashes

        yield from adapter_release_clashes(config)

    def check_model(self, config: "RunConfig", model: "PreTrainedModel") -> Iterator[Finding]:
        """Check the targets, the rank, and whether experts are left out."""
        from offbeat.plugins.lora.checks import check_adapters

        yield from check_adapters(model, lora_section(config.trainer))

    def add_to_model(self, config: "RunConfig", model: "PreTrainedModel") -> None:
        """Inject adapters into a model without memory.

        Raises:
            PeftMissing: peft cannot be imported.
            UntrainableModel: A target cannot have an adapter.
        """
        from offbeat.plugins.lora.lora import inject

        inject(model, lora_section(config.trainer))

    def count_additions(self, config: "RunConfig", model: "PreTrainedModel") -> int:
        """Return the number of elements of all adapters."""
        from offbeat.plugins.lora.checks import adapter_parameters

        return adapter_parameters(model, lora_section(config.trainer))

    def replace_parts(self, config: "RunConfig", rank: int, parts: "TorchParts") -> "TorchParts":
        """Train adapters instead of the weights of the model."""
        from offbeat.plugins.lora.adapters import Adapters

        del config, rank
        return replace(parts, trained=Adapters)

    def make_source(self, spec: "TrainerSpec", trainer: Any) -> "GatheredSource":  # noqa: ANN401 -- of any backend
        """Return the source of the adapters, or of the model with the adapters added."""
        from offbeat.plugins.lora.adapters import make_source

        return make_source(spec, trainer.trained)

    def find_added(self, model: "nn.Module", module: str) -> AddedModules | None:
        """Return the modules of an adapted linear module."""
        from offbeat.plugins.lora.lora import find_base, name_side

        base = find_base(model, module)
        if base == module:
            return None
        return AddedModules(base, name_side(module, "A"), name_side(module, "B"))

    def name_in_files(self, parameter: str) -> str | None:
        """Return the name of an adapter's parameter in PEFT's files, or None for other ones."""
        from offbeat.plugins.lora.lora import part_of_parameter

        part = part_of_parameter(parameter)
        return None if part is None else part.file_name

    def names_addition(self, name: str) -> bool:
        """Return whether a matrix of an adapter has this name in PEFT's files."""
        from offbeat.plugins.lora.release import part_named

        return part_named(name) is not None


class LoraRelease:
    """Adds the adapters of releases to the weights that an engine loaded."""

    def open_base(self, module: "nn.Module", digest: str) -> "BaseWeights":
        """Return the loaded weights, which keep copies of adapted matrices."""
        from offbeat.plugins.lora.release import BaseWeights

        return BaseWeights(module, digest)


PART: Final = Lora()
RELEASE: Final = LoraRelease()
