"""Defines section ``trainer.moe`` of a recipe."""

from typing import Annotated

from pydantic import Field

from offbeat.config.base import Config


class MoeConfig(Config):
    """Balancing of a model's experts, if it has some. By default only the loss trains a router."""

    load_balancing_coef: Annotated[float, Field(ge=0)] = 0.0
    """Weight of Switch Transformer's load balancing loss. Too much costs reward; too little lets
    experts die. The experts' token shares come from the last applied step, so the loss does not
    depend on chunks and ranks."""

    z_loss_coef: Annotated[float, Field(ge=0)] = 0.0
    """Weight of ST-MoE's router z-loss, which keeps router logits small."""

    bias_update_rate: Annotated[float, Field(ge=0)] = 0.0
    """Amount by which a step raises the router bias of underused experts and lowers the bias of
    overused ones (DeepSeek-V3: 0.001). Only for routers with such a bias. 0: off."""

    @property
    def has_losses(self) -> bool:
        """Return whether routers have a separate loss."""
        return self.load_balancing_coef > 0 or self.z_loss_coef > 0
