"""A Ray cluster of this machine alone; none of its processes outlives ``started``."""

import contextlib
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

RAY = str(Path(sys.executable).with_name("ray"))
ROOT = Path(__file__).parents[2]
RECIPE = f"""\
name: tiny
steps: 100000
groups_per_step: 2
samples_per_group: 2
model: {{path: {ROOT / "models" / "tiny-addition"}}}
environment: {{name: stub}}
generator: {{backend: stub, sampling: {{max_new_tokens: 4}}}}
trainer: {{backend: stub, cpus: 0}}
stub: {{median_rollout_s: 0.05, step_s: 0.05, sync_s: 0.01}}
wandb: {{mode: disabled}}
"""


@dataclass(frozen=True, slots=True)
class Cluster:
    """A running cluster, and a directory with a recipe to submit to it."""

    address: str
    project: Path
    environment: Mapping[str, str]
    head: psutil.Process
    gcs: str

    def run(
        self, *command: str, home: Path | None = None, timeout_s: float = 60
    ) -> "subprocess.CompletedProcess[str]":
        """Run a command from the project, as a user of the cluster with this home would."""
        return subprocess.run(
            command,
            cwd=self.project,
            env={**self.environment, **({"HOME": str(home)} if home else {})},
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    def submit(
        self,
        *overrides: str,
        address: str | None = None,
        home: Path | None = None,
        recipe: str = "recipes/tiny.yaml",
    ) -> "subprocess.CompletedProcess[str]":
        """``offbeat submit`` of a recipe."""
        command = (sys.executable, "-m", "offbeat", "submit", recipe)
        return self.run(*command, *overrides, "--address", address or self.address, home=home)

    def actors(self) -> list[str]:
        """Names of the actor processes that live."""
        names = list[str]()
        for process in self.head.children(recursive=True):
            with contextlib.suppress(psutil.Error):
                names += [word for word in process.cmdline()[:1] if "Actor" in word]
        return names


def give_token(home: Path) -> Path:
    """A home directory with a token that Ray finds."""
    (home / ".ray").mkdir(parents=True)
    (home / ".ray" / "auth_token").write_text(secrets.token_hex(32))
    return home


@contextlib.contextmanager
def started(
    folder: Path, *, address: str = "127.0.0.1", cpus: int = 2
) -> Generator[Cluster, None, None]:
    """Start a head, bound to loopback; at the end none of its processes lives.

    Others can join one at another ``address`` than the first of loopback, which Ray gives a meaning.
    """
    home, project = folder / "home", folder / "project"
    home.mkdir(exist_ok=True)
    (project / "recipes").mkdir(parents=True)
    (project / "recipes" / "tiny.yaml").write_text(RECIPE)
    environment = {name: value for name, value in os.environ.items() if "RAY" not in name} | {
        "HOME": str(home),
        # 0: binds to loopback, on Linux too, and nobody can join
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0" if address == "127.0.0.1" else "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "OMP_NUM_THREADS": "1",
    }
    gcs, dashboard, agent, client = free_ports(4)
    # Not under pytest's folder: the names of Unix sockets below it may have 107 bytes.
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as sessions:
        command = [
            *(RAY, "start", "--head", "--block", "--disable-usage-stats", f"--num-cpus={cpus}"),
            *(f"--node-ip-address={address}", f"--port={gcs}"),
            *("--dashboard-host=127.0.0.1", f"--dashboard-port={dashboard}"),
            *(f"--dashboard-agent-listen-port={agent}", f"--ray-client-server-port={client}"),
            *("--object-store-memory=100000000", f"--temp-dir={sessions}"),
        ]
        with (folder / "head.log").open("wb") as log:
            head = subprocess.Popen(
                command,
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            until(lambda: answers(dashboard), within_s=120, what=f"{folder / 'head.log'}")
            yield Cluster(
                f"http://127.0.0.1:{dashboard}",
                project,
                environment,
                psutil.Process(head.pid),
                f"{address}:{gcs}",
            )
        finally:
            end(head, sessions)


def hiding(folder: Path) -> list[str] | None:
    """Return the words that start a command to which this folder is another one; None: not here."""
    mount = ["sh", "-c", 'mount -t tmpfs tmpfs "$0" && exec "$@"', str(folder)]
    for unshare in (["unshare", "-m"], ["unshare", "--user", "--map-root-user", "-m"]):
        with contextlib.suppress(OSError):
            if subprocess.run(
                [*unshare, *mount, "true"], capture_output=True, check=False
            ).returncode:
                continue
            return [*unshare, *mount]
    return None


@contextlib.contextmanager
def joined(cluster: Cluster, first: Sequence[str], *, cpus: int) -> Generator[None, None, None]:
    """Start a second machine of a cluster; ``first`` are the words that start its command."""
    command = [
        *(*first, RAY, "start", f"--address={cluster.gcs}", "--block", f"--num-cpus={cpus}"),
        *("--node-ip-address=127.0.0.3", "--object-store-memory=100000000"),
        "--disable-usage-stats",
    ]
    log = cluster.project.parent / "second.log"
    with log.open("wb") as output:
        second = subprocess.Popen(
            command,
            env={**cluster.environment, "RAY_AUTH_MODE": "token"},  # its home has one
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        until(lambda: b"Ray runtime started" in log.read_bytes(), within_s=120, what=str(log))
        yield
    finally:
        ours = psutil.Process(second.pid).children(recursive=True) if not second.poll() else []
        for process in (*ours, second):
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(ours, timeout=5)
        second.wait()


def end(head: "subprocess.Popen[bytes]", sessions: str) -> None:
    """End the head and all that came from it, including what it left to the init process."""
    ours = psutil.Process(head.pid).children(recursive=True) if head.poll() is None else []
    head.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        head.wait(5)
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if any(sessions in word for word in process.cmdline()):
                ours.append(process)
    for process in ours:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(ours, timeout=5)
    head.kill()
    head.wait()


def free_ports(count: int) -> list[int]:
    """Ports of loopback that nobody listened on a moment ago."""
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def answers(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


def until(predicate: Callable[[], bool], *, within_s: float, what: str) -> None:
    """Look until it is so; other processes offer nothing to wait on."""
    give_up_at = time.monotonic() + within_s
    while not predicate():
        assert time.monotonic() < give_up_at, f"not within {within_s:g} s: {what}"
        time.sleep(0.1)
