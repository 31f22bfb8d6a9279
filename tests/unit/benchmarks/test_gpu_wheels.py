"""The list of wheels for a CUDA machine without a network."""

from pathlib import Path

import pytest

from benchmarks.gpu_wheels import CONSTRAINTS, PACKAGES, list_wheels, read_pins


def test_every_wheel_has_an_exact_version() -> None:
    pins = read_pins(CONSTRAINTS.read_text(), PACKAGES)
    assert len(pins) == len(set(PACKAGES))
    assert "msgspec" in pins[0]


def test_spelling_of_a_name_does_not_matter_and_a_missing_version_is_named() -> None:
    constraints = "# exact\nPydantic_Core==2.1  # why\nray>=2\n"
    assert read_pins(constraints, ["pydantic-core"]) == ["Pydantic_Core==2.1"]
    with pytest.raises(ValueError, match=r"ray: no exact version in constraints\.txt; add one"):
        read_pins(constraints, ["ray"])


def test_wheels_are_listed_with_their_size(tmp_path: Path) -> None:
    (tmp_path / "small.whl").write_bytes(bytes(10_000))
    (tmp_path / "large.whl").write_bytes(bytes(2_000_000))
    (tmp_path / "notes.txt").write_bytes(bytes(10))
    text, total = list_wheels(tmp_path)
    assert text.splitlines() == [
        "    2.00  large.whl",
        "    0.01  small.whl",
        "    2.01  MB in 2 wheels",
    ]
    assert total == pytest.approx(2.01)
