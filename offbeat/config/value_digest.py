"""Digest of a Python object by its behaviour: code, defaults, closure and the globals it names."""

import dis
import enum
import functools
import hashlib
import re
import site
import sys
import sysconfig
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from importlib.machinery import PathFinder
from pathlib import Path, PurePath
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodDescriptorType,
    MethodType,
    ModuleType,
    WrapperDescriptorType,
)
from typing import Any, Final, NamedTuple

import numpy as np

_PLAIN: Final = (type(None), bool, int, float, complex, str, bytes, type(Ellipsis), range)
_NO_CONTENT: Final = frozenset(
    {
        "__dict__",
        "__weakref__",
        "__module__",
        "__firstlineno__",
        "__static_attributes__",
        "_abc_impl",
    }
)
"""Attributes of a class that do not affect its behaviour."""

_LOOKS_UP: Final = {"LOAD_GLOBAL", "LOAD_NAME"}
_IMPORTS: Final = {"IMPORT_NAME"}
_BUILT_IN: Final = (
    BuiltinFunctionType,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodDescriptorType,
    WrapperDescriptorType,
)


class ValueDigest(NamedTuple):
    """Digest of a value, and the names of parts that it does not cover."""

    digest: str  # SHA-256, hexadecimal
    unverifiable: tuple[str, ...]  # such as "client (openai.OpenAI)"


def digest_value(value: object) -> ValueDigest:
    """Return the digest of a function, a class or another object.

    The user's functions and classes, and the ones that they name, are digested by their byte code.
    Installed packages are digested by name. Byte code differs between minor versions of Python. An
    object without plain values, such as an open connection, is listed as unverifiable.
    """
    walk = _Walk()
    name = getattr(value, "__name__", type(value).__name__)
    parts = [f"{sys.version_info.major}.{sys.version_info.minor}", walk.of(value, name)]
    return ValueDigest(_hash(parts), tuple(dict.fromkeys(walk.unverifiable)))


def is_installed(module: ModuleType) -> bool:
    """Return whether a module belongs to an installed package or to Python, not to the user."""
    file = getattr(module, "__file__", None)
    if module.__name__ == "__main__":  # also for python -m PACKAGE: user code
        return False
    return file is None or _is_in_package(file)


def _is_in_package(file: str) -> bool:
    return any(Path(file).is_relative_to(folder) for folder in _find_installed_folders())


@functools.cache
def _find_installed_folders() -> tuple[str, ...]:
    own = str(Path(__file__).parents[1])
    folders = {own, *sysconfig.get_paths().values(), *site.getsitepackages()}
    return tuple(sorted(folders - {sysconfig.get_path("scripts"), sysconfig.get_path("data")}))


def _hash(parts: Iterable[str]) -> str:
    whole = hashlib.sha256()
    for part in parts:
        encoded = part.encode(errors="surrogatepass")
        whole.update(len(encoded).to_bytes(8, "big") + encoded)
    return whole.hexdigest()


