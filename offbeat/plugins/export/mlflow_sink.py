# pyright: basic, reportMissingImports=false
# The extra mlflow may not be installed.
"""MLflow sink: one run of an experiment on a tracking server, or in a database file."""

import os
import re
from collections.abc import Mapping
from typing import Any, Final

from offbeat.telemetry.records import MetricRecord
from offbeat.telemetry.sinks import SinkUnusable, not_installed

_PER_REQUEST: Final = 1000
"""Metrics that MLflow takes at once."""

_PARAMETERS_PER_REQUEST: Final = 100
_LONGEST_VALUE: Final = 6000  # characters of a parameter
_NOT_IN_A_NAME: Final = re.compile(r"[^\w\-. /:]", re.ASCII)
EXPERIMENT: Final = "offbeat"


class MlflowSink:
    """Writes a new MLflow run of the experiment ``offbeat``; its tag has the run's own id.

    MLflow allows fewer characters in a name than metrics have: ``eval/pass@4`` is
    ``eval/pass_40_4`` there, the character's code between underscores, so that no two names meet.
    """

    def __init__(self, uri: str, *, run_id: str, run_name: str, recipe: Mapping[str, Any]) -> None:
        """``recipe`` has the run's parameters by dotted key: pass them redacted."""
        self._uri, self._run_id, self._run_name, self._recipe = uri, run_id, run_name, recipe
        self._client: Any = None
        self._mlflow_run_id = ""
        self._pending = list[Any]()

    @property
    def name(self) -> str:
        return "mlflow"

    def open(self) -> None:
        """Begin the run.

        Raises:
            SinkUnusable: mlflow is not installed, or the server does not answer.
        """
        # MLflow would try for minutes to reach a server that is down; whoever waits can set these.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
        try:
            from mlflow.entities import Param  # noqa: PLC0415  an optional extra, seconds
            from mlflow.exceptions import MlflowException  # noqa: PLC0415
            from mlflow.tracking import MlflowClient  # noqa: PLC0415
        except ImportError as error:
            raise not_installed("mlflow", error) from error
        try:
            self._client = MlflowClient(tracking_uri=self._uri)
            experiment = self._client.get_experiment_by_name(EXPERIMENT)
            experiment_id = (
                self._client.create_experiment(EXPERIMENT)
                if experiment is None
                else experiment.experiment_id
            )
            run = self._client.create_run(
                experiment_id, run_name=self._run_name, tags={"offbeat.run_id": self._run_id}
            )
        except MlflowException as error:
            raise SinkUnusable(
                "mlflow", " ".join(str(error).split())[:300],
                "Name a tracking server or a database with --output, as in sqlite:///mlflow.db",
            ) from error  # fmt: skip
        self._mlflow_run_id = run.info.run_id
        parameters = [
            Param(_named(key), str(value)[:_LONGEST_VALUE]) for key, value in self._recipe.items()
        ]
        for start in range(0, len(parameters), _PARAMETERS_PER_REQUEST):
            batch = parameters[start : start + _PARAMETERS_PER_REQUEST]
            self._client.log_batch(self._mlflow_run_id, params=batch)

    def write(self, record: MetricRecord) -> None:
        from mlflow.entities import Metric  # noqa: PLC0415  open has imported it

        at_ms = int(record.time_s * 1000)
        self._pending += [
            Metric(_named(name), value, at_ms, record.version)
            for name, value in record.metrics.items()
        ]
        while len(self._pending) >= _PER_REQUEST:
            self._send()

    def close(self) -> None:
        if self._client is None:
            return
        while self._pending:
            self._send()
        self._client.set_terminated(self._mlflow_run_id)

    def _send(self) -> None:
        self._client.log_batch(self._mlflow_run_id, metrics=self._pending[:_PER_REQUEST])
        del self._pending[:_PER_REQUEST]


def _named(name: str) -> str:
    return _NOT_IN_A_NAME.sub(lambda found: f"_{ord(found.group()):x}_", name)
