"""The resolved configuration as a recipe of its own, without secrets."""

from collections.abc import Mapping
from typing import Final

import yaml

from offbeat.config.run import RunConfig
from offbeat.config.secrets import of_environment, without_secrets
from offbeat.config.yaml_text import RecipeDumper

_HEADER: Final = "# The configuration of this run, defaults filled in. It is a recipe: train it again as it stands.\n"


def to_yaml(config: RunConfig, environ: Mapping[str, str]) -> str:
    """YAML that loads as an equal configuration, except for values that are secrets.

    Args:
        config: What to write. Paths stay as they are: absolute after ``load_recipe``.
        environ: Environment variables; the values of those whose names say that they hold a secret
            never appear in the result.
    """
    values = without_secrets(config.model_dump(), of_environment(environ))
    return _HEADER + yaml.dump(
        values, Dumper=RecipeDumper, sort_keys=False, allow_unicode=True, width=100
    )
