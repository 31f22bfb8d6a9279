"""Evaluations on disk: ``evaluations/000120.parquet``, one row per sample.

A file is renamed into place when it is complete, so it is either complete or missing. If it is
missing, the controller of a resumed run knows that the evaluation is not done.
"""

# pyright: basic
# pyarrow has no types.

import re
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import msgspec
import structlog
from rich.table import Table

from offbeat.algorithms.eval_scores import Estimate, SetScores, scores_by_set
from offbeat.environments.media_prompts import find_media
from offbeat.messages.evaluations import EvaluatedVersion, ScoredSample
from offbeat.run_files.disk import replacing

FOLDER: Final = "evaluations"
_VERSIONS: Final = ("due", "version")
_PREVIEWS: Final = "previews"  # the column has a different name than the sample's field
_NAME: Final = re.compile(r"(\d{6,})\.parquet")
log = structlog.stdlib.get_logger()


class EvaluationFiles:
    """Writes each evaluation to a separate file, in a thread."""

    def __init__(self, run_dir: Path) -> None:
        self._folder = run_dir / FOLDER
        self._done = {due for due, _ in evaluation_files(run_dir)}
        self.newest = _newest(run_dir)
        """Metrics of the newest evaluation; empty before the first."""
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="evaluations")

    def has(self, due: int) -> bool:
        """Return whether the evaluation due at a version is on disk, or is being written."""
        return due in self._done

    def take(self, evaluated: EvaluatedVersion) -> None:
        """Write an evaluation in the background. Never blocks, never raises."""
        self._done.add(evaluated.due)
        self.newest = evaluation_metrics(evaluated)
        self._writer.submit(self._write, evaluated)

    def close(self) -> None:
        """Wait until everything is written."""
        self._writer.shutdown()

    def _write(self, evaluated: EvaluatedVersion) -> None:
        # Import in the thread, because most runs in tests have no evaluation
        import pyarrow as pa  # noqa: PLC0415
        import pyarrow.parquet as pq  # noqa: PLC0415

        from offbeat.telemetry import preview_column  # noqa: PLC0415

        path = self._folder / f"{evaluated.due:06d}.parquet"
        rows: list[dict[str, Any]] = [
            {
                "due": evaluated.due,
                "version": evaluated.version,
                **msgspec.structs.asdict(sample),
                find_media().PREVIEW_COLUMN: preview_column.written(sample.previews),
            }
            for sample in evaluated.samples
        ]
        kinds = {int: pa.int64(), float: pa.float64(), bool: pa.bool_(), float | None: pa.float64()}
        fields = {"due": pa.int64(), "version": pa.int64()} | {
            field.name: kinds.get(field.type, pa.string())
            for field in msgspec.structs.fields(ScoredSample)
            if field.name != _PREVIEWS
        }
        fields[find_media().PREVIEW_COLUMN] = preview_column.TYPE
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with replacing(path) as beside:
                pq.write_table(pa.Table.from_pylist(rows, schema=pa.schema(fields)), beside)
        except (OSError, pa.ArrowException) as error:
            log.warning("eval.not_written", path=str(path), error=str(error))


def evaluation_files(run_dir: Path) -> list[tuple[int, Path]]:
    """Return the due version and the file of each evaluation of a run, oldest first."""
    found = ((_NAME.fullmatch(path.name), path) for path in (run_dir / FOLDER).glob("*.parquet"))
    return sorted((int(name[1]), path) for name, path in found if name)


def read_evaluation(path: Path) -> EvaluatedVersion:
    """Read a file that ``EvaluationFiles`` wrote, except its small copies of media.

    Raises:
        OSError: The file cannot be read.
        pyarrow.ArrowException: It is damaged.
    """
    from offbeat.run_files.limited_parquet import read_parquet  # noqa: PLC0415 -- see above

    return _evaluated(read_parquet(path, ScoredSample.__struct_fields__ + _VERSIONS).to_pylist())


