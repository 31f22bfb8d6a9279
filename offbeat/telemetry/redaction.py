"""Secrets are taken out of every text before it is written."""

import json
import os
import re
from collections.abc import Iterable, Mapping
from typing import Final

REDACTED: Final = "[redacted]"
SECRET_NAME: Final = re.compile(r"(_API_KEY|_TOKEN|_SECRET|_PASSWORD)$", re.IGNORECASE)
"""Environment variables with such a name hold a secret."""

_SHORTEST: Final = 6
"""A shorter value is no secret but a word: replacing "1" or "true" would garble every line."""


class Redactor:
    """Replaces known secrets in any text, also where JSON has escaped them."""

    def __init__(self, secrets: Iterable[str]) -> None:
        found = {secret for secret in secrets if len(secret) >= _SHORTEST}
        forms = {form for secret in found for form in _written_forms(secret)}
        # The longest first: a secret may begin with another one.
        longest_first = sorted(forms, key=lambda form: (-len(form), form))
        self._pattern = re.compile("|".join(map(re.escape, longest_first))) if forms else None

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> "Redactor":
        """Knows the value of every variable whose name ends like a secret's."""
        return cls(value for name, value in environ.items() if SECRET_NAME.search(name))

    def __call__(self, text: str) -> str:
        return self._pattern.sub(REDACTED, text) if self._pattern else text


def _written_forms(secret: str) -> set[str]:
    """As it is, as JSON writes it with and without ASCII escapes, and as ``repr`` does."""
    return {
        secret,
        json.dumps(secret)[1:-1],
        json.dumps(secret, ensure_ascii=False)[1:-1],
        repr(secret)[1:-1],
    }
