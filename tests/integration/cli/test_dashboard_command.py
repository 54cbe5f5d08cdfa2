"""`syncvar-launch --dashboard` and `syncvar dashboard` with real jobs, and the page in headless Chromium."""

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import urllib.parse
from pathlib import Path

import pytest

from syncvar.cli.dashboard import split_address
from tests.support.chromium_pages import ChromiumPage
from tests.support.fake_launcher import job_status
from tests.support.launching import await_true, free_ports, state
from tests.unit.cli.test_dashboard import Site, stacks_answer

LIMIT_S = 120.0
STEPS = """
import os, time
import numpy as np
import probe, syncvar as sv

strategy = sv.MirroredStrategy()
with strategy.scope():
    w = sv.Variable(np.zeros(1000), name="weights", aggregation="SUM")


def step():
    if sv.rank() == 2:
        time.sleep(0.05)  # late
    w.assign_add(np.ones(1000))


probe.note("pid")
print("it begins")
gate = os.path.join(probe.FOLDER, "gate-end" + os.environ["SYNCVAR_RESTARTS"])
while not sv.all_reduce(float(os.access(gate, os.F_OK))):
    strategy.run(step)
"""


def url_of(job):
    """Return the URL that the launcher prints."""
    pattern = r"dashboard: (http://\S+/\?token=[0-9a-f]{32})\n"
    return await_true(lambda: re.search(pattern, job.err), LIMIT_S, "the URL")[1]


def ask(url, path, method="GET"):
    """Return code and body of an answer, with the token of a URL."""
    parts = urllib.parse.urlsplit(url)
    token = urllib.parse.parse_qs(parts.query)["token"][0]
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=LIMIT_S)
    try:
        connection.request(method, path, headers={"Authorization": f"Bearer {token}"})
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def await_ranks(url, count):
    """Wait until the dashboard has ranks with calls; return the status."""

    def ranks():
        status = json.loads(ask(url, "/status.json")[1])["status"]
        rows = status.get("ranks", [])
        return status if len(rows) == count and all(row["calls"] > 3 for row in rows) else None

    return await_true(ranks, LIMIT_S, "a status of all ranks")


