"""Interface of a part of a trainer that a plug-in exchanges, in a section of ``trainer``.

The models of a recipe import this module, so it imports none of them.
"""

from abc import ABC
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TypeVar, cast

from offbeat.config.base import Config
from offbeat.config.clash import Clash
from offbeat.config.trainer_parts import is_set
from offbeat.doors import plugins_of
from offbeat.messages.finding import Finding

if TYPE_CHECKING:
    from offbeat.config.run import RunConfig

T = TypeVar("T")


class TrainerPart(ABC):
    """Exchanges a part of a trainer where the recipe has its section.

    Each method is called only then.
    """

    key: str
    """Name of its section below ``trainer``."""

    section: type[Config]
    """Model of its section."""

    doc: str
    """Documentation of its section."""

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

    def choose_trainer(self, config: "RunConfig", rank: int) -> type[Any] | None:
        """Return the class of a rank's trainer; None: the class of the backend."""
        del config, rank
        return None


def parts_of(config: "RunConfig") -> list[TrainerPart]:
    """Return the parts that a recipe exchanges."""
    brought = cast("dict[str, TrainerPart]", plugins_of("trainer_part"))
    return [part for part in brought.values() if is_set(config.trainer, part.key)]


def choose_trainer(config: "RunConfig", rank: int, default: type[T]) -> type[T]:
    """Return the class of a rank's trainer, which a part may exchange."""
    chosen: type[Any] = default
    for part in parts_of(config):
        chosen = part.choose_trainer(config, rank) or chosen
    return chosen
