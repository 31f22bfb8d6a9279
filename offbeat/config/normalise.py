"""Normalises a recipe's tree before validation by the models: known keys, text as text."""

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Final, cast

from offbeat.config import schema
from offbeat.config.package_names import expand_names
from offbeat.config.peer_keys import find_note, is_generic, name_unknown, translate_keys
from offbeat.config.presets import PRESETS
from offbeat.config.problems import Problem
from offbeat.config.trainer_parts import common_keys
from offbeat.config.tree import Leaf, Node, Section
from offbeat.doors import Kind, explain_unusable

_CLOSE: Final = 0.75  # 0.6 would match `seed` to deepspeed, and `encoder` to nnodes
_CLOSE_ELSEWHERE: Final = 0.8
_MOST_PLACES: Final = 3


_OF_ALL_LIBRARIES: Final = (
    *("seed", "model.trust_remote_code", "generator.max_model_len", "generator.sampling"),
    *("trainer.activation_checkpointing", "trainer.sequence_parallel"),
    "trainer.optimizer",
)
"""Keys and sections of the core with names that other libraries also use."""

_SHORT_FORMS: Final = {"runtime": "backend"}
"""Sections that may be written as the value of one of their keys, as in ``runtime: local``."""

_LOSS: Final = "algorithm.loss"

_SECTION_KINDS: Final[Mapping[str, Kind]] = {"": "tracker", "environment": "media"}
"""Kind of plug-ins that add sections by name, by the section that contains them."""


def expand_short_forms(layer: Section) -> list[Problem]:
    """Turn a section that is written as one value into a section with that key.

    A loss with a target and without a name becomes the custom loss. A name from a package becomes
    the target of its entry point. Return problems for names that several packages have.
    """
    for section, key in _SHORT_FORMS.items():
        node = layer.children.get(section)
        if isinstance(node, Leaf) and node.text is not None:
            layer.children[section] = Section({key: node}, node.location)
    loss = layer.find(_LOSS)
    if isinstance(loss, Section) and "target" in loss.children and "name" not in loss.children:
        loss.children["name"] = Leaf("custom", "custom", loss.children["target"].location)
    return expand_names(layer)


def normalise(root: Section) -> list[Problem]:
    """Remove from ``root`` everything that no model has, and report it.

    Afterwards every key is known and no section is empty. A section of several kinds names its
    kind. Text fields hold the text as written: ``name: 007`` is not the number 7 and ``name: no``
    is not false. Booleans are not numbers.
    """
    problems = list[Problem]()
    _section(root, "", problems, root)
    return problems


def _section(section: Section, prefix: str, problems: list[Problem], root: Section) -> None:
    place = prefix.removesuffix(".")
    preset: Mapping[str, Any] = _of_preset(root) if place == _LOSS else {}
    _choose_by_default(section, place, preset)
    valid = _valid_names(section, place)
    of_package = valid - {key.leaf for key in schema.children(place)}
    if absent := sorted(preset.keys() - valid):
        problems.append(_against_preset(section, absent[0], root))
        _leave_to_preset(section, str(preset["name"]), valid)
        _choose_by_default(section, place, preset)
        valid = _valid_names(section, place)
    for name, given in list(section.children.items()):
        key = f"{prefix}{name}"
        known = schema.known(key)
        node = _make_list(given) if known is not None and known.is_list else given
        if known is None and name in of_package:
            continue  # its model validates it
        if known is not None and known.sections and node.plain() is None:
            del section.children[name]  # an absent section, even if another choice has it
        elif known is None or name not in valid:
            problems.append(_unknown(key, node, section, valid, is_dotted="." in name))
            del section.children[name]
        elif (problem := _misfit(known, key, node)) is not None:
            problems.append(problem)
            del section.children[name]
        elif isinstance(node, Leaf):
            section.children[name] = _as_written(node) if known.is_text else node
        elif known.sections or known.holds_sections:
            _section(node, f"{key}.", problems, root)
        elif known.holds_text:
            texts = {
                child: _as_written(leaf) if isinstance(leaf, Leaf) else leaf
                for child, leaf in node.children.items()
            }
            section.children[name] = Section(texts, node.location)


