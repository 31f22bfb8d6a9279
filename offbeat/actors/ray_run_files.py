"""Remote access to the run directory: an actor on the driver's machine, and its client."""

# pyright: reportUnknownMemberType=false
# Ray declares functions without the types of their parameters.

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import ray
from ray.exceptions import GetTimeoutError, RayError

from offbeat.actors.call import Handle, find_raised_line
from offbeat.config.run import RunConfig
from offbeat.messages.text import first_line
from offbeat.run_files.files import Fingerprint, RunFiles
from offbeat.run_files.shared_directory import (
    RunDirNotShared,
    RunDirToken,
    is_shared,
    machine,
    place_of_its_own,
)
from offbeat.run_files.sharing import Sharing, WriteLocation
from offbeat.telemetry.logs import prepare

_CALL_S: Final = 60.0  # a call carries at most 8 MiB
PIN_FIX: Final = "Start offbeat train on a machine of the cluster, as offbeat submit does"
SHARE_FIX: Final = (
    "Several trainer ranks write one checkpoint together: put run_dir on a file system that all "
    "machines see at the same path, or leave the trainer one rank"
)


def set_up_files(
    process: str,
    run_dir: str,
    sharing: Sharing | None,
    config: RunConfig | None = None,
    *,
    needs_to_share: str = "",
) -> WriteLocation:
    """Determine where this process writes, and configure its log there.

    Args:
        process: Name of the process in the run.
        run_dir: Run directory of the driver.
        sharing: None if the run uses only this machine.
        config: The recipe, in a process that has all of it. It is passed to ``prepare``.
        needs_to_share: Fix to show if this process must see the run directory and does not. Empty
            if it need not see the directory.

    Raises:
        RunDirNotShared: The process must see the run directory and does not.
        OSError: The driver's machine cannot be reached.
    """
    if sharing is not None:
        os.environ.update(sharing.secrets)
    place = _find_location(process, run_dir, sharing, needs_to_share)
    prepare(process, str(place.directory), config)
    return place


def _find_location(
    process: str, run_dir: str, sharing: Sharing | None, needs_to_share: str
) -> WriteLocation:
    if sharing is None:
        return WriteLocation(Path(run_dir))
    here = ray.get_runtime_context().get_node_id() == sharing.node
    files = RayFiles(sharing.files)
    if is_shared(Path(run_dir), sharing.token, None if here else files):
        return WriteLocation(Path(run_dir))
    if needs_to_share:
        raise RunDirNotShared(process, machine(), run_dir, needs_to_share)
    own = place_of_its_own(process)
    files.elsewhere(process, machine(), str(own))
    return WriteLocation(own, files)


def check_sees(process: str, run_dir: Path, token: RunDirToken) -> None:
    """Raise unless this process sees the driver's run directory.

    Raises:
        RunDirNotShared: It does not, although it is on the driver's machine.
    """
    if not is_shared(run_dir, token, None):
        raise RunDirNotShared(process, machine(), str(run_dir), PIN_FIX)


class RunFilesActor(RunFiles):
    """Actor that serves the run directory to processes on other machines."""

    def __init__(self, run_dir: str, token: RunDirToken) -> None:
        check_sees("run-files", Path(run_dir), token)
        prepare("run-files", run_dir)
        super().__init__(Path(run_dir))


class RayFiles:
    """Client of the driver's ``RunFilesActor``."""

    def __init__(self, actor: str) -> None:
        self._actor = actor
        self._handle: Handle | None = None

    def sees(self, token: RunDirToken) -> bool:
        return self._call("sees", token)

    def elsewhere(self, process: str, machine: str, directory: str) -> None:
        self._call("elsewhere", process, machine, directory)

    def listing(self, folder: str) -> Mapping[str, Fingerprint]:
        return self._call("listing", folder)

    def read(self, name: str, offset: int, nbytes: int) -> bytes:
        return self._call("read", name, offset, nbytes)

    def write(self, name: str, offset: int, data: bytes, nbytes: int) -> None:
        self._call("write", name, offset, data, nbytes)

    def append(self, name: str, data: bytes) -> None:
        self._call("append", name, data)

    def rename(self, old: str, new: str) -> None:
        self._call("rename", old, new)

    def remove(self, name: str) -> None:
        self._call("remove", name)

    def _call(self, method: str, *arguments: object) -> Any:  # noqa: ANN401 -- what it answers
        problem = f"{method} in the run directory of the driver's machine"
        try:
            if self._handle is None:
                self._handle = ray.get_actor(self._actor)
            return ray.get(getattr(self._handle, method).remote(*arguments), timeout=_CALL_S)
        except GetTimeoutError as late:
            raise OSError(f"{problem}: no answer within {_CALL_S:g} s") from late
        except RayError as error:
            raise OSError(f"{problem}: {find_raised_line(error) or first_line(error)}") from error
        except ValueError as gone:  # the actor of this name no longer exists
            raise OSError(f"{problem}: {gone}") from gone
