"""A page in headless Chromium, driven by the DevTools protocol over a pipe: no port, no websocket, no package."""

import base64
import contextlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import time

LIMIT_S = 120.0
CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
_FLAGS = (
    *(
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--hide-scrollbars",
    ),
    *("--no-first-run", "--disable-extensions", "--disable-background-networking"),
)


class ChromiumPage:
    """A page with a profile in `folder`; `errors` collects exceptions and console errors of its scripts."""

    def __init__(self, folder, width=1280, height=900):
        self.errors = []
        self._size = width, height
        self._folder = str(folder)
        self._numbers = itertools.count(1)
        self._session = None

    def __enter__(self):
        ours_in, theirs_out = os.pipe()
        theirs_in, ours_out = os.pipe()
        redirect = f'exec "$0" "$@" 3<&{theirs_in} 4>&{theirs_out}'
        words = [CHROMIUM, *_FLAGS, f"--user-data-dir={self._folder}", "--remote-debugging-pipe"]
        self._process = subprocess.Popen(
            ["bash", "-c", redirect, *words, "about:blank"],
            pass_fds=[theirs_in, theirs_out],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env={**os.environ, "HOME": self._folder, "XDG_RUNTIME_DIR": self._folder},
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._in, self._out = os.fdopen(ours_in, "rb"), ours_out
        self._rest = b""
        os.set_blocking(ours_in, False)
        targets = self.send("Target.getTargets")["targetInfos"]
        page = next(one["targetId"] for one in targets if one["type"] == "page")
        self._session = self.send("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.send(f"{domain}.enable")
        self.resize(*self._size)
        return self

    def __exit__(self, *_):
        with contextlib.suppress(OSError, AssertionError):
            self._session = None
            self.send("Browser.close")
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(LIMIT_S / 10)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # the browser's other processes too
        self._process.wait()
        self._in.close()
        os.close(self._out)

    def send(self, method, **parameters):
        """Call a method of the protocol; return its result."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        until = time.monotonic() + LIMIT_S
        while time.monotonic() < until:
            for answer in self._received():
                if answer.get("id") == number:
                    assert "error" not in answer, answer
                    return answer["result"]
        raise AssertionError(f"no answer to {method}")

    def _received(self):
        data = self._in.read(1 << 20)
        assert data != b"", "Chromium has ended"
        if data is None:
            time.sleep(0.01)
            return
        *whole, self._rest = (self._rest + data).split(b"\0")
        for text in whole:
            message = json.loads(text)
            if message.get("method") == "Runtime.exceptionThrown":
                self.errors.append(str(message["params"]["exceptionDetails"]))
            if message.get("method") == "Log.entryAdded":
                entry = message["params"]["entry"]
                if entry["level"] == "error":
                    self.errors.append(f"{entry['text']} {entry.get('url', '')}")
            yield message

    def open(self, url):
        """Open a URL."""
        self.send("Page.navigate", url=url)

    def resize(self, width, height, *, is_dark=False):
        """Set the size and the colour scheme."""
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        features = [{"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}]
        self.send("Emulation.setEmulatedMedia", features=features)

    def run(self, script):
        """Return the value of an expression in the page; promises are awaited."""
        answer = self.send(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def await_true(self, script, limit_s=LIMIT_S):
        """Evaluate an expression until it is true; return it."""
        until = time.monotonic() + limit_s
        while not (value := self.run(script)):
            assert time.monotonic() < until, (
                f"{script} stayed false: {self.run('document.body.innerText')}; {self.errors}"
            )
            time.sleep(0.1)
        return value

    def screenshot(self, path, *, is_whole=True):
        """Write a picture of the page as PNG."""
        answer = self.send("Page.captureScreenshot", captureBeyondViewport=is_whole)
        with open(path, "wb") as file:
            file.write(base64.b64decode(answer["data"]))
