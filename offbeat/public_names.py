"""Public names of a package that are imported at their first use."""

from collections.abc import Callable, Mapping
from typing import Any


def import_on_use(
    package: str, module_by_name: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return a package's ``__getattr__`` and ``__dir__``. Its ``__init__.pyi`` has the types."""

    def get(name: str) -> Any:  # noqa: ANN401 -- the stub has the types
        if name not in module_by_name:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        from offbeat.doors import import_object  # noqa: PLC0415 -- on use: 40 ms

        return import_object(f"{module_by_name[name]}:{name}")

    return get, lambda: sorted(module_by_name)
