"""`offbeat watch`: who may read, what there is to read, and when it has changed."""

import base64
import gzip
import http.client
import json
import os
import re
import shutil
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing
from http.cookiejar import CookieJar
from pathlib import Path
from types import MappingProxyType
from urllib.parse import urljoin, urlsplit
from urllib.request import HTTPCookieProcessor, Request, build_opener

import pytest
from typer.testing import CliRunner

from offbeat.launch.commands.main import app
from offbeat.plugins.report.document import write_report
from offbeat.plugins.watch.runs import WatchedRuns
from offbeat.plugins.watch.server import (
    COOKIE,
    MAX_CONNECTIONS,
    MAX_STREAMS,
    Access,
    WatchServer,
    exposition,
)
from offbeat.runs.page_files import LinkRefused
from offbeat.telemetry.records import MetricRecord
from tests.support import shown_run

NOTHING: Mapping[str, str] = MappingProxyType({})


class Client:
    """A server in a thread, and requests to it."""

    def __init__(self, root: Path, runs: WatchedRuns | None = None) -> None:
        self.looks = threading.Semaphore(0)
        """The server looks at a run's files once for each release."""
        shown = runs or WatchedRuns.at(root)
        self.server = WatchServer("127.0.0.1", 0, shown, pause=self._pause)
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,))
        self.thread.start()
        self.host = f"127.0.0.1:{self.server.server_address[1]}"
        self.open = list[http.client.HTTPConnection]()

    def _pause(self, _: float) -> None:
        self.looks.acquire()

    def ask(
        self, path: str, headers: Mapping[str, str] = NOTHING, method: str = "GET"
    ) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection(self.host, timeout=10)
        self.open.append(connection)
        connection.request(method, path, headers=dict(headers))
        return connection.getresponse()

    def allowed(self, path: str, **headers: str) -> http.client.HTTPResponse:
        return self.ask(path, {"Cookie": f"{COOKIE}={self.server.access.cookie}", **headers})

    def close(self) -> None:
        for connection in self.open:
            connection.close()
        self.looks.release(1000)
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("runs")
    shown_run.finished(directory / "first", 3)
    shown_run.running(directory / "second run", 3)
    (directory / "notes.txt").write_text("no run")
    (directory / "no-run").mkdir()
    (directory / "linked").symlink_to(directory / "first")
    return directory


@pytest.fixture
def client(root: Path) -> Iterator[Client]:
    client = Client(root)
    yield client
    client.close()


def test_the_first_address_has_a_token_and_gives_a_cookie_that_no_script_reads(
    client: Client,
) -> None:
    url = urlsplit(client.server.url)
    entered = client.ask(f"{url.path}?{url.query}")
    assert entered.status == 303
    place = entered.headers["Location"]
    assert client.server.access.token not in place, "the token leaves the address"
    cookie = entered.headers["Set-Cookie"]
    assert "HttpOnly" in cookie and "SameSite=Strict" in cookie
    assert client.server.access.token not in cookie
    assert client.ask(place, {"Cookie": cookie.partition(";")[0]}).status == 200
    assert client.ask(place).status == 403, "the place alone opens nothing"


def test_a_browser_shows_the_cookie_to_no_other_server_of_this_host(root: Path) -> None:
    with closing(Client(root)) as ours, closing(Client(root)) as other:
        jar = CookieJar()  # cookies know no ports, as those of a browser
        browser = build_opener(HTTPCookieProcessor(jar))
        pages = [browser.open(each.server.url).url for each in (ours, other)]
        assert [browser.open(page).status for page in pages] == [200, 200], "each keeps its own"
        assert b"first" in browser.open(f"{pages[0]}runs").read()
        assert sent_cookies(jar, f"http://{other.host}/") == []
        assert sent_cookies(jar, f"http://{other.host}/run/first/data") == []
        assert len(sent_cookies(jar, pages[0])) == 1


def test_what_a_page_names_is_found_from_where_the_page_lies(client: Client) -> None:
    place = client.server.access.path_prefix
    for page in (f"{place}/", f"{place}/run/first", f"{place}/run/second%20run"):
        text = client.allowed(page).read().decode()
        named = re.findall(r'(?:src|href)="([^"#]+)"', text)
        assert len(named) == 2
        assert [client.allowed(urljoin(page, each)).status for each in named] == [200, 200]
    assert b"fetch('runs')" in client.allowed(f"{place}/runs.js").read()
    assert client.allowed(urljoin(f"{place}/", "runs")).status == 200


