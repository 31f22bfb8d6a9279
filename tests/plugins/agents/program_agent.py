"""A program as an agent, of the standard library alone: ``program_agent.py WHAT``."""

import json
import os
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any


def ask(content: str) -> str:
    body = {
        "model": os.environ["OPENAI_MODEL"],
        "messages": [{"role": "user", "content": content}],
    }
    request = urllib.request.Request(  # noqa: S310 - the endpoint's address
        f"{os.environ['OPENAI_BASE_URL']}/chat/completions",
        json.dumps(body).encode(),
        {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"},
    )
    with urllib.request.urlopen(request) as answer:  # noqa: S310
        return json.load(answer)["choices"][0]["message"]["content"]


def finish(result: object) -> None:
    os.write(int(os.environ["OFFBEAT_RESULT_FD"]), json.dumps(result).encode())


def main(what: str, task: dict[str, Any]) -> None:
    ask(task["question"])
    match what:
        case "answers":
            finish({"reward": float(task["question"] == "how many")})
        case "prints":
            print(100.0)  # noqa: T201
            finish(1)
        case "writes-much":
            finish("x" * (1 << 17))
        case "writes-text":
            os.write(int(os.environ["OFFBEAT_RESULT_FD"]), b"\xff{")
        case "starts-a-run":
            sys.path.insert(0, str(Path(__file__).parents[3]))  # it inherits no PYTHONPATH
            import offbeat  # noqa: PLC0415

            offbeat.run_recipe("none.yaml")
        case "exits":
            finish(1.0)
            sys.stderr.write(f"{'.' * 300}\n\x1b[31mno key for the sandbox\n")
            sys.exit(int(sys.argv[2]))
        case "leaves-a-process":
            left = subprocess.Popen(
                [sys.executable, "-c", "import signal; signal.pause()"],
                close_fds=False,
                pass_fds=(int(os.environ["OFFBEAT_RESULT_FD"]),),
            )
            Path(sys.argv[2]).write_text(str(left.pid))
            finish(1.0)
        case "sees":
            finish(float(sys.argv[2] in os.environ))
        case _:
            pass


if __name__ == "__main__":
    main(sys.argv[1], json.load(sys.stdin))
