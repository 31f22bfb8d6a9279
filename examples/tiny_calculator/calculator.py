"""The calculator: its definition, as the model is shown it, and what it answers."""

import json
import re
from typing import Any, Final

CALCULATOR: Final[Any] = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "a*b of two whole numbers",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}},
    },
}

_PRODUCT: Final = re.compile(r"(\d{1,9})\*(\d{1,9})", re.ASCII)


def calculate(arguments: str) -> str:
    """Return the product that a call asks for, or what is wrong with the call.

    Nothing the model wrote is evaluated: two numbers are read and multiplied.
    """
    product = _PRODUCT.fullmatch(str(json.loads(arguments).get("expression")))
    return str(int(product[1]) * int(product[2])) if product else "error: write a*b"
