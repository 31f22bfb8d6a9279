"""Options of environments of the library verifiers. The library is not imported here."""

from typing import Annotated, Any

import msgspec


class VerifiersOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``environment.options`` of ``environment.name: verifiers``."""

    env: dict[str, Any]
    """The environment in verifiers' configuration format, its section ``[env]``: ``taskset`` with
    an ``id``, and below the name of its role, ``agent``, the harness and its limits.
    """

    tasks: Annotated[int, msgspec.Meta(ge=1)] | None = None
    """Tasks in an epoch, the first ones of the taskset. null: all. An endless taskset needs it."""

    @property
    def taskset(self) -> str:
        """Return the id of the taskset, or "" if none is named."""
        taskset: object = self.env.get("taskset")
        return str(taskset.get("id", "")) if isinstance(taskset, dict) else ""  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]
