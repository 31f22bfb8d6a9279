"""Interface of a part of a trainer that a plug-in exchanges, in a section of ``trainer``.

The models of a recipe import this module, so it imports none of them.
"""

from abc import ABC
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeVar, cast

from offbeat.config.base import Config
from offbeat.config.clash import Clash
from offbeat.doors import plugins_of
from offbeat.messages.finding import Finding

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

    from offbeat.config.run import RunConfig
    from offbeat.trainers.spec import TrainerSpec
    from offbeat.trainers.torch.parts import TorchParts
    from offbeat.weight_sync.transport import WeightSource

T = TypeVar("T")


class AddedModules(NamedTuple):
    """Names of the modules that replace a linear module, and compute it and an addition to it."""

    matrix: str
    """Linear module with the matrix of the model."""

    first: str
    """Linear module of the addition that reads the inputs of the matrix."""

    last: str
    """Linear module of the addition whose outputs are added to the outputs of the matrix."""


class TrainerPart(ABC):
    """Exchanges a part of a trainer where the recipe uses it: by default, where it has its section.

    Methods with a recipe are called only then.
    """

    key: str
    """Name of its section below ``trainer``."""

    section: type[Config] | None = None
    """Model of its section; None: keys of the core say whether it is used."""

    doc: str = ""
    """Documentation of its section."""

    backend: ClassVar[str | None] = None
    """Name of the only backend that has the section; None: every backend of a model has it."""

    is_fixed: ClassVar[bool] = False
    """Whether the section cannot change when a run resumes."""

    has_common_name: ClassVar[bool] = False
    """Whether other libraries have a section of this name, too: an unknown key may mean it."""

    packages: ClassVar[Mapping[str, str]] = {}
    """Packages that only this part needs, with the extra of offbeat that installs each."""

    freezes_model: ClassVar[bool] = False
    """Whether it freezes the model and trains weights next to it: its additions."""

    additions: ClassVar[str] = ""
    """Word of findings for what it trains next to the model."""

    size_key: ClassVar[str] = ""
    """Key of the recipe that says how large its additions are."""

    def is_used(self, trainer: Config) -> bool:
        """Return whether a section ``trainer`` uses this part."""
        return getattr(trainer, self.key, None) is not None

    def find_clashes(self, config: "RunConfig") -> Iterator[Clash]:
        """Yield settings that do not go together, in a dry run neither."""
        del config
        yield from ()

    def find_clashes_of_real_runs(self, config: "RunConfig") -> Iterator[Clash]:
        """Yield settings that do not go together unless stubs stand for the devices."""
        del config
        yield from ()

    def check(self, config: "RunConfig", gpu: int | None) -> Iterator[Finding]:
        """Yield findings about the recipe's model.

        Args:
            config: The recipe.
            gpu: Memory of a rank's GPU in bytes; None: unknown, or the ranks are on the CPU.
        """
        del config, gpu
        yield from ()

    def check_model(self, config: "RunConfig", model: "PreTrainedModel") -> Iterator[Finding]:
        """Yield findings about a model without memory, which stays as it is."""
        del config, model
        yield from ()

    def add_to_model(self, config: "RunConfig", model: "PreTrainedModel") -> None:
        """Add its additions to a model without memory.

        Raises:
            PartPackageMissing: A package of this part cannot be imported.
            UntrainableModel: The model takes none.
        """
        del config, model

    def count_additions(self, config: "RunConfig", model: "PreTrainedModel") -> int:
        """Return the number of parameters of its additions to a model without memory.

        Raises:
            UntrainableModel: The model takes none.
        """
        del config, model
        return 0

    def replace_parts(self, config: "RunConfig", rank: int, parts: "TorchParts") -> "TorchParts":
        """Return the parts of the torch trainer of a rank, with its own in the place of some."""
        del config, rank
        return parts

    def choose_trainer(self, config: "RunConfig", rank: int) -> Callable[..., Any] | None:
        """Return what makes a rank's trainer, if its backend is a plug-in; None: the backend's class."""
        del config, rank
        return None

    def make_source(self, spec: "TrainerSpec", trainer: Any) -> "WeightSource | None":  # noqa: ANN401 -- of its class
        """Return the source of a rank's weights; None: the source of the backend.

        Args:
            spec: What the rank is built from.
            trainer: The rank's trainer, of the class that it chose.
        """
        del spec, trainer
        return None

    def find_added(self, model: "nn.Module", module: str) -> AddedModules | None:
        """Return the modules that replace a linear module of a model; None: it replaced none of this name."""
        del model, module
        return None

    def name_in_files(self, parameter: str) -> str | None:
        """Return the name in files of a parameter of its additions; None: the parameter is not one."""
        del parameter
        return None

    def names_addition(self, name: str) -> bool:
        """Return whether a tensor of this name in files is one of its additions."""
        del name
        return False


def parts_of(config: "RunConfig") -> list[TrainerPart]:
    """Return the parts that a recipe exchanges."""
    return [part for part in known_parts() if part.is_used(config.trainer)]


def known_parts() -> list[TrainerPart]:
    """Return the parts that plug-ins of this package bring."""
    return [*cast("dict[str, TrainerPart]", plugins_of("trainer_part")).values()]


def freezing_part(config: "RunConfig") -> TrainerPart | None:
    """Return the part that trains weights next to the model, which it freezes, if there is one."""
    return next((part for part in parts_of(config) if part.freezes_model), None)


def choose_trainer(config: "RunConfig", rank: int, default: Callable[..., T]) -> Callable[..., T]:
    """Return what makes a rank's trainer, which a part may exchange."""
    chosen: Callable[..., Any] = default
    for part in parts_of(config):
        chosen = part.choose_trainer(config, rank) or chosen
    return chosen


def replace_parts(config: "RunConfig", rank: int, parts: "TorchParts") -> "TorchParts":
    """Return the parts of the torch trainer of a rank, some of which plug-ins replace."""
    for part in parts_of(config):
        parts = part.replace_parts(config, rank, parts)
    return parts


def make_source(spec: "TrainerSpec", trainer: object) -> "WeightSource | None":
    """Return the source of a rank's weights that a part makes; None: the source of the backend."""
    made = (part.make_source(spec, trainer) for part in parts_of(spec.config))
    return next((source for source in made if source is not None), None)
