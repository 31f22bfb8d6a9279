"""Test of the package: the contract of engines."""

from pathlib import Path

from offbeat_plain.plugin import PLAIN

from offbeat.testing import prove_engine

MODEL = Path(__file__).parents[2] / "models" / "tiny-addition"


def test_the_engine_keeps_the_contract() -> None:
    prove_engine(PLAIN, MODEL)
