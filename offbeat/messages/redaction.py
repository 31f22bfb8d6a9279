"""Removes secrets from text, and cuts text so that no part of a secret stays at the cut.

A redactor finds only complete secrets. So text is redacted before it is cut, in the process that
cuts it.
"""

import json
import os
import re
from collections.abc import Collection, Mapping
from functools import lru_cache
from typing import Final
from urllib.parse import quote

REDACTED: Final = "[redacted]"

SHORTEST: Final = 6
"""Minimum length of a secret. Removing shorter values such as "1" or "true" would garble every
text.
"""

USER_IN_URL: Final = re.compile(r"(?<=://)[^\s/?#@:\"']{0,200}:[^\s/?#@\"']{1,200}(?=@)")
"""``user:password`` in a URL that has a password. Its length is bounded so that no text makes it
slow.
"""

_VARIABLE: Final = re.compile(
    r"(?:(?:^|_)(?:TOKEN|SECRET|(?:API|ACCESS|SECRET|PRIVATE)_?KEY)|PASSWORD|PASSWD|PASSPHRASE)$",
    re.IGNORECASE,
)
LONGEST_SECRET: Final = 8192
"""Maximum length of a secret for which it is certain that no part stays at a cut."""

_OF_RECIPES = set[str]()


def is_secret_variable(name: str) -> bool:
    """Return whether an environment variable holds a secret, judging by its name."""
    return _VARIABLE.search(name) is not None


def of_environment(environ: Mapping[str, str]) -> set[str]:
    """Return the values of environment variables that hold a secret, judging by their names."""
    return {
        value
        for name, value in environ.items()
        if is_secret_variable(name) and len(value) >= SHORTEST
    }


def compile_secrets(secrets: Collection[str]) -> re.Pattern[str]:
    """Return a pattern that finds passwords in URLs, and these secrets as text usually has them."""
    found = {secret for secret in secrets if len(secret) >= SHORTEST}
    forms = {form for secret in found for form in _written_forms(secret)}
    # The longest first: a secret may be a prefix of another.
    longest_first = sorted(forms, key=lambda form: (-len(form), form))
    return re.compile("|".join([*map(re.escape, longest_first), USER_IN_URL.pattern]))


def _written_forms(secret: str) -> set[str]:
    """Return the secret itself, its ``repr``, both of these JSON-escaped, and its form in URLs."""
    plain = {secret, repr(secret)[1:-1]}
    quoted = {quote(secret, safe, errors="replace") for safe in ("", "/")}
    escaped = {
        json.dumps(form, ensure_ascii=ascii_only)[1:-1]
        for form in plain
        for ascii_only in (True, False)
    }
    return plain | quoted | escaped


def remember_secrets(secrets: Collection[str]) -> None:
    """Also remove these secrets of a recipe from text that this process cuts."""
    _OF_RECIPES.update(secrets)


def redact(text: str) -> str:
    """Return the text without the secrets that this process knows."""
    known = frozenset(of_environment(os.environ) | _OF_RECIPES)
    return _pattern(known).sub(REDACTED, text)


_pattern = lru_cache(maxsize=4)(compile_secrets)


def cut_head(text: str, longest: int) -> str:
    """Return at most the first ``longest`` characters, without secrets if the text is cut."""
    if len(text) <= longest:
        return text
    window = longest + LONGEST_SECRET
    head = redact(text[:window])
    # A secret that the window cuts is not found, so its characters are left out.
    return (head if len(text) <= window else head[:-LONGEST_SECRET])[:longest]


def cut_tail(text: str, longest: int) -> str:
    """Return at most the last ``longest`` characters, without secrets if the text is cut."""
    if len(text) <= longest:
        return text
    window = longest + LONGEST_SECRET
    tail = redact(text[-window:])
    return (tail if len(text) <= window else tail[LONGEST_SECRET:])[-longest:]
