"""Recipes of tests that read settings, and what is said of them."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from offbeat.config.crosschecks import clashes
from offbeat.config.run import RunConfig
from offbeat.messages.finding import Finding, Level


def make_config(model: str | Path | Mapping[str, Any] = "m", **sections: Any) -> RunConfig:
    """Make a recipe of one step.

    Args:
        model: Its path, or the keys of its section.
        sections: Other sections, and ``steps``.
    """
    named = model if isinstance(model, Mapping) else {"path": str(model)}
    return RunConfig.model_validate({"steps": 1, "model": named, **sections})


def read_clashes(config: RunConfig, *, dry_run: bool = False) -> list[str]:
    """Read out the settings of a recipe that do not go together, each with its hint."""
    return [f"{each.message}. {each.hint}" for each in clashes(config, dry_run=dry_run)]


def get_only(findings: Iterable[Finding]) -> Finding:
    """Return the only finding, which names a fix unless all is well."""
    (finding,) = findings
    assert finding.fix or finding.level is Level.OK, "what is not ok says how to fix it"
    return finding