class _Walk:
    """Walks over a value and everything that it names."""

    def __init__(self) -> None:
        self.unverifiable = list[str]()
        self._above = list[int]()  # identities of the objects that enclose the present one
        self._digests: dict[int, str] = {}  # by identity
        self._kept = list[object]()  # keeps objects alive, so that no identity is used twice

    def of(self, value: Any, name: str) -> str:  # noqa: ANN401 -- any object
        if isinstance(value, _PLAIN):
            return f"{type(value).__name__}:{value!r}"
        if (identity := id(value)) in self._above:
            return f"around it:{self._above.index(identity)}"
        if identity not in self._digests:
            self._above.append(identity)
            kind, parts = next((each for each in _PARTS if isinstance(value, each[0])), _OTHER)
            self._digests[identity] = _hash([kind.__name__, *parts(self, value, name)])
            self._kept.append(value)
            self._above.pop()
        return self._digests[identity]

    def item_parts(self, value: Iterable[Any], name: str) -> Iterator[str]:
        for each in value:
            yield self.of(each, name)

    def sort_parts(self, value: Iterable[Any], name: str) -> Iterator[str]:
        yield from sorted(self.of(each, name) for each in value)

    def mapping_parts(self, value: Mapping[Any, Any], name: str) -> Iterator[str]:
        for key, each in value.items():
            yield self.of(key, name)
            yield self.of(each, f"{name}.{key}")

    def code_parts(self, value: CodeType, name: str) -> Iterator[str]:
        counts = value.co_argcount, value.co_posonlyargcount, value.co_kwonlyargcount
        yield f"{counts} {value.co_flags} {value.co_names} {value.co_varnames} {value.co_freevars}"
        yield value.co_code.hex() + value.co_exceptiontable.hex()
        yield self.of(value.co_consts, name)

    def function_parts(self, value: FunctionType, name: str) -> Iterator[str]:
        if _is_of_package(value):
            yield _format_path(value)
            return
        yield self.of(value.__code__, name)
        yield self.of((value.__defaults__, value.__kwdefaults__), f"default of {name}")
        for free, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            try:
                content = cell.cell_contents
            except ValueError:  # the function is recursive and still being defined
                continue
            yield self.of(content, free)
        for used in sorted(_find_lookups(value.__code__, _LOOKS_UP) & value.__globals__.keys()):
            yield used + self.of(value.__globals__[used], used)
        for name_of_module in sorted(_find_lookups(value.__code__, _IMPORTS)):
            yield from _module_source(name_of_module)

    def method_parts(self, value: MethodType, name: str) -> Iterator[str]:
        yield from self.item_parts((value.__func__, value.__self__), name)

    def partial_parts(self, value: "functools.partial[Any]", name: str) -> Iterator[str]:
        yield from self.item_parts((value.func, value.args, value.keywords), name)

    def class_parts(self, value: type, name: str) -> Iterator[str]:
        if _is_of_package(value):
            yield _format_path(value)
            return
        yield value.__qualname__
        yield from self.item_parts(value.__bases__, name)
        for attribute, each in sorted(vars(value).items()):
            if attribute not in _NO_CONTENT:
                yield attribute + self.of(_function_in(each), f"{name}.{attribute}")

    def module_parts(self, value: ModuleType, name: str) -> Iterator[str]:
        del name
        yield value.__name__
        file = getattr(value, "__file__", None)
        if file is not None and not is_installed(value):
            yield hashlib.sha256(Path(file).read_bytes()).hexdigest()

    def array_parts(self, value: "np.ndarray[Any, Any]", name: str) -> Iterator[str]:
        if value.dtype.hasobject:
            yield from self.item_parts(value.ravel().tolist(), name)
            return
        yield f"{value.dtype} {value.shape} {hashlib.sha256(value.tobytes()).hexdigest()}"

    def other_parts(self, value: object, name: str) -> Iterator[str]:
        """Digest the parts that a pickle of an object would hold; other parts are unverifiable."""
        try:
            reduced = value.__reduce_ex__(4)
        except Exception:  # noqa: BLE001 -- of any class: it is named, not handled
            self.unverifiable.append(f"{name} ({_format_path(type(value))})")
            return
        if isinstance(reduced, str):
            yield reduced
            return
        for each in reduced:
            yield self.of([*each] if isinstance(each, Iterator) else each, name)


_Parts = Callable[[_Walk, Any, str], Iterator[str]]
_PARTS: Final[tuple[tuple[type, _Parts], ...]] = (
    (enum.Enum, lambda _, value, __: iter([_format_path(type(value)), value.name])),
    (PurePath, lambda _, value, __: iter([str(value)])),
    (re.Pattern, lambda _, value, __: iter([repr(value.pattern), str(value.flags)])),
    (np.ndarray, _Walk.array_parts),
    (np.generic, lambda _, value, __: iter([repr(value)])),
    (CodeType, _Walk.code_parts),
    (FunctionType, _Walk.function_parts),
    *((kind, lambda _, value, __: iter([_format_path(value)])) for kind in _BUILT_IN),
    (MethodType, _Walk.method_parts),
    (functools.partial, _Walk.partial_parts),
    (type, _Walk.class_parts),
    (ModuleType, _Walk.module_parts),
    (Mapping, _Walk.mapping_parts),
    (set, _Walk.sort_parts),
    (frozenset, _Walk.sort_parts),
    (list, _Walk.item_parts),
    (tuple, _Walk.item_parts),
)
"""How to digest a value, by class; the first match is used."""

_OTHER: Final[tuple[type, _Parts]] = (object, _Walk.other_parts)


def _find_lookups(code: CodeType, by: Container[str]) -> set[str]:
    """Return the names that instructions of a code object, and of the code in it, look up."""
    own = {each.argval for each in dis.get_instructions(code) if each.opname in by}
    inner = (each for each in code.co_consts if isinstance(each, CodeType))
    return own.union(*(_find_lookups(each, by) for each in inner))


def _module_source(name: str) -> Iterator[str]:
    """Yield the digest of a user module that a function imports itself."""
    found = PathFinder.find_spec(name.partition(".")[0], sys.path)
    file = None if found is None else found.origin
    if file is not None and file.endswith(".py") and not _is_in_package(file):
        yield name + hashlib.sha256(Path(file).read_bytes()).hexdigest()


def _function_in(attribute: Any) -> Any:  # noqa: ANN401 -- an attribute of a class
    """Return the functions of a descriptor, or the attribute itself."""
    if isinstance(attribute, property):
        return attribute.fget, attribute.fset, attribute.fdel
    return getattr(attribute, "__func__", attribute)


def _format_path(value: Any) -> str:  # noqa: ANN401 -- a function or a class
    return f"{getattr(value, '__module__', '')}:{getattr(value, '__qualname__', '')}"


def _is_of_package(value: Any) -> bool:  # noqa: ANN401 -- as above
    module = sys.modules.get(getattr(value, "__module__", None) or "")
    return module is not None and is_installed(module)
