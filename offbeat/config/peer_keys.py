"""Translates other libraries' keys, for the message about an unknown key.

The tables are in ``peer_tables``. docs/coming-from.md has the differences in meaning.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import cache
from itertools import accumulate
from types import MappingProxyType
from typing import Final

from offbeat.config.peer_tables import NOTES, PEER_KEYS
from offbeat.messages.text import printable

_WITHOUT_COUNTERPART: Final = {
    "actor_rollout_ref.ref": "ref",
    "critic": "critic",
    "policy.draft": "policy.draft",
    "recover": "recover",
    "ref": "ref",
    "reward_model": "reward_model",
    "trainer.critic": "critic",
    "trainer.ref": "ref",
}
"""Notes on sections of other libraries without any counterpart here."""

_SECTIONS: Final = (
    *("data_plane", "log", "perf_tracer", "rejection_sampling", "reward_penalties"),
)
"""Sections of other libraries in which no key has a known counterpart."""

_GENERIC: Final = frozenset(
    {
        *("algorithm", "alpha", "backend", "batch_size", "log", "tensorboard"),
        *("delta", "device", "dim", "dtype", "enable", "enabled"),
        *("group_size", "interval", "len", "load", "loss_type", "mode", "model", "n", "name"),
        *(
            "max_steps",
            "num_workers",
            "optimizer",
            "path",
            "project",
            "rank",
            "save",
            "scheduler",
            "seed",
        ),
        *("shuffle", "stop", "strategy", "target", "type", "warmup_steps"),
    }
)
"""Last parts that many sections have: the part before must match, too."""

_WHOLE: Final = 100
"""Score of a dotted key that is exactly the other library's key."""

_PAGE: Final = "More: docs/coming-from.md."
_NOT_KNOWN: Final = "docs/peer-keys.md lists the known ones."


def translate_keys(
    keys: Iterable[str], *, parts: int = 1, places: Mapping[str, str] = MappingProxyType({})
) -> str:
    """Return the recipe keys that correspond to ``keys`` of other libraries, or ``""`` if none.

    The answer for several keys has a line per key or note, and a line with the keys that have no
    known counterpart.

    Args:
        keys: Dotted, as written.
        parts: Minimum number of last parts that must match the other library's key. Fewer suffice
            if they are the whole key.
        places: Keys of a recipe by their last part, for keys with the same name here.
    """
    keys = list(keys)
    answers = {key: _answer(key, parts, places) for key in keys}
    if not any(map(any, answers.values())):
        return ""
    if len(keys) == 1:
        ((key, (ours, note)),) = answers.items()
        said = [f"{_say(key, ours)}."] if ours else []
        return " ".join([*said, *([note] if note else []), _PAGE])
    lines = [f"{_say(key, ours)}. {note}".rstrip() for key, (ours, note) in answers.items() if ours]
    by_note = dict[str, list[str]]()
    for key, (ours, note) in answers.items():
        if note and not ours:
            by_note.setdefault(note, []).append(key)
    lines += [f"{_quote(noted)}: {note}" for note, noted in by_note.items()]
    if absent := [key for key, answer in answers.items() if not any(answer)]:
        lines.append(f"No counterpart is known of {_quote(absent)}.")
    return "\n".join([*lines, _PAGE])


def _answer(key: str, parts: int, places: Mapping[str, str]) -> tuple[list[str], str]:
    """Return the recipe keys that correspond to a key, and the note on it. Both may be empty."""
    note = find_note(key)
    last = key.rpartition(".")[2]
    ours = matching_keys(key, parts)
    return ours or ([places[last]] if last in places and not note else []), note


def _quote(keys: Iterable[str]) -> str:
    return ", ".join(f"`{printable(key)}`" for key in keys)


def _say(key: str, ours: list[str]) -> str:
    """Return a sentence on the recipe keys that correspond to an unknown key."""
    if ours == [key]:
        return f"`{key}` belongs to a plug-in that is not installed: reinstall offbeat"
    return f"{_quote([key])} is {' or '.join(f'`{each}`' for each in ours)} here"


def find_note(key: str) -> str:
    """Return the note that matches the most last parts of a dotted key, or ``""``."""
    return NOTES.get(_find_section_note(key) or _noted_tail(key), "")


def _find_section_note(key: str) -> str:
    """Return the name of the note on a section without any counterpart, or ``""``."""
    sections = (place for place in _WITHOUT_COUNTERPART if key.startswith(f"{place}."))
    is_known = any(key == peer for peer, _ in _counterparts())
    return "" if is_known else _WITHOUT_COUNTERPART.get(next(sections, ""), "")


def _noted_tail(key: str) -> str:
    """Return the longest end of a dotted key that has a note, or ``""``."""
    parts = key.split(".")
    tails = (".".join(parts[at:]) for at in range(len(parts)))
    found = next((tail for tail in tails if tail in NOTES), "")
    return "" if found in _GENERIC and found != key else found


def matching_keys(key: str, least: int) -> list[str]:
    """Return the recipe keys whose counterparts share the most last parts with ``key``.

    They share at least ``least`` parts, or all parts of the counterpart. A note that matches more
    parts of the key replaces them. Keys with the same name here are left to the caller, which names
    their section.
    """
    if _find_section_note(key):
        return []
    best, most = dict[str, None](), 1
    for peer, ours in _counterparts():
        if any(each.rpartition(".")[2] == peer for each in ours):
            continue
        count = _count_shared_parts(key, peer, least)
        if count > most:
            best, most = dict.fromkeys(ours), count
        elif count == most:
            best |= dict.fromkeys(ours)
    tail = _noted_tail(key)
    if tail and tail.count(".") + 1 > most:
        return []
    return list(best)


def _counterparts() -> Iterable[tuple[str, tuple[str, ...]]]:
    return (each for keys in PEER_KEYS.values() for each in keys.items())


def _count_shared_parts(one: str, other: str, least: int) -> int:
    """Count the last parts that two dotted keys have in common. Return 0 if they are too few."""
    if one == other:
        return _WHOLE if "." in one else 1  # its sections may be left out
    left, right = one.split("."), other.split(".")
    count = 0
    while count < min(len(left), len(right)) and left[-1 - count] == right[-1 - count]:
        count += 1
    if count == 1 and left[-1] in _GENERIC:
        return 0
    return count if count >= least or count == len(right) else 0


def is_generic(leaf: str) -> bool:
    """Return whether many sections of other libraries have a key with this last part."""
    return leaf in _GENERIC


def name_unknown(key: str, is_known: Callable[[str], bool]) -> str:
    """Return a sentence on a key in a section of another library, or ``""`` for other keys.

    Args:
        key: Dotted. It has no known counterpart.
        is_known: Says whether a recipe has a section.
    """
    places = list(accumulate(key.split(".")[:-1], lambda above, name: f"{above}.{name}"))
    foreign = any(
        not is_known(place) and place.rpartition(".")[2] in _list_sections() for place in places
    )
    return f"No counterpart of {_quote([key])} is known. {_NOT_KNOWN}" if foreign else ""


@cache
def _list_sections() -> frozenset[str]:
    """Return the names of all sections of other libraries."""
    parts = {part for peer, _ in _counterparts() for part in peer.split(".")[:-1]}
    return frozenset(parts.union(_SECTIONS))
