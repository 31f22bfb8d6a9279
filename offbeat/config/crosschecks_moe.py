"""Finds settings of ``trainer.moe`` that do not go with the rest of a recipe.

Whether the model has experts is checked against its config: ``offbeat/launch/checks``.
"""

from collections.abc import Iterator

from offbeat.config.clash import Clash
from offbeat.config.limits import moe_of
from offbeat.config.run import RunConfig
from offbeat.config.sections.loss import PolicyGradientLossConfig


def moe_clashes(config: RunConfig) -> Iterator[Clash]:
    """Yield what cannot work where ``trainer.moe`` sets something."""
    moe = moe_of(config)
    if moe is None:
        return
    loss = config.algorithm.loss
    if not moe.has_losses or not isinstance(loss, PolicyGradientLossConfig):
        return
    coefs = "trainer.moe.load_balancing_coef", "trainer.moe.z_loss_coef"
    if loss.step_std:
        yield Clash(
            (*coefs, "algorithm.loss.step_std"),
            "algorithm.loss.step_std=true would divide the losses of trainer.moe too: the deviation is "
            "known only when the gradients of all losses have been added up",
            "Set algorithm.loss.step_std to false, or balance by trainer.moe.bias_update_rate.",
        )
    drops = (loss.icepop_band, loss.sequence_band, loss.off_policy_delta)
    if not loss.count_dropped and any(each is not None for each in drops):
        yield Clash(
            (*coefs, "algorithm.loss.count_dropped"),
            "algorithm.loss.count_dropped=false divides by the tokens that are kept, and the losses of "
            "trainer.moe are sums over dropped ones as well: their weight would grow with what is dropped",
            "Set algorithm.loss.count_dropped to true, or balance by trainer.moe.bias_update_rate.",
        )