def dashboards_of(launcher):
    """Return the processes of a launcher's dashboard."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if b"syncvar.cli.dashboard" in words and str(launcher).encode() in words:
            found.append(int(path.parent.name))
    return found


def test_option_shows_a_real_job(launch):
    job = launch(STEPS, workers=3, options=["--dashboard"])
    url = url_of(job)
    status = await_ranks(url, 3)
    assert status["job"]["pid"] == job.process.pid
    assert {row["state"] for row in status["ranks"]} <= {"running", "waiting"}
    code, text = ask(url, "/stacks/2", "POST")
    assert (code, "rank 2" in text) == (200, True)
    assert 'syncvar_calls_total{host="' in ask(url, "/metrics")[1]
    assert ask(url, "/health")[1] == "ok\n"
    [pid] = dashboards_of(job.process.pid)
    assert os.getpriority(os.PRIO_PROCESS, pid) >= 10
    assert b"token" not in Path(f"/proc/{pid}/cmdline").read_bytes()
    assert url[-32:].encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()
    job.open_gate("end0")
    assert job.wait() == 0
    assert not state(pid)


@pytest.mark.slow
def test_it_ends_with_a_launcher_that_is_killed(launch):
    job = launch(STEPS, workers=2, options=["--dashboard"])
    await_ranks(url_of(job), 2)
    [pid] = dashboards_of(job.process.pid)
    job.send(signal.SIGKILL)
    await_true(lambda: not state(pid), LIMIT_S, "the end of the dashboard")


@pytest.mark.slow
def test_it_follows_a_restart(launch):
    script = (
        STEPS + "if sv.rank() == 0 and os.environ['SYNCVAR_RESTARTS'] == '0': raise SystemExit(3)\n"
    )
    job = launch(script, workers=2, options=["--dashboard", "--max-restarts", "1"])
    url = url_of(job)
    assert await_ranks(url, 2)["job"]["restarts"] == 0
    [pid] = dashboards_of(job.process.pid)
    job.open_gate("end0")
    await_true(lambda: await_ranks(url, 2)["job"]["restarts"] == 1, LIMIT_S, "the second attempt")
    assert dashboards_of(job.process.pid) == [pid]
    records = json.loads(ask(url, "/records")[1])
    assert records
    assert json.loads(ask(url, f"/records/{records[0]['name']}")[1])["format"]
    job.open_gate("end1")
    assert job.wait() == 0
    assert job.err.count("dashboard: http") == 1


def test_address_that_is_taken_starts_nothing(launch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        job = launch(STEPS, workers=2, options=[f"--dashboard=127.0.0.1:{port}"])
        assert job.wait() == 78
    assert (
        f"the dashboard cannot listen at 127.0.0.1, port {port}: Address already in use" in job.err
    )
    assert not job.events("began")


@pytest.mark.slow
def test_command_shows_a_job_that_runs(launch):
    job = launch(STEPS, workers=2)
    job.await_events("pid", 2)
    [port] = [free_ports()]
    words = [
        sys.executable,
        "-m",
        "syncvar",
        "dashboard",
        str(job.process.pid),
        "--address",
        f"localhost:{port}",
    ]
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as command:
        line = command.stdout.readline()
        url = line.removeprefix("dashboard: ").strip()
        assert split_address(urllib.parse.urlsplit(url).netloc)[1] == port
        await_ranks(url, 2)
        job.open_gate("end0")
        assert job.wait() == 0
        assert command.wait(LIMIT_S) == 0
        assert command.stderr.read() == "syncvar: the job has ended\n"


# -- the page in a browser -------------------------------------------------------------------------

TEXT = "document.body.innerText"


@pytest.fixture
def page():
    with (
        tempfile.TemporaryDirectory(prefix="sv-page-", ignore_cleanup_errors=True) as folder,
        ChromiumPage(folder) as page,
    ):
        yield page


@pytest.mark.slow
@pytest.mark.browser
def test_page_shows_a_real_job_live_and_its_end(launch, page):
    job = launch(STEPS, workers=3, options=["--dashboard"])
    page.open(url_of(job))
    page.await_true("document.querySelectorAll('#ranks tbody tr').length === 3")
    page.await_true("location.search === ''")  # the token has left the address
    page.await_true(
        "[...document.querySelectorAll('#waits li')].some(one => one.innerText.includes('for rank 2'))"
    )
    page.await_true(f"{TEXT}.includes('assign_add') && {TEXT}.includes('it begins')")
    page.await_true("page.points.length > 3")
    page.run("document.querySelectorAll('#ranks button')[2].click()")
    page.await_true("document.querySelector('#viewer-text').innerText.includes('script.py')")
    page.run("document.querySelector('#viewer-close').click()")
    page.run("location.reload()")  # with the cookie alone
    page.await_true("document.querySelector('#live')?.innerText === 'live'")
    job.open_gate("end0")
    assert job.wait() == 0
    page.await_true(f"{TEXT}.includes('The job has ended.')")
    page.await_true("[...document.querySelectorAll('#ranks button')].every((one) => one.disabled)")
    assert page.errors == []


@pytest.mark.slow
@pytest.mark.browser
def test_page_escapes_text_and_fits_a_phone(page):
    with tempfile.TemporaryDirectory(prefix="sv-dash-") as folder:
        html = "<img src=x onerror=document.title='broken'>"
        status = job_status(6, folder=folder, log=[html])
        status["job"] |= {"name": html, "command": html, "hosts": [html]}
        status["stragglers"][0]["text"] = html
        status["calls"][0] |= {"call": html, "variable": html, "path": html}
        for rank in status["ranks"]:
            rank |= {"call": html, "site": html, "host": html, "state": html, "program": html}
        (Path(folder) / "flight-rank0.json").write_text(html)
        with Site(folder, status=status, stacks=stacks_answer) as site:
            for width, is_dark in ((390, False), (390, True), (1280, True), (1280, False)):
                page.resize(width, 844, is_dark=is_dark)
                page.open(f"http://127.0.0.1:{site.port}/?token={site.token}")
                page.await_true("document.querySelectorAll('#ranks tbody tr').length === 6")
                page.await_true("document.querySelectorAll('#records button').length === 1")
                assert page.run("document.documentElement.scrollWidth") <= width
            page.run("document.querySelector('#records button').click()")
            page.await_true("document.querySelector('#viewer-text').innerText.includes('onerror')")
            assert page.run("document.images.length") == 0
            assert "broken" not in page.run("document.title.replace(/.*onerror.*/, '')")
            page.run("document.querySelector('#viewer-close').click()")
            check_keyboard_and_names(page)
    assert page.errors == []


def check_keyboard_and_names(page):
    """Arrow keys read the matrix, and everything that can be used has a name."""
    page.run("document.querySelector('#matrix td').focus()")
    for key in ("ArrowRight", "ArrowRight"):
        page.send("Input.dispatchKeyEvent", type="keyDown", key=key)
    sentence = "document.querySelector('#matrix-cell').innerText"
    page.await_true(
        f"{sentence}.replaceAll('\\u00a0', ' ') === 'Rank 0 waits 41 % of its time for rank 2.'"
    )
    unnamed = page.run(
        "[...document.querySelectorAll('button, [role=img], [tabindex=\"0\"]')].filter(one => one.offsetParent !== null && "
        "!one.innerText && !one.getAttribute('aria-label') && !one.getAttribute('aria-labelledby')).map(one => one.outerHTML)"
    )
    assert unnamed == []