def test_a_cookie_is_compared_as_sent_and_long_ones_are_not_read() -> None:
    access = Access.create("127.0.0.1", 1234)
    ours = f"{COOKIE}={access.cookie}"
    assert access.may_read({"Cookie": f"other=1; {ours};more=2"})
    for refused in (f'{COOKIE}="{access.cookie}"', "x=" * 9000 + f"; {ours}", f"{ours}é", ""):
        assert not access.may_read({"Cookie": refused})


def sent_cookies(jar: CookieJar, url: str) -> list[str]:
    request = Request(url)  # noqa: S310 -- no request is made
    jar.add_cookie_header(request)
    return [value for name, value in request.header_items() if name == "Cookie"]


@pytest.mark.parametrize("path", ["/", "/runs", "/app.js", "/run/first/data", "/metrics", "/x"])
@pytest.mark.parametrize(
    "headers", [{}, {"Cookie": f"{COOKIE}=guess"}, {"Authorization": "Bearer x"}]
)
def test_without_the_secret_nothing_is_told(
    client: Client, path: str, headers: dict[str, str]
) -> None:
    refused = client.ask(path, headers)
    assert refused.status == 403
    assert b"first" not in refused.read()
    assert client.ask("/?token=guess").status == 403


def test_a_name_that_was_rebound_and_a_foreign_page_are_refused(client: Client) -> None:
    assert client.allowed("/", Host="evil.example").status == 421
    assert client.allowed("/", Origin="http://evil.example").status == 403
    assert client.allowed("/", Origin=f"http://{client.host}").status == 200
    port = client.server.server_address[1]
    assert client.allowed("/", Host=f"localhost:{port}").status == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD"])
def test_nothing_but_get_is_answered(client: Client, method: str) -> None:
    headers = {"Cookie": f"{COOKIE}={client.server.access.cookie}"}
    assert client.ask("/run/first", headers, method).status == 405


@pytest.mark.parametrize(
    "name",
    ["..", "../runs", "%2e%2e", "..%2ffirst", "first%2f..%2ffirst", "linked", "no-run", "notes.txt",
     ".", "", "first%00", "/etc", "%5c..%5cfirst"],
)  # fmt: skip
def test_a_name_that_leads_elsewhere_is_not_found(client: Client, name: str) -> None:
    for path in (f"/run/{name}", f"/run/{name}/data", f"/run/{name}/events"):
        assert client.allowed(path).status == 404, path


@pytest.mark.parametrize(
    "linked",
    ["config.yaml", "summary.json", "metrics.jsonl", "status.json", "tokenizer.json", "rollouts",
     "rollouts/x.parquet", "evaluations/000000.parquet", "failures.jsonl", "journal/x", "checkpoints/step_1", "checkpoints/step_2/tokenizer.json"],
)  # fmt: skip
def test_a_link_in_a_run_is_followed_neither_by_watch_nor_by_report(
    tmp_path: Path, linked: str
) -> None:
    run = shown_run.finished(tmp_path / "runs" / "one", 2)
    secret = tmp_path / "secret"
    secret.write_text("password: 1")
    path = run / linked
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        path.rename(tmp_path / "put aside")
    path.symlink_to(secret)
    assert not list(WatchedRuns.at(tmp_path / "runs").readable())
    with pytest.raises(LinkRefused, match=f"{linked} is a symbolic link"):
        write_report([run], None)
    assert not (run / "report.html").exists()


def test_a_run_that_is_itself_reached_by_a_link_is_reported(tmp_path: Path) -> None:
    (tmp_path / "latest").symlink_to(shown_run.finished(tmp_path / "one", 2))
    assert write_report([tmp_path / "latest"], None).path.exists()


def test_a_directory_that_cannot_be_shown_hides_no_other_one(tmp_path: Path) -> None:
    shown_run.finished(tmp_path / "good", 2)
    linked = shown_run.finished(tmp_path / "linked", 2)
    (linked / "rollouts").mkdir(exist_ok=True)
    (linked / "rollouts" / "x.parquet").symlink_to(linked / "config.yaml")
    (tmp_path / os.fsdecode(b"no\xfftext") / "journal").mkdir(parents=True)
    with closing(Client(tmp_path)) as client:
        assert [line["name"] for line in json.load(client.allowed("/runs"))] == ["good"]
        metrics = client.allowed("/metrics").read().decode()
    assert 'offbeat_version{run="good",metric="version"} 2' in metrics
    assert "linked" not in metrics