def _misfit(key: schema.Key, place: str, node: Node) -> Problem | None:
    """Return the problem of a value instead of a section, or a boolean instead of a number."""
    if isinstance(node, Section):
        return None
    if key.sections:
        hint = _as_section(key, node)
        return Problem(node.location, place, node.value, "has to be a section", hint)
    if _holds_bool(node.value) and not key.takes_bool and not key.is_text:
        return Problem(node.location, place, node.value, f"has to be: {key.kind}", value_hint(key))
    return None


def _make_list(node: Node) -> Node:
    """Return a list of one item for a single text, as written."""
    if isinstance(node, Leaf) and node.text is not None:
        return Leaf([node.text], None, node.location)
    return node


def _as_written(leaf: Leaf) -> Leaf:
    return leaf if leaf.text is None else replace(leaf, value=leaf.text)


def value_hint(key: schema.Key, suggestion: str = "") -> str:
    """Return a hint for a key: its default and its meaning."""
    default = "" if key.required else f"Default: {key.default}."
    return " ".join(part for part in (suggestion, default, key.doc) if part)


def _as_section(key: schema.Key, leaf: Leaf) -> str:
    if key.chosen_by:
        written = f"{key.key}: {{{key.chosen_by}: {leaf.value}}}"
        return f"Choose one by {key.key}.{key.chosen_by}, as in {written}."
    for other in schema.children(key.key):
        if str(leaf.value) in other.names:
            return f"Write {key.key}: {{{other.leaf}: {leaf.value}}}, or {other.key}={leaf.value}."
    below = [
        other.leaf for other in schema.known_keys().values() if other.key.startswith(f"{key.key}.")
    ]
    return f"It holds: {', '.join(dict.fromkeys(below))}."


def _holds_bool(value: object) -> bool:
    if isinstance(value, list):
        return any(map(_holds_bool, cast("list[object]", value)))
    return isinstance(value, bool)


def _of_preset(root: Section) -> Mapping[str, Any]:
    """Return the keys that the recipe's preset sets in the loss, or none without a preset."""
    return PRESETS.get(root.text("algorithm.preset") or "", {}).get("loss", {})


def _against_preset(section: Section, absent: str, root: Section) -> Problem:
    """Report a loss that lacks a key that the preset sets."""
    chosen, preset = section.children["name"], cast("Leaf", root.find("algorithm.preset"))
    message = (
        f"{_LOSS}.name={chosen.plain()} has no `{absent}`, which "
        f"algorithm.preset={preset.value} sets"
    )
    hint = f"Leave out {_LOSS}.name or algorithm.preset."
    return Problem(chosen.location, f"{_LOSS}.name", chosen.plain(), message, hint)


def _leave_to_preset(section: Section, name: str, valid: Iterable[str]) -> None:
    """Remove the choice of another loss, and the keys that only that loss has."""
    of_preset = schema.choices(_LOSS)[name].model_fields
    for key in ("name", *(set(valid) - of_preset.keys())):
        section.children.pop(key, None)


def _choose_by_default(section: Section, place: str, preset: Mapping[str, Any]) -> None:
    """Set the preset's or the default choice if the section makes none.

    ``sampler.max_staleness=4`` by itself sets the default sampler's value.
    """
    known = schema.known(place)
    if known is not None and known.chosen_by and known.chosen_by not in section.children:
        name = str(preset.get(known.chosen_by, known.default_choice))
        section.children[known.chosen_by] = Leaf(name, name, section.location)


def _valid_names(section: Section, place: str) -> set[str]:
    known = schema.known(place)
    name = section.text(known.chosen_by) if known is not None else None
    if (model := schema.find_choice(place, name or "")) is not None:
        return set(model.model_fields)
    is_of_nobody = place == "generator" and name is not None  # its keys are unknown, too
    if known is not None and (known.holds_sections or is_of_nobody):
        return set(section.children)
    return {key.leaf for key in schema.children(known.key if known else place)}


# --- unknown keys --------------------------------------------------------------------------------


