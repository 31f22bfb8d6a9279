"""Removes secrets from texts before they are written."""

import json
import os
import re
from collections.abc import Iterable, Mapping
from typing import Final

from offbeat.config import secrets as config_secrets
from offbeat.config.run import RunConfig

REDACTED: Final = "[redacted]"


class Redactor:
    """Replaces known secrets and passwords in URLs in any text. Also finds JSON-escaped secrets."""

    def __init__(self, secrets: Iterable[str]) -> None:
        found = {secret for secret in secrets if len(secret) >= config_secrets.SHORTEST}
        forms = {form for secret in found for form in _written_forms(secret)}
        # The longest first: a secret may be a prefix of another.
        longest_first = sorted(forms, key=lambda form: (-len(form), form))
        known = [re.escape(form) for form in longest_first]
        self._pattern = re.compile("|".join([*known, config_secrets.USER_IN_URL.pattern]))

    @classmethod
    def from_environment(
        cls, environ: Mapping[str, str] = os.environ, config: RunConfig | None = None
    ) -> "Redactor":
        """Create a redactor of all environment variables and recipe keys named like a secret."""
        of_recipe = set[str]() if config is None else config_secrets.of_recipe(config.model_dump())
        return cls(config_secrets.of_environment(environ) | of_recipe)

    def __call__(self, text: str) -> str:
        return self._pattern.sub(REDACTED, text)


def _written_forms(secret: str) -> set[str]:
    """Return the secret as it is and as ``repr`` writes it, both also JSON-escaped."""
    plain = {secret, repr(secret)[1:-1]}
    return plain | {
        json.dumps(form, ensure_ascii=ascii_only)[1:-1]
        for form in plain
        for ascii_only in (True, False)
    }
