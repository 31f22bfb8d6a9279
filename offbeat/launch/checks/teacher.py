"""Checks that a teacher can score the tokens of the model that is trained."""

from collections.abc import Iterator
from pathlib import Path

from offbeat.config.run import RunConfig
from offbeat.launch.checks.finding import Finding, error, ok
from offbeat.launch.checks.model_files import read_model
from offbeat.trainers.teacher import TeacherMismatch, check_tokenizers

_SUBJECT = "teacher"


def check_teacher(config: RunConfig) -> Iterator[Finding]:
    """Check the teacher's files and tokenizer; nothing without a teacher."""
    path = config.algorithm.loss.teacher_path
    if path is None:
        return
    model, _ = read_model(Path(path))
    if model is None:
        seen = f"{path} is no model directory with config, weights and tokenizer"
        yield error(_SUBJECT, seen, "Point algorithm.loss.teacher at one.")
        return
    try:
        check_tokenizers(path, config.model.path)
    except TeacherMismatch as refused:
        yield error(_SUBJECT, str(refused), "Name a teacher with the tokenizer of model.path.")
    else:
        yield ok(_SUBJECT, f"{path}: {model.model_type}, {model.parameters:,} parameters")
