import json
import logging
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st

from offbeat.config.run import RunConfig
from offbeat.telemetry.logs import (
    REDACTED,
    JsonLinesLog,
    Redactor,
    configure_logging,
    json_line,
    log_to,
)

CANARY = 'canary-"7f3a\\9c'


Configure = Callable[..., JsonLinesLog]


@pytest.fixture
def log_dir(tmp_path: Path) -> Path:
    return tmp_path / "logs"


@pytest.fixture
def configure(log_dir: Path) -> Iterator[Configure]:
    """Sets the logging up, and gives the process its own back afterwards."""
    handlers, config = list(logging.getLogger().handlers), structlog.get_config()
    opened = list[JsonLinesLog]()

    def configured(process: str, **options: Any) -> JsonLinesLog:
        opened.append(configure_logging(process, log_dir, **options))
        return opened[-1]

    yield configured
    for outputs in opened:
        outputs.close()
    structlog.configure(**config)
    structlog.contextvars.clear_contextvars()
    logging.captureWarnings(capture=False)
    logging.getLogger().handlers = handlers


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_line_carries_process_run_and_what_is_bound_to_the_context(
    log_dir: Path, configure: Configure
) -> None:
    configure("controller", run_id="run-1")
    log = structlog.stdlib.get_logger()
    with structlog.contextvars.bound_contextvars(step=7):
        log.info("step.done", reward=0.5)
    log.debug("not.shown")
    (line,) = lines(log_dir / "controller.log")
    assert line.pop("timestamp").endswith("Z")
    assert line == {
        "process": "controller", "run_id": "run-1", "level": "info",
        "event": "step.done", "step": 7, "reward": 0.5,
    }  # fmt: skip


def test_a_logger_taken_before_the_set_up_obeys_it(log_dir: Path, configure: Configure) -> None:
    log = structlog.stdlib.get_logger()
    configure("driver")
    log.warning("late")
    assert lines(log_dir / "driver.log")[0]["event"] == "late"


def test_an_exception_is_one_line_with_its_traceback(log_dir: Path, configure: Configure) -> None:
    configure("driver")
    try:
        int("three")
    except ValueError:
        structlog.stdlib.get_logger().exception("it.broke")
    (line,) = lines(log_dir / "driver.log")
    assert line["level"] == "error"
    assert line["exception"].endswith("base 10: 'three'")


def test_what_libraries_log_and_warn_ends_in_the_same_file(
    log_dir: Path, configure: Configure
) -> None:
    configure("driver")
    configure("driver")  # a second call doubles nothing
    logging.getLogger("asyncio").error("Task %s was lost", "x")
    logging.getLogger("noisy").info("not shown")
    logging.getLogger("odd").log(35, "between two levels")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn("careful", stacklevel=1)
    found = lines(log_dir / "driver.log")
    assert [line["logger"] for line in found] == ["asyncio", "odd", "py.warnings"]
    assert found[0]["event"] == "Task x was lost"
    assert found[1]["level"] == "warning"


def test_what_json_does_not_know_is_written_as_its_repr() -> None:
    assert json.loads(json_line({"event": "e", "error": ValueError(3)}))["error"] == "ValueError(3)"
    assert json.loads(json_line({"event": "e", "raw": b"key"}))["raw"] == "b'key'"


def test_text_that_fits_no_encoding_is_logged_all_the_same(
    log_dir: Path, configure: Configure
) -> None:
    configure("driver")
    structlog.stdlib.get_logger().warning("file.odd", name=os.fsdecode(b"\xff"), step=3)
    (line,) = lines(log_dir / "driver.log")
    assert (line["event"], line["name"], line["step"]) == ("file.odd", r"\udcff", "3")


def test_a_log_that_the_disk_refuses_stops_nobody(
    log_dir: Path, configure: Configure, capfd: pytest.CaptureFixture[str]
) -> None:
    log_dir.mkdir()
    (log_dir / "driver.log").symlink_to("/dev/full")
    configure("driver")
    structlog.stdlib.get_logger().info("lost")
    assert "Traceback" not in capfd.readouterr().err


def test_after_closing_lines_are_let_go(log_dir: Path, configure: Configure) -> None:
    configure("driver").close()
    structlog.stdlib.get_logger().info("nobody.hears")
    assert lines(log_dir / "driver.log") == []


def test_a_log_of_a_block_is_closed_at_its_end_and_the_one_before_goes_on(
    tmp_path: Path, configure: Configure
) -> None:
    log = structlog.stdlib.get_logger()
    configure("driver")
    for run in ("first", "second"):
        with log_to("controller", tmp_path / run, run_id=run):
            log.info("in.block", run=run)
            logging.getLogger("library").warning("in block")
        log.info("after.block")
    for run in ("first", "second"):
        found = lines(tmp_path / run / "controller.log")
        assert [(line["event"], line["run_id"]) for line in found] == [
            ("in.block", run), ("in block", run)
        ]  # fmt: skip
    found = lines(tmp_path / "logs" / "driver.log")
    assert [line["event"] for line in found] == ["after.block", "after.block"]


