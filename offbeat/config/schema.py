"""Lists every key of a recipe with its type, range, default and docstring.

Read once from the models, so that messages, ``config explain`` and documentation agree with
validation.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain
from types import NoneType, UnionType
from typing import Annotated, Any, Final, Literal, Union, cast, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from offbeat.config.base import Config, InWords, OneIsAList, RelativeToRecipe
from offbeat.config.generator_kinds import find_generator_section
from offbeat.config.problems import shorten
from offbeat.config.run import RunConfig

_WORDS: Final = {
    str: "text",
    int: "integer",
    float: "number",
    bool: "true or false",
    dict: "mapping",
}
_REQUIRED: Final = "required"

_NAMED: Final = "of letters, digits, dashes and underscores, a letter or digit first"

NAME: Final = "NAME"
"""Placeholder in a dotted key for a name that the recipe chooses: ``eval.sets.NAME.path``."""


@dataclass(frozen=True, slots=True)
class Key:
    """One key of a recipe. ``sections`` are the models below it: several if a key selects one."""

    key: str  # dotted
    kind: str  # type and range in words: "integer, at least 0"
    default: str  # as a recipe would write it, or "required"
    doc: str
    sections: tuple[type[Config], ...]
    variants: tuple[str, ...]  # the choices it belongs to; empty: all
    is_text: bool  # accepts only text, free or from a list, or null
    is_path: bool
    is_list: bool = False  # accepts one text as a list of one
    takes_bool: bool = False
    names: tuple[str, ...] = ()  # the values it accepts besides null, if they are named
    holds_text: bool = False  # accepts a mapping of text
    chosen_by: str = ""  # key below that selects a section, such as "backend"
    default_choice: str = ""
    holds_sections: bool = False  # accepts sections by names that the recipe chooses

    @property
    def leaf(self) -> str:
        return self.key.rpartition(".")[2]

    @property
    def required(self) -> bool:
        return self.default == _REQUIRED

    @property
    def summary(self) -> str:
        """Return type, range and default, as in ``integer, at least 0; default 1``."""
        return (
            f"{self.kind}; {self.default}"
            if self.required
            else f"{self.kind}; default {self.default}"
        )


@cache
def known_keys() -> dict[str, Key]:
    """Return every key, sections included, in the order of the models."""
    found = dict[str, list[Key]]()
    for key in _walk(RunConfig, "", ()):
        found.setdefault(key.key, []).append(key)
    known = dict[str, Key]()
    for name, variants in found.items():
        section = known.get(name.rpartition(".")[0])
        known[name] = _combine(variants, section)
    return known


def list_keys(section: type[Config], prefix: str) -> list[Key]:
    """Return the keys of a section outside of the models, with ``prefix`` before each."""
    return list(_walk(section, prefix, ()))


def known(key: str) -> Key | None:
    """Return a key by its place in a recipe, even below a name that the recipe chose."""
    found, declared = known_keys().get(key), ""
    if found is not None:
        return found
    for part in key.split("."):
        above = known_keys().get(declared)
        part_declared = NAME if above is not None and above.holds_sections else part
        declared = f"{declared}.{part_declared}" if declared else part_declared
    return known_keys().get(declared)


def children(section: str) -> list[Key]:
    """Return the keys directly below a dotted section; ``""`` is the top level.

    Empty for a key that is not a section.
    """
    return [key for key in known_keys().values() if key.key.rpartition(".")[0] == section]


def choices(key: str) -> dict[str, type[Config]]:
    """Return the models of a section that one of its keys selects; empty for any other key."""
    found = known(key)
    if found is None or not found.chosen_by:
        return {}
    return {_choice(section, found.chosen_by): section for section in found.sections}


def find_choice(key: str, name: str) -> type[Config] | None:
    """Return the model of a section that a name selects, even one from another package."""
    if name in (found := choices(key)):
        return found[name]
    return find_generator_section(name) if key == "generator" and name else None


def chooser(section: str) -> str:
    """Return the dotted key that selects the model of a section; empty if it has one model."""
    found = known(section)
    return f"{section}.{found.chosen_by}" if found is not None and found.chosen_by else ""


def only_with(key: Key) -> str:
    """Return the settings that a key needs to exist: ``sampler.name=in_order or windowed``.

    Empty for a key that its section always has.
    """
    section = key.key.rpartition(".")[0]
    if section not in known_keys():  # top level, or a plug-in of another package
        return ""
    if not key.variants or len(key.variants) == len(choices(section)):
        return only_with(known_keys()[section])
    return f"{chooser(section)}={' or '.join(key.variants)}"


def read_doc(section: type[Config]) -> str:
    """Return the docstring of a section on one line."""
    return _in_markdown(section.__doc__)


def _in_markdown(doc: str | None) -> str:
    return " ".join((doc or "").replace("``", "`").split())


def _walk(
    section: type[BaseModel], prefix: str, variants: tuple[str, ...], chooser: str = ""
) -> Iterator[Key]:
    """Yield the keys of a section; the key that selects it is the first."""
    for name, field in sorted(section.model_fields.items(), key=lambda item: item[0] != chooser):
        below, chosen_by = _sections(field.annotation), str(field.discriminator or "")
        marks = [*field.metadata, *chain(*(marks for _, marks in _parts(field.annotation)))]
        yield Key(
            key=f"{prefix}{name}",
            kind=_kind(field.annotation, field.metadata),
            default=_default(field),
            doc=_in_markdown(field.description),
            sections=below,
            variants=variants,
            is_text=all(map(_is_text, _types(field.annotation))),
            is_path=any(isinstance(mark, RelativeToRecipe) for mark in marks),
            is_list=any(isinstance(mark, OneIsAList) for mark in marks),
            takes_bool=bool in _types(field.annotation),
            names=_names(field.annotation),
            holds_text=field.annotation == dict[str, str],
            chosen_by=chosen_by,
            default_choice=str(getattr(field.default, chosen_by)) if chosen_by else "",
            holds_sections=(named := _find_named_section(field.annotation)) is not None,
        )
        if named is not None:
            yield from _walk_named(named, f"{prefix}{name}.{NAME}")
        for model in below:
            of = (_choice(model, chosen_by),) if chosen_by else ()
            yield from _walk(model, f"{prefix}{name}.", of, chosen_by)


def _walk_named(model: type[Config], key: str) -> Iterator[Key]:
    kind, doc = f"section, {NAME} {_NAMED}", read_doc(model)
    yield Key(key, kind, "{}", doc, (model,), (), is_text=False, is_path=False)
    yield from _walk(model, f"{key}.", ())


def _find_named_section(annotation: Any) -> type[Config] | None:  # noqa: ANN401
    """Return the model of a mapping from names to sections, or None for any other field."""
    if get_origin(annotation) is not dict:
        return None
    (model,) = _sections(get_args(annotation)[1]) or (None,)
    return model


def _combine(keys: list[Key], section: Key | None) -> Key:
    """Combine the same key of several variants into one key; list all values that differ."""
    first = keys[0]
    if section is None or not first.variants:
        return first
    names = tuple(dict.fromkeys(name for key in keys for name in key.names))
    if first.leaf == section.chosen_by:
        kind = f"one of {', '.join(names)}"
        default = section.default_choice
    else:
        kind = " or ".join(dict.fromkeys(key.kind for key in keys))
        default = _defaults(keys)
    variants = tuple(name for key in keys for name in key.variants)
    return replace(
        first,
        kind=kind,
        default=default,
        variants=variants,
        names=names if all(key.names for key in keys) else (),
        takes_bool=any(key.takes_bool for key in keys),
    )


def _defaults(keys: list[Key]) -> str:
    """Return ``0 (in_order), 1 (ready_first, windowed)``, or only the value if all agree."""
    names = dict[str, list[str]]()
    for key in keys:
        names.setdefault(key.default, []).extend(key.variants)
    if len(names) == 1:
        return keys[0].default
    return ", ".join(f"{default} ({', '.join(who)})" for default, who in names.items())


def _choice(section: type[BaseModel], chosen_by: str) -> str:
    names: tuple[Any, ...] = get_args(section.model_fields[chosen_by].annotation)
    return str(names[0])


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return _REQUIRED
    value = field.get_default(call_default_factory=True)
    match value:
        case BaseModel():
            return "what its keys say"
        case tuple():
            return shorten(list(cast("tuple[Any, ...]", value)))
        case str():
            return value or '""'
        case _:
            return shorten(value)


def _parts(annotation: Any, marks: tuple[Any, ...] = ()) -> Iterator[tuple[Any, tuple[Any, ...]]]:  # noqa: ANN401 - any annotation
    """Yield the types that a field accepts, null included, each with the marks around it."""
    parts: tuple[Any, ...] = get_args(annotation)
    if get_origin(annotation) is Annotated:
        inner, *own = parts
        fields = [mark.metadata if isinstance(mark, FieldInfo) else [mark] for mark in own]
        yield from _parts(inner, (*marks, *chain.from_iterable(fields)))
    elif get_origin(annotation) in (Union, UnionType):
        for part in parts:
            yield from _parts(part, marks)
    else:
        yield annotation, marks


def _types(annotation: Any) -> list[Any]:  # noqa: ANN401
    """Return the types that a field accepts besides null."""
    return [part for part, _ in _parts(annotation) if part is not NoneType]


def _sections(annotation: Any) -> tuple[type[Config], ...]:  # noqa: ANN401
    return tuple(
        part for part in _types(annotation) if isinstance(part, type) and issubclass(part, Config)
    )


def _is_text(part: Any) -> bool:  # noqa: ANN401
    return part is str or all(isinstance(name, str) for name in _literals(part) or (None,))


def _literals(part: Any) -> tuple[Any, ...]:  # noqa: ANN401
    """Return the values of a ``Literal``; empty for any other type."""
    return get_args(part) if get_origin(part) is Literal else ()


def _names(annotation: Any) -> tuple[str, ...]:  # noqa: ANN401
    """Return the values of a ``Literal``, ignoring null; empty if the field accepts others."""
    named = [_literals(part) for part in _types(annotation)]
    return tuple(map(str, chain.from_iterable(named))) if all(named) else ()


def _kind(annotation: Any, metadata: Iterable[Any] = ()) -> str:  # noqa: ANN401
    if sections := _sections(annotation):
        return "section" if len(sections) == 1 else "section, one of several"
    parts = dict(_parts(annotation, tuple(metadata)))
    words = [_word(part, marks) for part, marks in parts.items() if part is not NoneType]
    return " or ".join([*words, *(["null"] if NoneType in parts else [])])


def _word(part: Any, marks: tuple[Any, ...]) -> str:  # noqa: ANN401
    if names := _literals(part):
        listed = ", ".join(map(str, names))
        return f"one of {listed}" if len(names) > 1 else listed
    origin, inside = get_origin(part), get_args(part)
    if origin is tuple:
        count = "" if Ellipsis in inside else f"{len(inside)} "
        return f"list of {count}values, each: {_kind(inside[0])}"
    if _find_named_section(part) is not None:
        return f"sections by name; a name consists {_NAMED}"
    return ", ".join([_WORDS.get(origin or part, "any value"), *_bounds(marks)])


def _bounds(marks: Iterable[Any]) -> Iterator[str]:
    for mark in marks:
        match mark:
            case Ge(ge=bound):
                yield f"at least {bound}"
            case Gt(gt=bound):
                yield f"above {bound}"
            case Le(le=bound):
                yield f"at most {bound}"
            case Lt(lt=bound):
                yield f"below {bound}"
            case InWords(text=text):
                yield text
            case _:
                pass
