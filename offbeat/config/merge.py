"""Laying one recipe over another, and overrides over both."""

from typing import Final

from offbeat.config import schema
from offbeat.config.tree import Leaf, Node, Section

OPTIONS_BELONG_TO: Final = {"environment": ("options", ("name", "target"))}
"""Free-form options belong to what these keys name: another name does not inherit them."""

REFUSED_BY: Final = {"trainer.lora": ("megatron",)}
"""Keys that stay where another choice lacks them, unless null, so that the choice is refused by name.

Without them, the whole model would be trained, where the recipe says that adapters are.
"""

SHORTHAND: Final = {"algorithm": "preset"}
"""Sections that a name fills in: another name starts the section afresh."""


def lay_over(base: Section, top: Section) -> list[str]:
    """Change ``base`` by ``top``: mappings key by key, everything else as a whole.

    Where ``top`` chooses another variant (``sampler.name``, ``trainer.backend``), the keys of ``base`` that the
    new variant does not have are dropped, except where ``REFUSED_BY`` names the variant; so are the options of
    another environment. Where it names another preset, all that ``base`` says of the section is dropped.

    Returns:
        The dotted keys dropped, each with its place.
    """
    dropped = list[str]()
    _lay(base, top, "", dropped)
    return dropped


def join(base: Section, top: Section) -> None:
    """Change ``base`` by ``top``, which is about the same choices: nothing is dropped."""
    for name, node in top.children.items():
        below = base.children.get(name)
        if isinstance(below, Section) and isinstance(node, Section):
            join(below, node)
        else:
            base.children[name] = node


def _lay(base: Section, top: Section, prefix: str, dropped: list[str]) -> None:
    section = prefix.removesuffix(".")
    _forget_other_choice(base, top, section, dropped)
    _forget_other_options(base, top, section, dropped)
    _forget_other_preset(base, top, section, dropped)
    for name, node in top.children.items():
        below = base.children.get(name)
        if isinstance(below, Section) and isinstance(node, Section):
            _lay(below, node, f"{prefix}{name}.", dropped)
            below.location = node.location
        else:
            base.children[name] = node


def _forget_other_choice(base: Section, top: Section, section: str, dropped: list[str]) -> None:
    choices, key = schema.choices(section), schema.chooser(section).rpartition(".")[2]
    chosen = _text(top, key)
    if not choices or chosen is None or chosen not in choices or chosen == _text(base, key):
        return
    valid = choices[chosen].model_fields
    gone = [
        name
        for name, node in base.children.items()
        if name not in valid
        and _known(section, name)
        and not (_is_set(node) and chosen in REFUSED_BY.get(f"{section}.{name}", ()))
    ]
    _drop(base, gone, section, dropped)


def _is_set(node: Node) -> bool:
    """Return whether ``node`` is more than null."""
    return isinstance(node, Section) or node.value is not None


def _known(section: str, name: str) -> bool:
    """A misspelt key stays, to be reported."""
    return schema.known(f"{section}.{name}") is not None


def _forget_other_options(base: Section, top: Section, section: str, dropped: list[str]) -> None:
    options, owners = OPTIONS_BELONG_TO.get(section, ("", ()))
    changed = any(
        owner in top.children and _text(top, owner) != _text(base, owner) for owner in owners
    )
    if changed and options in base.children:
        _drop(base, [options], section, dropped)


def _forget_other_preset(base: Section, top: Section, section: str, dropped: list[str]) -> None:
    """Keys below would win over the preset: a resolved configuration has them all."""
    key = SHORTHAND.get(section, "")
    if key in top.children and _text(top, key) != _text(base, key):
        gone = [name for name in base.children if name != key]
        _drop(base, gone, section, dropped)


def _drop(base: Section, names: list[str], section: str, dropped: list[str]) -> None:
    for name in names:
        dropped.append(f"{section}.{name} ({base.children[name].location})")
        del base.children[name]


def _text(section: Section, name: str) -> str | None:
    node: Node | None = section.children.get(name)
    return node.text if isinstance(node, Leaf) else None
