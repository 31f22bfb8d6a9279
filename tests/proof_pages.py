"""Writes ``docs/invariants.md`` and ``docs/requirements.md`` from the TOML files of these names.

Usage: ``python -m tests.proof_pages``.
"""

import argparse
import tomllib
from itertools import groupby
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[1]
INVARIANTS_HEAD: Final = """\
# Invariants

Generated from `tests/invariants.toml` by `python -m tests.proof_pages`; do not edit.

The [auditor](simulator.md#what-the-auditor-checks) checks I1-I9 and I11-I25 in every simulated episode;
[`tests/plugins/simulation/planted`](../tests/plugins/simulation/planted) has bugs that it must find. Files below are in
`tests` or `tests/unit`; a name is that of a test, without `test_`.

| | invariant | enforced in | shown by |
|---|---|---|---|
"""
REQUIREMENTS_HEAD: Final = """\
# Requirements

Generated from `tests/requirements.toml` by `python -m tests.proof_pages`; do not edit.

Bugs and wishes from public reports of SkyRL, NeMo-RL and Megatron-LM, and the test that shows each
([`tests/`](../tests), functions `test_...`). Nothing was run on a GPU.

A row without a verdict is met. **otherwise**: another mechanism prevents the harm. **partly**, **missing**: the row
says what is absent.
"""


def invariants_page() -> str:
    """Return the page of invariants."""
    rows = _rows("invariant")
    return INVARIANTS_HEAD + "".join(
        f"| {row['id']} | {row['rule']} | {row['enforced']} | {row['shown']} |\n" for row in rows
    )


def requirements_page() -> str:
    """Return the page of requirements."""
    sections = groupby(_rows("requirement"), key=lambda row: row["section"])
    return REQUIREMENTS_HEAD + "".join(
        f"\n## {title}\n\n| | rule | shown by |\n|---|---|---|\n" + "".join(map(_requirement, rows))
        for title, rows in sections
    )


def _requirement(row: dict[str, Any]) -> str:
    numbers = ", ".join(map(str, row["numbers"]))
    verdict = f"**{row['verdict']}**: " if "verdict" in row else ""
    return f"| {numbers} | {row['rule']} | {verdict}{row['shown']} |\n"


def _rows(kind: str) -> list[dict[str, Any]]:
    return tomllib.loads((ROOT / f"tests/{kind}s.toml").read_text(encoding="utf-8"))[kind]


PAGES: Final = {
    ROOT / "docs/invariants.md": invariants_page,
    ROOT / "docs/requirements.md": requirements_page,
}


def main() -> None:
    """Write both pages; refuse arguments."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    for path, page in PAGES.items():
        path.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
