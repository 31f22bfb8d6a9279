"""Finds settings of ``trainer.moe`` that do not go with the rest of a recipe.

Whether the model has experts is checked against its config: ``offbeat/launch/checks``.
"""

from collections.abc import Iterator

from offbeat.config.clash import Clash
from offbeat.config.limits import lora_of, moe_of
from offbeat.config.run import RunConfig


def moe_clashes(config: RunConfig) -> Iterator[Clash]:
    """Yield what cannot work where ``trainer.moe`` sets something."""
    moe = moe_of(config)
    if moe is None:
        return
    if lora_of(config) is not None:
        yield Clash(
            ("trainer.moe", "trainer.lora"),
            "trainer.moe balances routers, which trainer.lora freezes: adapters are all that is trained "
            "and sent",
            "Leave trainer.moe out, or trainer.lora.",
        )
    normalize = config.algorithm.loss.normalize
    if moe.has_losses and normalize != "tokens":
        yield Clash(
            (
                "trainer.moe.load_balancing_coef",
                "trainer.moe.z_loss_coef",
                "algorithm.loss.normalize",
            ),
            f"the losses of trainer.moe are sums over tokens, and algorithm.loss.normalize={normalize} "
            "divides them by sequences: their weight would grow with the length of samples",
            "Set algorithm.loss.normalize to tokens, or balance by trainer.moe.bias_update_rate.",
        )
