"""Defines section ``trainer.lora`` of a recipe."""

from typing import Annotated

from pydantic import Field

from offbeat.config.base import Config


class LoraConfig(Config):
    """Low-rank adapters beside frozen matrices (extra ``lora``), the only weights that are trained."""

    rank: Annotated[int, Field(ge=1)] = 16
    """Rank of each adapter. A higher one can learn more; weights, moments, checkpoints and releases grow with
    it, up to the smaller axis of a matrix, beyond which nothing more is learned."""

    alpha: Annotated[float, Field(gt=0)] = 32.0
    """What an adapter adds is scaled by alpha / rank. A larger alpha moves the model further per step, as a
    higher learning rate would: change one of the two."""

    target_modules: tuple[str, ...] = ()
    """Names, or ends of names, of the linear modules that get an adapter, such as `q_proj`. Fewer make releases
    smaller and learn less; empty: every linear module but the output head, which leaves out experts that a model
    has in one tensor per layer, and their routers: `offbeat check` counts them."""
