"""The HTTP server of the dashboard before a launcher that answers from a script: who may ask, and how much it bears."""

import contextlib
import http.client
import json
import os
import socket
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from syncvar.cli.dashboard import new_token, open_listener, page_url, split_address
from syncvar.cli.dashboard.http_server import CONNECTIONS_MAX, AccessRules, serve
from syncvar.cli.dashboard.job_poller import JobPoller, chart_point, plain_json
from syncvar.core.errors import ConfigError
from tests.support.fake_launcher import FakeLauncher, job_status, rank_status
from tests.support.launching import await_true
from tests.support.paths import REPOSITORY

LIMIT_S = 60.0


def stacks_answer(request):
    frames = [["/job/train.py", 49, "step"], ["/job/train.py", 80, "<module>"]]
    rows = [
        {
            "rank": rank,
            "pid": 1,
            "position": "not waiting",
            "instead": "",
            "threads": [[1, True, frames]],
        }
        for rank in range(4)
    ]
    return {"job": job_status()["job"], "ranks": rows}


class Site:
    """A dashboard of a fake launcher in this process."""

    def __init__(self, folder, host="127.0.0.1", **answers):
        self.fake = FakeLauncher(
            folder, **{"status": job_status(folder=folder), "stacks": stacks_answer, **answers}
        )
        self.listener = open_listener(host, 0)
        self.port = self.listener.getsockname()[1]
        self.token = new_token()
        self.poller = JobPoller(os.getpid(), self.fake.path)
        self._end, self._begin = os.pipe()
        rules = AccessRules(self.token, self.listener, host)
        arguments = (self.listener, rules, self.poller, self._end)
        self._thread = threading.Thread(target=serve, args=arguments)

    def __enter__(self):
        self.fake.__enter__()
        self._thread.start()
        return self

    def __exit__(self, *_):
        self.end_job()
        self._thread.join(LIMIT_S)
        self.fake.__exit__()
        os.close(self._end)

    def end_job(self):
        with contextlib.suppress(OSError):
            os.close(self._begin)

    def ask(self, path, method="GET", token=True, **headers):
        """Return the code, the headers and the body of an answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=LIMIT_S)
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        if token:
            sent.setdefault("Authorization", f"Bearer {self.token}")
        with contextlib.closing(connection):
            connection.request(method, path, headers=sent)
            answer = connection.getresponse()
            return answer.status, dict(answer.getheaders()), answer.read().decode()

    def await_status(self):
        """Wait for the first answer of the launcher, and return it."""
        await_true(lambda: self.poller.snapshot.state == "answers", LIMIT_S, "an answer")
        return json.loads(self.ask("/status.json")[2])["status"]

    def connect(self):
        return socket.create_connection(("127.0.0.1", self.port), LIMIT_S)

    def stream(self):
        """Return a connection that reads events, with the header read."""
        end = self.connect()
        head = (
            f"GET /events HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {self.token}\r\n\r\n"
        )
        end.sendall(head.encode())
        return end

    def healthy(self):
        """Return whether /health answers with ok."""
        with contextlib.suppress(OSError, http.client.HTTPException):
            return self.ask("/health", token=False)[0] == 200
        return False


@pytest.fixture
def site(monkeypatch):
    monkeypatch.setattr("syncvar.cli.dashboard.http_server._TICK_S", 0.02)
    monkeypatch.setattr("syncvar.cli.dashboard.http_server._LAST_EVENT_S", LIMIT_S)
    with contextlib.ExitStack() as stack:

        def make(**keywords):
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="sv-dash-"))
            return stack.enter_context(Site(folder, **keywords))

        yield make


def read_until(end, text):
    """Return what a stream sends up to a text."""
    data = b""
    while text not in data:
        more = end.recv(1 << 16)
        assert more, data
        data += more
    return data.decode()


# Who may ask.


def test_pages_need_the_token(site):
    here = site()
    here.await_status()
    for path in (
        "/",
        "/page.js",
        "/page.css",
        "/status.json",
        "/events",
        "/metrics",
        "/records",
        "/nothing",
    ):
        assert here.ask(path, token=False)[0] == 403, path
        assert here.ask(path, token=False, Authorization="Bearer " + "0" * 32)[0] == 403, path
        assert here.ask(f"{path}?token={'0' * 32}", token=False)[0] == 403, path
    assert here.ask("/stacks/0", "POST", token=False)[0] == 403
    assert (
        here.ask("/status.json?token=" + here.token, token=False)[0] == 403
    )  # only the page takes it
    assert here.ask("/health", token=False)[0] == 200
    assert here.ask("/nothing")[0] == 404


def test_url_hands_the_token_to_a_cookie(site):
    here = site()
    url = page_url(here.listener, here.token)
    path = url.removeprefix(f"http://127.0.0.1:{here.port}")
    code, headers, body = here.ask(path, token=False)
    assert (code, "<title>syncvar</title>" in body) == (200, True)
    cookie, *attributes = headers["Set-Cookie"].split("; ")
    assert set(attributes) == {"Path=/", "HttpOnly", "SameSite=Strict"}
    assert here.ask("/page.js", token=False, Cookie=f"other=1; {cookie}")[0] == 200
    assert here.ask("/page.js", token=False, Cookie=cookie[:-1] + "x")[0] == 403
    assert here.token not in body


def test_headers_forbid_other_sites(site):
    here = site()
    for path in ("/", "/status.json", "/nothing"):
        headers = here.ask(path)[1]
        assert "default-src 'none'" in headers["Content-Security-Policy"]
        assert "unsafe" not in headers["Content-Security-Policy"]
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["X-Frame-Options"] == "DENY"
        assert headers["Cache-Control"] == "no-store"
        assert not [name for name in headers if name.lower().startswith("access-control")]
    page = "".join(here.ask(path)[2] for path in ("/", "/page.css", "/page.js"))
    assert page.replace("http://www.w3.org/2000/svg", "").count("http") == 0  # nothing from outside


def test_only_names_of_this_machine_are_answered(site):
    here = site()
    for host in ("127.0.0.1:80", "localhost:9", "LOCALHOST", "[::1]:7", "127.8.8.8"):
        assert here.ask("/", Host=host)[0] == 200, host
    others = (
        "evil.example",
        "127.0.0.1.evil.example",
        "10.0.0.1",
        "",
        "[::1",
        "localhost.evil.example:80",
    )
    for host in others:  # even with the token: DNS rebinding
        assert here.ask("/", Host=host)[0] == 403, host
        assert here.ask("/health", token=False, Host=host)[0] == 403, host


def test_stated_address_has_more_names(site):
    with open_listener("0.0.0.0", 0) as listener:
        rules = AccessRules("t", listener, "Node7.example")
        url = page_url(listener, "t")
    assert url.startswith(f"http://{socket.gethostname()}:")
    for host in ("10.0.0.1:80", "node7.example", socket.gethostname(), "localhost"):
        assert rules.is_known_host(host), host
    assert not rules.is_known_host("evil.example")


def test_stacks_come_only_by_post_from_the_page(site):
    here = site()
    cookie = here.ask(f"/?token={here.token}", token=False)[1]["Set-Cookie"].partition(";")[0]
    own = f"http://127.0.0.1:{here.port}"
    code, _, text = here.ask("/stacks/2", "POST", token=False, Cookie=cookie, Origin=own)
    assert code == 200
    assert "train.py:49 in step" in text
    assert "rank 2" in text
    assert "rank 1" not in text
    bad = [
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {},
        {"Origin": own, "Sec_Fetch_Site": "cross-site"},
    ]
    for headers in bad:
        assert here.ask("/stacks/2", "POST", token=False, Cookie=cookie, **headers)[0] == 403, (
            headers
        )
    assert here.ask("/stacks/2")[0] == 404  # GET
    for path in ("/stacks/9", "/stacks/", "/stacks/-1", "/stacks/x", "/stacks/99999999999", "/"):
        assert here.ask(path, "POST")[0] == 404, path
    assert here.ask("/stacks/1", "POST")[0] == 200
    assert len(here.fake.questions("stacks")) <= 2 + int(LIMIT_S)  # several buttons share an answer


def test_other_methods_and_bodies_are_refused(site):
    here = site()
    for method in ("PUT", "DELETE", "OPTIONS", "PATCH", "TRACE"):
        assert here.ask("/", method)[0] == 405, method
    for headers in (
        {"Content_Length": "99999"},
        {"Content_Length": "-1"},
        {"Transfer_Encoding": "chunked"},
    ):
        assert here.ask("/status.json", **headers)[0] == 400, headers
    with here.connect() as end:
        end.sendall(b"\x16\x03\x01 no HTTP\r\n\r\n")
        assert b" 400 " in read_until(end, b"\r\n").encode()


# What it answers.


def test_status_and_history(site):
    here = site()
    status = here.await_status()
    assert status["job"]["name"] == "1b2c3d4e"
    assert status["ranks"][0]["waits"]["2"] == pytest.approx(0.40625)
    assert "log" not in status  # it has an event of its own
    with here.stream() as end:
        text = read_until(end, b"event: point")
        assert text.startswith("HTTP/1.1 200")
        assert "Content-Type: text/event-stream" in text
        events = dict(part.split("\ndata: ")[:2] for part in text.split("event: ")[1:4])
        [first, *_] = json.loads(events["history"])
        assert first[1:3] == [5.0, 16e6]
        assert first[3][0] == [0, 0.438]
        assert json.loads(events["status"])["launcher"]["state"] == "answers"


@pytest.mark.slow
def test_log_comes_while_somebody_looks(site):
    here = site()
    with here.stream() as end:
        assert "<b>reading</b>" in read_until(end, b"shard 7")
        asked = {"question": "status", "log": True}
        await_true(lambda: here.fake.asked[-1][1] == asked, LIMIT_S, "a question with the log")


def test_end_of_the_job_reaches_the_page(site):
    here = site()
    here.await_status()
    with here.stream() as end:
        read_until(end, b"event: status")
        here.end_job()
        assert "The job has ended." in read_until(end, b'"ended"')


@pytest.mark.slow
def test_silent_launcher_is_shown_and_found_again(site, monkeypatch):
    monkeypatch.setattr("syncvar.cli.running_jobs.job_folders", lambda environ: [])
    here = site()
    here.await_status()
    here.fake.answers["status"] = None
    with here.stream() as end:
        read_until(end, b'"silent"')
        assert not here.healthy()
        assert here.ask("/health", token=False)[0] == 503
        here.fake.answers["status"] = job_status()
        read_until(end, b"event: point")
    await_true(here.healthy, LIMIT_S, "health")


ODD = {
    "no status": {"job": job_status()["job"]},
    "another format": job_status(format="syncvar status 9"),
    "lists that are none": job_status(
        ranks=2, calls=None, links=7, stragglers="x", servers=[3, None]
    ),
    "ranks that are none": {
        **job_status(),
        "ranks": [None, {}, {"rank": "<b>", "waits": 3, "steps_per_s": "fast"}],
    },
    "no job": {**job_status(), "job": None},
    "numbers that JSON lacks": {
        **job_status(),
        "ranks": [
            rank_status(
                0, wait_share=float("nan"), rss_bytes=float("inf"), steps_per_s=float("nan")
            )
        ],
    },
    "bytes for text": {**job_status(), "log": [b"\xff\xfe", 3], "window_s": b"\xff"},
}


def test_odd_answers_do_not_end_it(site):
    here = site()
    here.await_status()
    for name, answer in ODD.items():
        here.poller.receive(answer, time.monotonic())
        for path in ("/status.json", "/metrics", "/records"):
            code, _, body = here.ask(path)
            assert code == 200, (name, body)
            if path != "/metrics":
                json.loads(body, parse_constant=pytest.fail)


@pytest.mark.slow
def test_odd_bytes_do_not_end_it(site, monkeypatch):
    monkeypatch.setattr("syncvar.cli.running_jobs.job_folders", lambda environ: [])
    here = site(status=b"\xc1\xc1")
    for answer in (b"\x93\x01", b"\x81\xa6format", [1, 2], None):
        number = here.poller.snapshot.number
        here.fake.answers["status"] = answer
        here.poller.look()
        await_true(lambda at=number: here.poller.snapshot.number > at + 1, LIMIT_S, "snapshots")
        assert here.poller.snapshot.state == "silent"
    here.fake.answers["status"] = job_status()
    here.await_status()


def test_records_are_listed_and_read(site):
    here = site()
    folder = Path(here.fake.path).parent
    (folder / "flight-rank1.json").write_text('{"reason": "<script>"}')
    (folder / "secret.txt").write_text("secret")
    (folder / "flight-rank2.json").symlink_to(folder / "secret.txt")
    os.mkfifo(folder / "flight-rank3.json")
    here.await_status()
    names = [one["name"] for one in json.loads(here.ask("/records")[2])]
    assert names == ["flight-rank1.json"]
    code, headers, body = here.ask("/records/flight-rank1.json")
    assert (code, headers["Content-Type"], body) == (
        200,
        "text/plain; charset=utf-8",
        '{"reason": "<script>"}',
    )
    assert here.ask("/records/flight-rank3.json")[2] == ""  # no wait for a writer
    for name in (
        "secret.txt",
        "..%2fsecret.txt",
        "../secret.txt",
        "flight-rank2.json",
        "flight-rank9.json",
        "%00",
    ):
        assert here.ask(f"/records/{name}")[0] in {403, 404}, name


def test_metrics_have_the_documented_names(site):
    here = site()
    here.await_status()
    code, headers, text = here.ask("/metrics")
    assert (code, headers["Content-Type"]) == (200, "text/plain; version=0.0.4; charset=utf-8")
    for line in (
        'syncvar_rank_wait_ratio{host="a",rank="0"} 0.4375',
        'syncvar_rank_resident_memory_bytes{host="b",rank="1"} 1.34217728e+08',
        'syncvar_calls_total{host="b",rank="3"} 1003.0',
        'syncvar_rank_waits_for_ratio{late_rank="2",rank="0"} 0.40625',
        'syncvar_straggler_cost_ratio{rank="2"} 0.40625',
        'syncvar_job_ranks{state="waiting"} 3.0',
        "syncvar_up 1.0",
    ):
        assert line in text.splitlines(), text
    names = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")}
    page = (REPOSITORY / "docs/how-to/watch-a-job.md").read_text()
    documented = {
        line.split("`")[1].partition("{")[0]
        for line in page.splitlines()
        if line.startswith("| `syncvar_")
    }
    assert documented == names
    board = (REPOSITORY / "configs/grafana-dashboard.json").read_text()
    used = {
        word
        for word in board.replace("(", " ").replace("{", " ").replace("[", " ").split()
        if "syncvar_" in word
    }
    used = {word.strip('",)') for word in used if word.strip('",)').startswith("syncvar_")}
    assert used <= names
    assert len(used) >= 8
    assert json.loads(board)["title"] == "syncvar"


def test_metrics_without_the_package_name_the_command(site, monkeypatch):
    monkeypatch.delitem(sys.modules, "syncvar.cli.dashboard.prometheus_metrics", raising=False)
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    code, _, text = site().ask("/metrics")
    assert code == 501
    assert 'pip install "syncvar[watch]"' in text


# How much it bears.


@pytest.mark.slow
def test_floods_reach_neither_health_nor_launcher(site):
    here = site()
    here.await_status()
    began = time.monotonic()
    for number in range(1000):
        assert (
            here.ask("/status.json", token=False, Authorization=f"Bearer {number:032x}")[0] == 403
        )
    with contextlib.ExitStack() as stack:
        for number in range(50):  # they begin a request and never end it, or never read the answer
            end = stack.enter_context(here.connect())
            end.sendall(
                b"GET / HTTP/1.1\r\nHost: 127."
                if number % 2
                else b"GET /page.js HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
            )
        readers = [stack.enter_context(here.stream()) for _ in range(10)]
        await_true(here.healthy, LIMIT_S, "health")
        for end in readers:
            read_until(end, b"event: status")
        lasted_s = time.monotonic() - began
        assert len(here.fake.questions("status")) <= lasted_s + 3


@pytest.mark.slow
def test_strangers_make_room(site):
    here = site()
    here.await_status()
    with contextlib.ExitStack() as stack:
        reader = stack.enter_context(here.stream())
        read_until(reader, b"event: status")
        strangers = [stack.enter_context(here.connect()) for _ in range(CONNECTIONS_MAX + 20)]
        assert here.ask("/status.json")[0] == 200
        assert strangers[0].recv(10) == b""  # the oldest has gone
        read_until(reader, b"event: point")  # who has the token stays


@pytest.mark.slow
def test_stranger_that_trickles_is_cut_off(site):
    here = site()
    with here.connect() as end, contextlib.suppress(BrokenPipeError, ConnectionResetError):
        end.settimeout(0.2)
        until = time.monotonic() + LIMIT_S
        while time.monotonic() < until:
            end.sendall(b"G")
            with contextlib.suppress(TimeoutError):
                if end.recv(1) == b"":
                    return
        pytest.fail("it stayed open")


@pytest.mark.slow
def test_pages_have_a_limit(site):
    here = site()
    with contextlib.ExitStack() as stack:
        for _ in range(20):
            read_until(stack.enter_context(here.stream()), b"event: status")
        with here.stream() as more:
            assert "503" in read_until(more, b"\r\n")
        assert here.ask("/status.json")[0] == 200


@pytest.mark.slow
def test_one_question_each_second_while_somebody_looks(site):
    began = time.monotonic()
    here = site()
    with here.stream() as end:
        for _ in range(3):
            read_until(end, b"event: point")
        assert len(here.fake.questions("status")) <= time.monotonic() - began + 2


# The pieces.


def test_history_keeps_ranks_and_plain_numbers():
    status = plain_json(
        {"ranks": [{"rank": 3, "wait_share": 0.25, "steps_per_s": float("nan"), "bytes_per_s": 2}]}
    )
    assert chart_point(status, 7.04) == [7.0, 0.0, 2, [[3, 0.25]]]


def test_addresses(monkeypatch):
    assert split_address("node1") == ("node1", 0)
    for text in ("", ":80", "a:b", "a:123456"):
        with pytest.raises(ConfigError, match="--address must be"):
            split_address(text)
    with open_listener("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            ConfigError,
            match=rf"cannot listen at 127\.0\.0\.1, port {port}: Address already in use",
        ):
            open_listener("127.0.0.1", port)
    with pytest.raises(ConfigError, match=r"cannot listen at 192\.0\.2\.1"):
        open_listener("192.0.2.1", 0)