def read_evaluated_row(path: Path, name: str, row: int) -> EvaluatedVersion | None:
    """Read the samples of one row of a set. Return None if the evaluation has none.

    Raises:
        OSError: The file cannot be read.
        pyarrow.ArrowException: It is damaged.
    """
    import pyarrow.compute as pc  # noqa: PLC0415 -- see above

    from offbeat.run_files.limited_parquet import read_parquet  # noqa: PLC0415 -- see above

    def is_wanted(batch: Any) -> Any:  # noqa: ANN401 -- of pyarrow
        is_of_set = pc.call_function("equal", [batch["set"], name])
        return pc.call_function("and", [is_of_set, pc.call_function("equal", [batch["row"], row])])

    rows = read_parquet(path, keep=is_wanted).to_pylist()
    return _evaluated(rows) if rows else None


def rows_by_set(path: Path) -> dict[str, list[int]]:
    """Return the rows that an evaluation has sampled, in ascending order, by set name.

    Raises:
        OSError: The file cannot be read.
        pyarrow.ArrowException: It is damaged.
    """
    from offbeat.run_files.limited_parquet import read_parquet  # noqa: PLC0415 -- see above

    found: dict[str, set[int]] = {}
    for each in read_parquet(path, ["set", "row"]).to_pylist():
        found.setdefault(each["set"], set()).add(each["row"])
    return {name: sorted(rows) for name, rows in found.items()}


def _evaluated(rows: list[dict[str, Any]]) -> EvaluatedVersion:
    from offbeat.telemetry import preview_column  # noqa: PLC0415 -- see above

    made = list[ScoredSample]()
    for row in rows:
        known = {key: row[key] for key in ScoredSample.__struct_fields__ if key in row}
        known[_PREVIEWS] = preview_column.read(row.get(find_media().PREVIEW_COLUMN))
        made.append(ScoredSample(**known))
    return EvaluatedVersion(rows[0]["due"], rows[0]["version"], tuple(made))


def _newest(run_dir: Path) -> dict[str, float]:
    files = evaluation_files(run_dir)
    if not files:
        return {}
    import pyarrow as pa  # noqa: PLC0415 -- see below

    try:
        return evaluation_metrics(read_evaluation(files[-1][1]))
    except (OSError, pa.ArrowException) as error:
        log.warning("eval.not_read", path=str(files[-1][1]), error=str(error))
        return {}


def metrics_of(name: str, scores: SetScores) -> dict[str, float]:
    """Return the scores of a set under the names of the metric table: ``eval/math/pass@4``."""
    place = f"eval/{name}" if name else "eval"
    metrics = {
        f"{place}/reward": scores.mean.value,
        f"{place}/samples": float(scores.samples),
        f"{place}/masked_samples": float(scores.masked_samples),
        f"{place}/response_tokens_mean": scores.response_tokens,
    }
    if scores.mean.error is not None:
        metrics[f"{place}/reward_se"] = scores.mean.error
    metrics |= {f"{place}/pass@{k}": passed.value for k, passed in scores.pass_at.items()}
    if scores.majority is not None:
        metrics[f"{place}/maj@{scores.k}"] = scores.majority.value
    return metrics


def evaluation_metrics(evaluated: EvaluatedVersion) -> dict[str, float]:
    """Return the metrics of all sets of an evaluation, and the version that was scored."""
    metrics = {"eval/version": float(evaluated.version)}
    for name, scores in scores_by_set(evaluated.samples).items():
        metrics |= metrics_of(name, scores)
    return metrics


def render_scores(scores: Mapping[str, SetScores]) -> Table:
    """Render one row per set and score, with the standard error."""
    table = Table(box=None, pad_edge=False)
    for column in ("set", "score", "value", "std. error", "prompts", "samples"):
        table.add_column(column, justify="left" if column in ("set", "score") else "right")
    for name, each in scores.items():
        masked = f" ({each.masked_samples} masked)" if each.masked_samples else ""
        size = [str(each.prompts), f"{each.samples}{masked}"]
        for number, (score, estimate) in enumerate(_scores_of(each)):
            error = "" if estimate.error is None else f"{estimate.error:.3f}"
            first = [name, score, f"{estimate.value:.3f}", error]
            table.add_row(*first, *(["", ""] if number else size))
    return table


def _scores_of(scores: SetScores) -> Iterator[tuple[str, Estimate]]:
    yield f"mean@{scores.k}", scores.mean
    yield from ((f"pass@{k}", passed) for k, passed in scores.pass_at.items())
    if scores.majority is not None:
        yield f"maj@{scores.k}", scores.majority
