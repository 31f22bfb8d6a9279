"""Combinations of settings that cannot work with pictures in prompts."""

from collections.abc import Iterator
from typing import Final

from offbeat.config.clash import Clash
from offbeat.config.run import RunConfig
from offbeat.doors import find_media
from offbeat.messages.no_media import NoMedia

READ_PICTURES: Final = ("function", "custom", "digits", "stub")
"""Environments whose prompts may have pictures."""


def image_clashes(config: RunConfig) -> Iterator[Clash]:
    """Yield what reads no pictures where prompts have some, and pictures without their limits."""
    name = config.environment.name
    if config.environment.images is None:
        if name == "digits":
            yield Clash(
                ("environment.images", "environment.name"),
                "environment.name=digits draws a picture for each prompt, and environment.images is "
                "not set",
                "Write `images: {max_mib: 0.02}` under environment.",
            )
        return
    if isinstance(find_media(), NoMedia):
        yield Clash(
            ("environment.images",),
            "no plug-in that reads media is installed",
            "Reinstall offbeat, or leave out environment.images.",
        )
    if name not in READ_PICTURES:
        yield Clash(
            ("environment.images", "environment.name"),
            f"environment.images is not used: prompts of environment.name={name} have no pictures",
            f"Leave it out, or set environment.name to one of {', '.join(READ_PICTURES)}.",
        )