def test_a_file_that_may_not_be_read_is_told_by_name(root: Path) -> None:
    class Locked(WatchedRuns):
        def data(self, name: str) -> str:
            raise PermissionError(13, "Permission denied", f"{name}/journal")

    with closing(Client(root, Locked(root))) as client:
        answer = client.allowed("/run/first/data")
        assert (answer.status, answer.read()) == (
            409,
            b"[Errno 13] Permission denied: 'first/journal'\n",
        )


def test_replies_forbid_frames_sniffing_and_foreign_code(client: Client) -> None:
    headers = client.allowed("/run/first").headers
    assert "frame-ancestors 'none'" in headers["Content-Security-Policy"]
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Cache-Control"] == "no-store"
    assert headers["Referrer-Policy"] == "no-referrer"


def test_the_data_of_a_run_is_that_of_its_report(client: Client) -> None:
    answer = client.allowed("/run/second%20run/data")
    assert answer.status == 200
    assert b'"two-digit-sums"' in gzip.decompress(base64.b64decode(answer.read()))
    assert sorted(client.server.runs.names()) == ["first", "second run"]
    assert b'"outcome":"finished"' in client.allowed("/runs").read()


def test_a_stream_says_when_the_run_has_written(tmp_path: Path) -> None:
    run = shown_run.running(tmp_path / "runs" / "one", 3)
    client = Client(tmp_path / "runs")
    try:
        stream = client.allowed("/run/one/events")
        assert stream.headers["Content-Type"] == "text/event-stream"
        assert stream.readline() == b": still here\n"
        with (run / "metrics.jsonl").open("ab") as file:
            file.write(b"x")
        client.looks.release()
        assert [stream.readline() for _ in range(2)] == [b"\n", b"event: changed\n"]
    finally:
        client.close()


def test_there_are_so_many_streams_and_no_more(client: Client) -> None:
    streams = [client.allowed("/run/first/events") for _ in range(MAX_STREAMS)]
    assert {stream.status for stream in streams} == {200}
    assert client.allowed("/run/first/events").status == 503
    assert client.allowed("/run/first").status == 200, "pages are served all the same"


def test_strangers_who_send_nothing_give_their_places_to_whoever_comes(client: Client) -> None:
    port = client.server.server_address[1]
    with ExitStack() as strangers:
        held = [
            strangers.enter_context(socket.create_connection(("127.0.0.1", port), timeout=10))
            for _ in range(MAX_CONNECTIONS + 1)
        ]
        assert held[0].recv(1) == b"", "the oldest is closed"
        held[-1].sendall(b"GET / HT")  # and never more
        assert client.allowed("/runs").status == 200


def test_a_reader_keeps_its_place_whoever_comes(client: Client) -> None:
    port = client.server.server_address[1]
    stream = client.allowed("/run/first/events")
    assert stream.readline() == b": still here\n"
    with ExitStack() as strangers:
        held = [
            strangers.enter_context(socket.create_connection(("127.0.0.1", port), timeout=10))
            for _ in range(2 * MAX_CONNECTIONS)
        ]
        assert held[0].recv(1) == b""
        client.looks.release(10)
        assert [stream.readline() for _ in range(2)] == [b"\n", b": still here\n"]


def test_a_body_of_a_get_is_not_read_as_the_next_request(client: Client) -> None:
    port = client.server.server_address[1]
    head = f"Host: {client.host}\r\nAuthorization: Bearer {client.server.access.token}\r\n"
    hidden = f"GET /runs HTTP/1.1\r\n{head}\r\n"
    sent = f"GET /runs HTTP/1.1\r\n{head}Content-Length: {len(hidden)}\r\n\r\n{hidden}"
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        connection.sendall(sent.encode())
        connection.shutdown(socket.SHUT_WR)
        answers = connection.makefile("rb").read()
    assert answers.count(b"HTTP/1.1 ") == 1