def _unknown(
    key: str, node: Node, section: Section, valid: Iterable[str], *, is_dotted: bool = False
) -> Problem:
    known = schema.known(key)
    if known is not None and is_dotted:
        *around, last = key.split(".")
        nested = "".join(f"{each}: {{" for each in around) + f"{last}: ...{'}' * len(around)}"
        hint = f"Nest it, as in {nested}. Only overrides, as in {key}=..., have dots."
        return Problem(node.location, key, node.plain(), "a key of a recipe has no dots", hint)
    if known is not None:  # of another variant
        chooser = schema.chooser(key.rpartition(".")[0])
        chosen = section.children[chooser.rpartition(".")[2]]
        name = chosen.value if isinstance(chosen, Leaf) else ""
        message = f"unknown key: {chooser}={name} has no `{known.leaf}`"
        other = " or ".join(known.variants)
        hint = f"Only {chooser}={other} has it: remove it, or set {chooser} to {other}."
        return Problem(node.location, key, node.plain(), message, hint)
    hint = ""
    if isinstance(node, Section):  # a section of another library, with known keys
        below = (name for name, _ in node.locations(f"{key}."))
        is_misspelt = difflib.get_close_matches(key.rpartition(".")[2], valid, cutoff=_CLOSE)
        hint = translate_keys(below, parts=2, places={} if is_misspelt else _places())
    hint = hint or _explain_absent(key) or meant(key, valid)
    return Problem(node.location, key, node.plain(), "unknown key", hint)


def _explain_absent(key: str) -> str:
    """Return why the plug-in that adds a section cannot be used, or "" if no plug-in adds it."""
    place, _, name = key.rpartition(".")
    kind = _SECTION_KINDS.get(place.rpartition(".")[2])
    return "" if kind is None else explain_unusable(kind, name)


def _places() -> dict[str, str]:
    """Return keys of a recipe by their last part, if other libraries use the same names."""
    places = dict[str, str]()
    for name in (*_OF_ALL_LIBRARIES, *common_keys()):
        below = [key.key for key in schema.children(name)]
        places |= {key.rpartition(".")[2]: key for key in below or [name]}
    return places


def meant(key: str, valid: Iterable[str]) -> str:
    """Return the suggestion for an unknown ``key``; ``valid`` are the names in its section.

    If the section is unknown too, ``valid`` is empty and the suggestion is for the section.
    """
    place, _, leaf = key.rpartition(".")
    valid = sorted(valid)
    is_known = any(known.leaf == leaf for known in schema.known_keys().values())
    near = difflib.get_close_matches(leaf, valid, n=1, cutoff=_CLOSE_ELSEWHERE)
    is_misspelt = place and near and not find_note(key)
    hint = "" if is_misspelt else translate_keys([key], parts=2 if is_known else 1)
    return hint or _nearest(key, valid)


def _nearest(key: str, valid: list[str]) -> str:
    """Return the place of this key, or the nearest key, else the names of its section."""
    place, _, leaf = key.rpartition(".")
    by_leaf = dict[str, list[schema.Key]]()
    for known in schema.known_keys().values():
        by_leaf.setdefault(known.leaf, []).append(known)
    says_place = not is_generic(leaf) or not place or schema.known(place) is not None
    if leaf in by_leaf and says_place:
        return _belongs(leaf, by_leaf[leaf])
    if hint := name_unknown(key, lambda section: schema.known(section) is not None):
        return hint
    if near := difflib.get_close_matches(leaf, valid, n=1, cutoff=_CLOSE):
        known = schema.known(f"{place}.{near[0]}" if place else near[0])  # None: key of a package
        return f"Did you mean `{near[0]}`?{f' ({known.summary})' if known is not None else ''}"
    near = difflib.get_close_matches(leaf, by_leaf, n=1, cutoff=_CLOSE_ELSEWHERE)
    if near and says_place and not (place and is_generic(near[0])):
        return f"Did you mean `{near[0]}`? {_belongs(near[0], by_leaf[near[0]])}"
    if not valid:
        return _refuse_section(place)
    where = f"`{place}`" if place else "The top level"
    return f"{where} has: {', '.join(valid)}."


def _refuse_section(place: str) -> str:
    """Return a hint on a section that no recipe has."""
    if schema.known(place) is not None:
        return f"`{place}` is not a section."
    above = place.rpartition(".")[0]
    return meant(place, [known.leaf for known in schema.children(above)])


def _belongs(leaf: str, found: list[schema.Key]) -> str:
    places = [
        f"`{key.key.rpartition('.')[0]}`" if "." in key.key else "the top level" for key in found
    ]
    where = " or ".join(places[:_MOST_PLACES])
    summary = f" ({found[0].summary})" if len(found) == 1 else ""
    return f"`{leaf}` belongs in {where}{summary}."
