"""Checks that a teacher can score the tokens of a student."""

import hashlib
from pathlib import Path

from offbeat.environments.tokenizer import find_tokenizer_files
from offbeat.messages.failures import OffbeatError


class TeacherMismatch(OffbeatError):
    """The teacher of a recipe has a different tokenizer from the trained model.

    Fix: use a teacher with the same tokenizer.
    """

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
        TeacherMismatch: The tokenizers differ, or one directory has none.
    """
    of_teacher, of_student = _digests(Path(teacher)), _digests(Path(student))
    if not of_teacher:
        raise TeacherMismatch(str(teacher), str(student), "it has no tokenizer")
    if of_teacher != of_student:
        names = sorted(set(of_teacher.items()) ^ set(of_student.items()))
        differing = ", ".join(dict.fromkeys(name for name, _ in names))
        raise TeacherMismatch(str(teacher), str(student), f"their {differing} differ")


def _digests(folder: Path) -> dict[str, str]:
    files = find_tokenizer_files(folder)
    return {each.name: hashlib.sha256(each.read_bytes()).hexdigest() for each in files}
