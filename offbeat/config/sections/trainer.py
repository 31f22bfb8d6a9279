"""Defines section ``trainer`` of a recipe."""

from typing import TYPE_CHECKING, Annotated, Literal, Union

from pydantic import Field

from offbeat.config.base import default_choice
from offbeat.config.sections.trainer_base import AnyTrainerConfig, ModelTrainerConfig
from offbeat.config.trainer_backends import trainer_sections
from offbeat.config.trainer_parts import with_parts


class TorchTrainerConfig(ModelTrainerConfig):
    """Any Hugging Face causal LM, sharded over data-parallel (FSDP2) and tensor-parallel (DTensor) ranks."""

    backend: Literal["torch"] = "torch"
    """Training backend."""


if not TYPE_CHECKING:  # lets a type checker show that the core reads no plug-in section
    TorchTrainerConfig = with_parts(TorchTrainerConfig, "torch")


class StubTrainerConfig(AnyTrainerConfig):
    """A cost model (section `stub`) instead of a model: dry runs."""

    backend: Literal["stub"] = "stub"
    """Training backend."""


if TYPE_CHECKING:  # lets a type checker show that the core reads no plug-in key
    _Section = TorchTrainerConfig | StubTrainerConfig
else:
    _Section = Union[(TorchTrainerConfig, *trainer_sections(), StubTrainerConfig)]

TrainerConfig = Annotated[
    _Section,
    Field(discriminator="backend"),
    default_choice("backend", "torch"),
]
