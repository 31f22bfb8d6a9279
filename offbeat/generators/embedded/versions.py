"""Record of the weight version in use at each tick."""

from bisect import bisect_right

from offbeat.messages.groups import VersionSpans


class VersionLog:
    """Weight versions of a range of ticks. All rows share the clock, so one log serves all."""

    def __init__(self, version: int) -> None:
        self._since: list[int] = [0]  # ascending ticks
        self._versions: list[int] = [version]

    @property
    def current(self) -> int:
        return self._versions[-1]

    def change(self, tick: int, version: int) -> None:
        """Record that tokens from ``tick`` on are of this version. Ticks never decrease."""
        if tick == self._since[-1]:
            self._versions[-1] = version
        else:
            self._since.append(tick)
            self._versions.append(version)

    def forget_before(self, tick: int) -> None:
        """Discard versions that only earlier ticks need."""
        keep = bisect_right(self._since, tick) - 1
        del self._since[:keep], self._versions[:keep]

    def spans(self, first: int, last: int) -> VersionSpans:
        """Return the run lengths of the versions from tick ``first`` to ``last``, both included."""
        at = bisect_right(self._since, first) - 1
        spans: list[tuple[int, int]] = []
        while first <= last:
            following = self._since[at + 1] if at + 1 < len(self._since) else last + 1
            end = min(following, last + 1)
            if spans and spans[-1][0] == self._versions[at]:
                spans[-1] = (spans[-1][0], spans[-1][1] + end - first)
            else:
                spans.append((self._versions[at], end - first))
            first, at = end, at + 1
        return tuple(spans)
