"""Files of a run directory, for the table at the end of the run."""

from pathlib import Path

from offbeat.run_files.files import ELSEWHERE, FAILURES
from offbeat.runs.directory import JOURNAL, SUMMARY


def written_files(directory: Path) -> dict[str, Path]:
    """Return the files that the run has written and that exist."""
    names = {
        "config": "config.yaml",
        "metrics": "metrics.jsonl",
        "summary": SUMMARY,
        "wandb": "wandb",
        "tensorboard": "tensorboard",
        "journal": JOURNAL,
        "timeline": "trace.json",
        "rollouts": "rollouts",
        "failures": FAILURES,
        "evaluations": "evaluations",
        "model": "checkpoints",
        "logs": "logs",
        "elsewhere": ELSEWHERE,
    }
    paths = {what: directory / name for what, name in names.items()}
    return {
        what: path
        for what, path in paths.items()
        if path.is_file() or (path.is_dir() and any(path.iterdir()))
    }
