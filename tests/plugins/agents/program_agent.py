"""A program as an agent, of the standard library alone: ``program_agent.py WHAT``."""

import json
import os
import resource
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit


def ask(content: str) -> str:
    """Ask without ``http``, whose import takes longer than the rest of the program."""
    messages = [{"role": "user", "content": content}]
    body = json.dumps({"model": os.environ["OPENAI_MODEL"], "messages": messages}).encode()
    url = urlsplit(os.environ["OPENAI_BASE_URL"])
    head = (
        f"POST {url.path}/chat/completions HTTP/1.0\r\n"
        f"Authorization: Bearer {os.environ['OPENAI_API_KEY']}\r\n"
        "Content-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    address = (url.hostname, url.port or 80)
    with socket.create_connection(address) as link, link.makefile("rb") as answer:
        link.sendall(head.encode() + body)
        told, _, said = answer.read().partition(b"\r\n\r\n")
    assert told.split()[1] == b"200", told
    return json.loads(said)["choices"][0]["message"]["content"]


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
        case "returns-its-memory-limit":
            finish(float(resource.getrlimit(resource.RLIMIT_AS)[0] >> 20))
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
