"""Write ``sums.jsonl``: every problem of the quickstart, with the answer to learn.

python examples/tiny_addition/make_demonstrations.py examples/tiny_addition/sums.jsonl
"""

import argparse
import json
from itertools import product
from pathlib import Path

OPERAND_END = 20
"""Operands are drawn from ``range(OPERAND_END)``."""


def main() -> None:
    """Write the file named on the command line."""
    parser = argparse.ArgumentParser(description="Write demonstrations of addition.")
    parser.add_argument("file", type=Path, help="where to write them")
    file: Path = parser.parse_args().file
    rows = [
        json.dumps({"prompt": f"{a}+{b}=", "completion": str(a + b)})
        for a, b in product(range(OPERAND_END), repeat=2)
    ]
    file.write_text("\n".join(rows) + "\n")


if __name__ == "__main__":
    main()
