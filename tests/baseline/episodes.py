"""Digests of simulated episodes: what the controller wrote, and what the auditor saw of the world."""

import hashlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import msgspec
import structlog

from offbeat.config.loader import load_recipe
from offbeat.config.run import RunConfig
from offbeat.plugins.simulation.campaign import violations_of
from offbeat.plugins.simulation.episode import EpisodeResult, run_episode
from offbeat.plugins.simulation.quiet_log import SILENT

RECIPE = Path("recipes/quickstart.yaml")
SEEDS = range(300)
PROFILE = "all"


def controller_digests() -> dict[str, object]:
    """Return the digest of each episode's journal, by seed."""
    return {seed: controller for seed, controller, _ in _played()}


def auditor_digests() -> dict[str, object]:
    """Return the digest of each episode's records and violations, by seed."""
    return {seed: auditor for seed, _, auditor in _played()}


@cache
def _played() -> tuple[tuple[str, str, str], ...]:
    structlog.configure(wrapper_class=SILENT)
    base = load_recipe(RECIPE, []).config
    return tuple(_digests(base))


def _digests(base: RunConfig) -> Iterator[tuple[str, str, str]]:
    for seed in SEEDS:
        result = run_episode(seed, base, profile=PROFILE)
        yield str(seed), _digest(result.journal), _digest(_seen(result))


def _seen(result: EpisodeResult) -> list[object]:
    return [result.outcome, result.fired, result.records, violations_of(result)]


def _digest(what: object) -> str:
    return hashlib.blake2b(msgspec.msgpack.encode(what), digest_size=8).hexdigest()
