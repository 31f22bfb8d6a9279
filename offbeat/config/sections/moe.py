"""Defines section ``trainer.moe`` of a recipe."""

from typing import Annotated

from pydantic import Field

from offbeat.config.base import Config


class MoeConfig(Config):
    """Balance of the experts of a model that has some. By default a router is trained by the loss alone."""

    load_balancing_coef: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the loss that spreads tokens over experts (Switch Transformer's). It adds to every gradient, so
    too much costs reward; too little lets experts die. The shares of tokens in it are those of the last applied
    step, so that it depends neither on chunks nor on ranks; the first step of a run has none."""

    z_loss_coef: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the loss that keeps logits of routers small (ST-MoE's). It steadies 16-bit routers and flattens
    what they choose."""

    bias_update_rate: Annotated[float, Field(ge=0)] = 0.0
    """Amount that an applied step adds to the bias of an expert with fewer tokens than the mean, and subtracts
    from that of one with more (DeepSeek-V3's rule; 0.001 there). It balances without a gradient, and moves the
    choice of experts under samples that are on their way; models whose routers have such a bias only. 0 leaves it
    as it is."""

    @property
    def has_losses(self) -> bool:
        """Return whether routers have a loss of their own."""
        return self.load_balancing_coef > 0 or self.z_loss_coef > 0