def test_of_two_runs_the_one_that_ends_last_logs_to_its_file_until_its_end(
    tmp_path: Path, configure: Configure, capsys: pytest.CaptureFixture[str]
) -> None:
    log = structlog.stdlib.get_logger()
    configure("driver")
    first, second = (log_to("controller", tmp_path / run) for run in ("first", "second"))
    first.__enter__()
    with second:
        first.__exit__(None, None, None)
        log.debug("not.shown")
        log.info("in.second")
    log.info("after.both")
    assert [line["event"] for line in lines(tmp_path / "second" / "controller.log")] == [
        "in.second"
    ]
    assert [line["event"] for line in lines(tmp_path / "logs" / "driver.log")] == ["after.both"]
    assert capsys.readouterr() == ("", "")


def test_a_log_of_a_block_leaves_a_process_as_it_was(tmp_path: Path) -> None:
    program = """
import logging, structlog, sys, warnings
from pathlib import Path
from offbeat.telemetry.logs import log_to
before = warnings.showwarning, logging.getLogger().handlers[:], structlog.get_config()
with log_to("controller", Path(sys.argv[1])):
    assert structlog.is_configured()
assert not structlog.is_configured()
assert before == (warnings.showwarning, logging.getLogger().handlers, structlog.get_config())
"""
    strict = ["-X", "dev", "-W", "error::ResourceWarning"]
    done = subprocess.run(
        [sys.executable, *strict, "-c", program, str(tmp_path)],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert (done.stdout, done.stderr) == ("", "")


def test_no_secret_of_the_environment_reaches_a_log(tmp_path: Path) -> None:
    program = """
import logging, structlog, sys
from functools import partial
from pathlib import Path
from offbeat.telemetry.logs import configure_logging
configure_logging("driver", Path(sys.argv[1]))
secret = __import__("os").environ["WANDB_API_KEY"]
log = structlog.stdlib.get_logger()
log.info("plain " + secret, url=f"https://x?key={secret}", nested={"k": [secret]}, raw=secret.encode())
logging.getLogger("lib").error(secret)
try:
    raise ValueError(secret)
except ValueError:
    log.exception("raised")
"""
    secrets = {"WANDB_API_KEY": CANARY, "HF_TOKEN": "hf-canary-1", "MY_SECRET": "canary-12345"}
    program += 'log.warning("others", a="hf-canary-1", b=["canary-12345"])'
    finished = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        capture_output=True, text=True, check=True, env={**os.environ, **secrets},
    )  # fmt: skip
    text = (tmp_path / "driver.log").read_text() + finished.stdout + finished.stderr
    assert text.count(REDACTED) >= 8
    for part in ("canary", "7f3a", "9c\\"):
        assert part not in text
    lines(tmp_path / "driver.log")  # still JSON


@given(st.text(min_size=6), st.text(), st.text())
def test_a_secret_is_found_wherever_it_stands_in_json(secret: str, before: str, after: str) -> None:
    text = json_line({"event": before + secret + after})
    redacted = Redactor([secret])(text)
    assert redacted != text
    assert json.dumps(secret)[1:-1] not in redacted.replace(REDACTED, "")


def logged_repr(text: str) -> str:
    return json_line({"event": "it.broke", "error": ValueError(text)})


@pytest.mark.parametrize(
    "write", [str, repr, json.dumps, partial(json.dumps, ensure_ascii=False), logged_repr]
)
def test_a_secret_is_found_however_it_was_written(write: Callable[[str], str]) -> None:
    secret = 'schlüssel "a\\b"'
    assert "schl" not in Redactor([secret])(f"before {write(secret)} after")


def test_a_secret_of_the_recipe_and_a_password_in_a_url_are_found() -> None:
    options = {"api_key": "canary-1", "pin": {"password": 31415926}, "tokens": "in sight"}
    config = RunConfig.model_validate(
        {"steps": 1, "model": {"path": "/x"}, "environment": {"options": options}}
    )
    redacted = Redactor.from_environment({}, config)
    text = "canary-1 31415926 in sight https://ada:canary-2@host:80/path a://b c:d@e"
    assert redacted(text) == (
        f"{REDACTED} {REDACTED} in sight https://{REDACTED}@host:80/path a://b c:d@e"
    )


def test_a_short_value_is_a_word_and_no_secret() -> None:
    redactor = Redactor.from_environment(
        {"DEBUG_TOKEN": "true", "USE_SECRET": "", "OTHER": "value"}
    )
    assert redactor("true value") == "true value"


def test_the_longer_of_two_secrets_is_replaced_whole() -> None:
    assert Redactor(["abcdef", "abcdef-ghijk"])("abcdef-ghijk abcdef") == f"{REDACTED} {REDACTED}"