def test_a_damaged_journal_is_told_by_name(tmp_path: Path) -> None:
    run = shown_run.finished(tmp_path / "runs" / "one", 2)
    segment = next((run / "journal").glob("events-*.bin"))
    content = bytearray(segment.read_bytes())
    content[len(content) // 2] ^= 255
    segment.write_bytes(content)
    client = Client(tmp_path / "runs")
    try:
        answer = client.allowed("/run/one/data")
        assert answer.status == 409
        assert b"is damaged at byte" in answer.read()
    finally:
        client.close()


def test_a_run_is_read_again_only_after_it_has_changed_and_after_a_pause(tmp_path: Path) -> None:
    run = shown_run.running(tmp_path / "runs" / "one", 2)
    now_s = [0.0]
    runs = WatchedRuns(tmp_path / "runs", clock=lambda: now_s[0])
    first = runs.data("one")
    assert runs.data("one") is first
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(b"\n")
    assert runs.data("one") is first, "a run that writes all the time is not read all the time"
    now_s[0] = 3.0
    assert runs.data("one") is not first


def test_the_page_of_two_runs_has_the_data_of_both(client: Client) -> None:
    place = client.server.access.path_prefix
    page = f"{place}/compare/first/second%20run"
    text = client.allowed(page).read().decode()
    named = re.findall(r'(?:src|href)="([^"#]+)"', text)
    assert [client.allowed(urljoin(page, each)).status for each in named] == [200, 200]
    data = gzip.decompress(base64.b64decode(client.allowed(f"{page}/data").read()))
    head = json.loads(data[4 : 4 + int.from_bytes(data[:4], "little")])
    assert [run["directory"] for run in head["runs"]] == ["first", "second run"]
    stream = client.allowed(f"{page}/events")
    assert stream.readline() == b": still here\n"


def test_a_page_of_two_runs_leads_to_no_third_directory(client: Client) -> None:
    for other in ("..", "%2e%2e", "linked", "no-run", ""):
        for path in (f"/compare/first/{other}", f"/compare/{other}/first"):
            for wanted in ("", "/data", "/events"):
                assert client.allowed(f"{path}{wanted}").status == 404, path
    assert client.allowed("/compare/first/second%20run/data/x").status == 404


def test_only_so_many_pages_are_kept(tmp_path: Path) -> None:
    shown_run.finished(tmp_path / "one", 1)
    names = [f"two-{number}" for number in range(33)]
    for name in names:
        (tmp_path / name).mkdir()
        shutil.copytree(tmp_path / "one" / "journal", tmp_path / name / "journal")
    runs = WatchedRuns(tmp_path)
    first = runs.data("one")
    assert runs.data("one") is first
    for name in names:
        runs.data("one", name)
    assert runs.data("one") is not first


def test_a_single_run_is_shown_without_its_neighbours(root: Path) -> None:
    assert WatchedRuns.at(root / "first").names() == ["first"]


def test_prometheus_asks_with_the_bearer_token(client: Client) -> None:
    answer = client.ask("/metrics", {"Authorization": f"Bearer {client.server.access.token}"})
    text = answer.read().decode()
    assert 'offbeat_version{run="first",metric="version"} 3' in text
    assert "# TYPE offbeat_train_grad_norm gauge" in text


def test_names_and_numbers_of_the_exposition_are_escaped() -> None:
    record = MetricRecord(1, 1, 2.5, {'a/b@"\n': float("nan"), "c": float("-inf")})
    run = 'run="r\\"\\\\\\n"'
    assert exposition([('r"\\\n', record)]).splitlines() == [
        "# TYPE offbeat_a_b___ gauge",
        f'offbeat_a_b___{{{run},metric="a/b@\\"\\n"}} NaN',
        "# TYPE offbeat_c gauge",
        f'offbeat_c{{{run},metric="c"}} -Inf',
        "# TYPE offbeat_record_time_seconds gauge",
        f'offbeat_record_time_seconds{{{run},metric="record_time_seconds"}} 2.5',
        "# TYPE offbeat_version gauge",
        f'offbeat_version{{{run},metric="version"}} 1.0',
    ]


def test_two_metrics_whose_names_become_one_are_two_series_of_one_family() -> None:
    record = MetricRecord(1, 1, 2.5, {"rewards/a-b": 1.0, "rewards/a_b": 2.0})
    lines = exposition([("r", record)]).splitlines()
    assert [line for line in lines if "rewards" in line] == [
        "# TYPE offbeat_rewards_a_b gauge",
        'offbeat_rewards_a_b{run="r",metric="rewards/a-b"} 1.0',
        'offbeat_rewards_a_b{run="r",metric="rewards/a_b"} 2.0',
    ]


def test_each_server_draws_its_own_secrets() -> None:
    one, other = Access.create("127.0.0.1", 80), Access.create("127.0.0.1", 80)
    assert len({one.token, one.cookie, other.token, other.cookie}) == 4
    assert min(len(one.token), len(one.cookie)) >= 32
    assert Access.create("10.0.0.1", 80).hosts == {"10.0.0.1:80"}


@pytest.mark.parametrize("arguments", [["none"], [".", "--host", "::"]])
def test_a_missing_directory_and_every_address_are_refused_in_one_line(
    arguments: list[str],
) -> None:
    told = CliRunner().invoke(app, ["watch", *arguments])
    assert told.exit_code == 2
    assert told.stderr.count("\n") == 1
