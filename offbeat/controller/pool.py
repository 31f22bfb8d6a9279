"""Engines that may be given work, by how much they have. Pure: no I/O, no clock, no asyncio."""

from collections import OrderedDict
from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar


class EngineLoad(Protocol):
    """The properties of an engine that a pool reads."""

    @property
    def name(self) -> str: ...
    @property
    def version(self) -> int: ...
    @property
    def outstanding(self) -> int: ...


M = TypeVar("M", bound=EngineLoad)


class EnginePool(Generic[M]):
    """Orders engines by load, and those of one load by the time they came to it.

    So equals take turns. A member is removed before its version changes and added again after;
    ``reorder`` is called after its load has changed. Each of that, and ``idlest``, costs the same
    with three members as with ten thousand.
    """

    def __init__(self) -> None:
        # An OrderedDict, since the first key of a dict is found by passing all that were deleted.
        self._by_load: dict[int, OrderedDict[str, M]] = {}
        self._versions: dict[int, int] = {}  # members by version; a few versions, no zeros
        self._least = 0  # load of the idlest, while there is one
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[M]:
        """Yield the members, the idlest first."""
        for load in sorted(self._by_load):
            yield from self._by_load[load].values()

    @property
    def idlest(self) -> M | None:
        """Return the member with the least outstanding groups, of equals the one that came first."""
        return next(iter(self._by_load[self._least].values())) if self._size else None

    @property
    def oldest_version(self) -> int:
        """Return the lowest version of a member; there must be one."""
        return min(self._versions)

    def add(self, member: M) -> None:
        self._enter(member)
        self._versions[member.version] = self._versions.get(member.version, 0) + 1
        self._size += 1

    def reorder(self, member: M, former_load: int) -> None:
        """Move a member, whose load has changed, behind the others of its load."""
        self._leave(member, former_load)
        self._enter(member)

    def remove(self, member: M) -> None:
        version = member.version
        self._leave(member, member.outstanding)
        self._size -= 1
        if self._versions[version] == 1:
            del self._versions[version]
        else:
            self._versions[version] -= 1

    def _enter(self, member: M) -> None:
        load = member.outstanding
        if load in self._by_load:
            self._by_load[load][member.name] = member
            return
        self._least = min(self._least, load) if self._by_load else load
        self._by_load[load] = OrderedDict({member.name: member})

    def _leave(self, member: M, load: int) -> None:
        equals = self._by_load[load]
        del equals[member.name]
        if not equals:
            del self._by_load[load]
            if load == self._least and self._by_load:
                self._least = min(self._by_load)
