"""Checks that a teacher can score the tokens of a student."""

import hashlib
from pathlib import Path
from typing import Final

from offbeat.messages.failures import OffbeatError

_TOKENIZERS: Final = ("tokenizer.json", "tokenizer.model", "tiktoken.model", "vocab.json")


class TeacherMismatch(OffbeatError):
    """The teacher of a recipe reads other tokens than the model that is trained."""

    teacher: str
    student: str
    problem: str

    def __str__(self) -> str:
        return (
            f"algorithm.loss.teacher={self.teacher} cannot score tokens of model.path={self.student}: "
            f"{self.problem}. Name a teacher with the same tokenizer"
        )


def check_tokenizers(teacher: str | Path, student: str | Path) -> None:
    """Compare the tokenizer files of both directories.

    Raises:
        TeacherMismatch: They differ, or one directory has none.
    """
    of_teacher, of_student = _digests(Path(teacher)), _digests(Path(student))
    if not of_teacher:
        raise TeacherMismatch(str(teacher), str(student), "it has no tokenizer")
    if of_teacher != of_student:
        names = sorted(set(of_teacher.items()) ^ set(of_student.items()))
        differing = ", ".join(dict.fromkeys(name for name, _ in names))
        raise TeacherMismatch(str(teacher), str(student), f"their {differing} differ")


def _digests(folder: Path) -> dict[str, str]:
    return {
        name: hashlib.sha256((folder / name).read_bytes()).hexdigest()
        for name in _TOKENIZERS
        if (folder / name).is_file()
    }
