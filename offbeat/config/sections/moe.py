"""Defines section ``trainer.moe`` of a recipe."""

from typing import Annotated

from pydantic import Field

from offbeat.config.base import Config


class MoeConfig(Config):
    """Balance of the experts of a model that has some. By default a router is trained by the loss alone."""

    load_balancing_coef: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the load balancing loss of Switch Transformer. Too much costs reward, too little
    lets experts die. Its token shares are of the last applied step, so it depends neither on chunks
    nor on ranks."""

    z_loss_coef: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the router z-loss of ST-MoE, which keeps router logits small."""

    bias_update_rate: Annotated[float, Field(ge=0)] = 0.0
    """Step by which the router bias of underused experts rises and of overused ones falls
    (DeepSeek-V3: 0.001). Only for routers with such a bias. 0: off."""

    @property
    def has_losses(self) -> bool:
        """Return whether routers have a separate loss."""
        return self.load_balancing_coef > 0 or self.z_loss_coef > 0
