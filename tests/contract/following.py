"""Follows something through executed code: which file of the package hands it to which other."""

import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Final

import offbeat

_PACKAGE: Final = Path(str(offbeat.__file__)).parent


class Follower:
    """Collects each handover: from a function of one file to a function of another.

    A function hands over what one of its variables is if an argument of the function it calls is
    it, too, or if it returns it. ``is_it`` recognises it by a variable's name and value.
    """

    def __init__(self, is_it: Callable[[str, Any], bool], *, returned: bool = False) -> None:
        """``returned``: whether handing over by returning counts."""
        self._is_it, self._returned = is_it, returned
        self.handovers = set[tuple[str, str]]()
        """Names of both files, below the package."""

    @contextmanager
    def following(self) -> Iterator[None]:
        """Follow this thread, and all threads that start inside the block."""
        before, before_in_new_threads = sys.getprofile(), threading.getprofile()
        sys.setprofile(self._on_event)
        threading.setprofile(self._on_event)
        try:
            yield
        finally:
            sys.setprofile(before)
            threading.setprofile(before_in_new_threads)

    def _on_event(self, frame: FrameType, event: str, value: object) -> None:
        if event not in ("call", "return") or (file := file_of(frame)) is None:
            return
        caller = frame.f_back
        while caller is not None and file_of(caller) is None:
            caller = caller.f_back
        if caller is None or file_of(caller) == file:
            return
        if event == "call":
            code = frame.f_code
            arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
            # A coroutine is called by the one who awaits it, who may know nothing of it.
            if self._has(frame.f_locals, arguments) and self._has(caller.f_locals, caller.f_locals):
                self.handovers.add((str(file_of(caller)), file))
        elif self._returned and self._is("", value):
            self.handovers.add((file, str(file_of(caller))))

    def _has(self, values: Mapping[str, Any], names: Iterable[str]) -> bool:
        return any(self._is(name, values.get(name)) for name in names if name != "self")

    def _is(self, name: str, value: object) -> bool:
        if self._is_it(name, value):
            return True
        return isinstance(value, list | tuple) and any(
            self._is_it("", each) for each in flat(value)
        )


def file_of(frame: FrameType) -> str | None:
    """Name of the frame's file below the package; None for other code."""
    path = Path(frame.f_code.co_filename)
    return str(path.relative_to(_PACKAGE)) if path.is_relative_to(_PACKAGE) else None


def flat(values: Iterable[Any]) -> Iterator[Any]:
    """Yield everything in lists and tuples, however they are nested."""
    for each in values:
        if isinstance(each, list | tuple):
            yield from flat(each)
        else:
            yield each
