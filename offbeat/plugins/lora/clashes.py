"""Finds settings that adapters (``trainer.lora``) cannot work with."""

from collections.abc import Iterator

from offbeat.config.crosschecks_local import needs_copies
from offbeat.config.limits import find_moe, freeze_patterns, shares_weights
from offbeat.config.problems import Clash
from offbeat.config.run import RunConfig


def adapter_clashes(config: RunConfig) -> Iterator[Clash]:
    """Yield settings that cannot work if adapters are trained, not even in a dry run."""
    if patterns := freeze_patterns(config):
        yield Clash(
            ("trainer.freeze", "trainer.lora"),
            f"trainer.freeze={list(patterns)} has no effect with trainer.lora, which trains "
            "only adapters: the whole model is already frozen",
            "Leave trainer.freeze out and name modules in trainer.lora.target_modules, or leave "
            "trainer.lora out.",
        )
    if find_moe(config) is not None:
        yield Clash(
            ("trainer.moe", "trainer.lora"),
            "trainer.moe balances routers, which trainer.lora freezes: adapters are all that is trained "
            "and sent",
            "Leave trainer.moe out, or trainer.lora.",
        )


def adapter_release_clashes(config: RunConfig) -> Iterator[Clash]:
    """Yield release settings that exclude adapters or gain nothing from them; none in dry runs."""
    sync = config.sync
    if sync.quantize is not None:
        yield Clash(
            ("sync.quantize", "trainer.lora"),
            f"sync.quantize={sync.quantize} has no effect on adapters, which trainer.lora sends unrounded",
            "Leave sync.quantize out, or train all weights.",
        )
    if sync.ranks_send:
        yield Clash(
            ("sync.transport", "trainer.lora"),
            "sync.transport=reshard sends full weights from each rank's shards, but "
            "trainer.lora trains adapters, which are small or must be merged first",
            "Set sync.transport to object_store.",
        )
    if sync.delta:
        yield Clash(
            ("sync.delta", "trainer.lora"),
            "sync.delta=true saves nothing with trainer.lora: a step changes nearly every value of an "
            "adapter, and a large part of the matrices that it is merged into",
            "Leave sync.delta out.",
        )
    if shares_weights(config):
        yield needs_copies(
            "trainer.lora",
            "",
            "engines merge the adapters into matrices that the trainer needs unmerged",
            "Leave trainer.lora out",
        )
