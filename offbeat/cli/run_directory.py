"""The directory of one run: chosen, made, never shared with another run."""

import itertools
import os
from pathlib import Path

from offbeat.config.dump import to_yaml
from offbeat.config.run import RunConfig
from offbeat.messages.failures import OffbeatError

CONFIG = "config.yaml"


class RunDirUnusable(OffbeatError):
    """A run cannot write where it was told to."""

    def __init__(self, path: str, problem: str, fix: str) -> None:
        super().__init__(path, problem, fix)
        self.path, self.problem, self.fix = path, problem, fix

    def __str__(self) -> str:
        return f"run directory {self.path}: {self.problem}. {self.fix}"


def make_run_dir(config: RunConfig, asked: Path | None) -> Path:
    """Make the run's directory and write the resolved config into it.

    ``asked`` must be free. The recipe's own ``run_dir`` gets the first free number behind it, so
    that a recipe can be run again as it stands.

    Raises:
        RunDirUnusable: It holds a run already, or cannot be written.
    """
    wanted = Path(str(asked or config.run_dir).replace("{name}", config.name)).absolute()
    numbered = (wanted.with_name(f"{wanted.name}-{number}") for number in itertools.count(2))
    candidates = itertools.chain([wanted], () if asked else numbered)
    for candidate in candidates:
        try:
            candidate.mkdir(parents=True, exist_ok=True)
            # The config is the mark of a taken directory; creating it settles a race of two runs.
            with (candidate / CONFIG).open("x", encoding="utf-8") as file:
                file.write(to_yaml(config, os.environ))
        except FileExistsError:
            continue
        except OSError as error:
            fix = "Name another one with --run-dir"
            raise RunDirUnusable(str(candidate), error.strerror or str(error), fix) from error
        return candidate
    raise RunDirUnusable(str(wanted), "it holds another run", "Name another one with --run-dir")
