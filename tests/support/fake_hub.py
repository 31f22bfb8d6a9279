"""A hub of one dataset, or model, behind HTTP, as far as the client of ``huggingface_hub`` asks it."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final
from urllib.parse import unquote, urlsplit

DATASET: Final = "owner/sums"


class FakeHub:
    """One dataset with two commits; ``main`` is the first until somebody gets ``/move``."""

    def __init__(self, first: dict[str, bytes], second: dict[str, bytes]) -> None:
        self.commits = {_name_of(files): files for files in (first, second)}
        self.first, self.second = self.commits
        self.main = self.first
        self.requests = list[str]()
        self.held_file = ""  # its body stops halfway
        self.is_held, self.released = threading.Event(), threading.Event()

    def reply(self, path: str) -> tuple[int, dict[str, str], bytes]:
        """Return status, headers and body."""
        self.requests.append(path)
        match path.strip("/").split("/"):
            case ["move"]:
                self.main = self.second
                return 200, {}, b"{}"
            case ["api", "datasets" | "models", *name] if "/".join(name[:2]) == DATASET:
                return self._described(name[2:])
            case ["datasets", owner, name, "resolve", commit, *file] | [
                owner,
                name,
                "resolve",
                commit,
                *file,
            ] if f"{owner}/{name}" == DATASET:
                content = self.commits[commit]["/".join(file)]
                digest = hashlib.sha256(content).hexdigest()
                return 200, {"ETag": f'"{digest}"', "X-Repo-Commit": commit}, content
            case _:
                return 404, {"X-Error-Code": "RepoNotFound"}, b"{}"

    def _described(self, rest: list[str]) -> tuple[int, dict[str, str], bytes]:
        revision = unquote(rest[1]) if rest else "main"
        commit = self.main if revision == "main" else revision
        if commit not in self.commits:
            return 404, {"X-Error-Code": "RevisionNotFound"}, b"{}"
        files = self.commits[commit]
        if rest[:1] == ["tree"]:
            tree: list[dict[str, Any]] = [
                {
                    "type": "file",
                    "path": name,
                    "size": len(content),
                    "oid": _blob_id(content),
                }
                for name, content in files.items()
            ]
            return 200, {}, json.dumps(tree).encode()
        siblings = [{"rfilename": name, "size": len(files[name])} for name in files]
        return 200, {}, json.dumps({"id": DATASET, "sha": commit, "siblings": siblings}).encode()


@contextmanager
def serving(hub: FakeHub) -> Iterator[str]:
    """Serve the hub on this machine during the block; give its address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, headers, body = hub.reply(urlsplit(self.path).path)
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "HEAD":
                return
            if hub.held_file and self.path.endswith(hub.held_file):
                self.wfile.write(body[: len(body) // 2])
                hub.is_held.set()
                hub.released.wait()
                return
            self.wfile.write(body)

        do_HEAD = do_GET

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
            del format, args

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        hub.released.set()
        server.shutdown()
        thread.join()
        server.server_close()


def _name_of(files: dict[str, bytes]) -> str:
    """Return what looks like a commit."""
    return hashlib.sha1(repr(files).encode()).hexdigest()  # noqa: S324 - no secret


def _blob_id(content: bytes) -> str:
    """Return the checksum that git gives a file."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()  # noqa: S324 - no secret
