"""Hosts for tests: network namespaces on one bridge, each with an sshd, a host key, an address and a /tmp of its own.

Whoever may not make namespaces, or has no sshd, gets no such hosts: `why_none` says what is missing. Nothing of them is
reachable from outside: the bridge lies in a namespace of its own, without any other interface.
"""

import contextlib
import ipaddress
import os
import shutil
import signal
import subprocess
import time
import uuid
from pathlib import Path

NETWORK = "10.77.0"
_SSHD = shutil.which("sshd") or "/usr/sbin/sshd"
_LIMIT_S = 20.0


def why_none():
    """Return why there can be no hosts for tests here, and what to do; empty where there can."""
    if os.geteuid() != 0:
        return "only root may make network namespaces"
    for program, package in (("ip", "iproute2"), ("ssh", "openssh-client"), ("ssh-keygen", "openssh-client"), (_SSHD, "openssh-server")):
        if shutil.which(program) is None:
            return f"there is no {program}: apt-get install {package}"
    done = subprocess.run(["ip", "netns", "add", "sv-probe"], capture_output=True, text=True, check=False, timeout=_LIMIT_S)
    if done.returncode:
        return f"no network namespace can be made: {done.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", "sv-probe"], check=False, timeout=_LIMIT_S)
    return ""


def _run(*words, namespace=None):
    prefix = ["ip", "netns", "exec", namespace] if namespace else []
    subprocess.run([*prefix, *words], check=True, capture_output=True, timeout=_LIMIT_S)


class Hosts:
    """Some hosts; the first one is where a test starts the launcher.

    Args:
        folder: An empty folder of its own.
        count: How many.
    """

    def __init__(self, folder, count):
        self.folder = Path(folder)
        self.names = [f"{NETWORK}.{10 + index}" for index in range(count)]
        tag = uuid.uuid4().hex[:6]
        self.switch = f"sv{tag}s"
        self.spaces = [f"sv{tag}h{index}" for index in range(count)]
        self.servers = []
        self.known = self.folder / "known_hosts"
        self.config = self.folder / "ssh_config"
        try:
            self._make()
        except BaseException:
            self.close()
            raise

    def _make(self):
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # sshd wants it, whoever starts it
        _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.folder / "key"))
        self.config.write_text(f"IdentityFile {self.folder}/key\nUserKnownHostsFile {self.known}\nGlobalKnownHostsFile /dev/null\nIdentitiesOnly yes\n")
        _run("ip", "netns", "add", self.switch)
        _run("ip", "link", "add", "br0", "type", "bridge", namespace=self.switch)
        _run("ip", "link", "set", "br0", "up", namespace=self.switch)
        for index, (space, name) in enumerate(zip(self.spaces, self.names, strict=True)):
            _run("ip", "netns", "add", space)
            _run("ip", "link", "add", "eth0", "netns", space, "type", "veth", "peer", "name", f"p{index}", "netns", self.switch)
            _run("ip", "link", "set", f"p{index}", "master", "br0", "up", namespace=self.switch)
            _run("ip", "addr", "add", f"{name}/24", "dev", "eth0", namespace=space)
            for link in ("lo", "eth0"):
                _run("ip", "link", "set", link, "up", namespace=space)
        for index in range(len(self.names)):
            self._serve(index)

    def _serve(self, index, *, is_known=True):
        key = self.folder / f"host{index}"
        _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key))
        if is_known:
            with self.known.open("a") as file:
                file.write(f"{self.names[index]} {' '.join(Path(f'{key}.pub').read_text().split()[:2])}\n")
        config = self.folder / f"sshd{index}.conf"
        config.write_text(
            f"Port 22\nListenAddress {self.names[index]}\nHostKey {key}\nAuthorizedKeysFile {self.folder}/key.pub\nPidFile none\n"
            "StrictModes no\nUsePAM no\nPermitRootLogin yes\nPasswordAuthentication no\nMaxStartups 100:30:200\nPrintMotd no\n"
        )
        with (self.folder / f"sshd{index}.log").open("wb") as log:
            server = subprocess.Popen(
                ["ip", "netns", "exec", self.spaces[index], _SSHD, "-D", "-e", "-f", str(config)],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=log,
            )  # fmt: skip
        self.servers.append(server)
        until = time.monotonic() + _LIMIT_S
        while "listening on" not in (self.folder / f"sshd{index}.log").read_text():
            if server.poll() is not None or time.monotonic() > until:
                raise AssertionError((self.folder / f"sshd{index}.log").read_text())
            time.sleep(0.01)

    @property
    def prefix(self):
        """What starts a program on the first host."""
        return ["ip", "netns", "exec", self.spaces[0]]

    @property
    def ssh(self):
        """The options by which the launcher reaches the others."""
        return ["--ssh", f"ssh -F {self.config}"]

    def processes(self, index):
        """Return the processes of a host beside its sshd: number -> command line."""
        space = os.stat(f"/run/netns/{self.spaces[index]}").st_ino
        found = {}
        for entry in os.listdir("/proc"):
            if entry.isdigit():
                with contextlib.suppress(OSError):
                    words = Path(f"/proc/{entry}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                    if os.stat(f"/proc/{entry}/ns/net").st_ino == space and not words.startswith(("sshd: " + _SSHD, _SSHD)):
                        found[int(entry)] = words
        return found

    def agent(self, index):
        """Return the process of the launcher's agent on a host."""
        found = [pid for pid, words in self.processes(index).items() if "syncvar_launcher.hostagent" in words and not words.startswith(("ssh", "sh ", "bash"))]
        assert len(found) == 1, self.processes(index)
        return found[0]

    def await_quiet(self, limit_s=20.0):
        """Wait until nothing of a job is left on any host; return what is."""
        until = time.monotonic() + limit_s
        while True:
            left = {name: found for index, name in enumerate(self.names) if (found := self.processes(index))}
            if not left or time.monotonic() > until:
                return left
            time.sleep(0.05)

    def listening(self, index):
        """Return the addresses at which a host listens over tcp, but for its sshd."""
        return [address for address, _ in self._listeners(index)]

    def ports(self, index):
        """Return where a host listens over tcp, as address:port, but for its sshd."""
        return [f"[{address}]:{port}" if ":" in address else f"{address}:{port}" for address, port in self._listeners(index)]

    def _listeners(self, index):
        lines = subprocess.run(
            ["ip", "netns", "exec", self.spaces[index], "cat", "/proc/net/tcp", "/proc/net/tcp6"],
            capture_output=True, text=True, check=True, timeout=_LIMIT_S,
        ).stdout.splitlines()  # fmt: skip
        found = []
        for line in lines:
            fields = line.split()
            if len(fields) > 3 and fields[3] == "0A":
                digits, port = fields[1].split(":")
                words = [bytes.fromhex(digits[start : start + 8])[::-1] for start in range(0, len(digits), 8)]  # each in the host's order
                if int(port, 16) != 22:
                    found.append((str(ipaddress.ip_address(b"".join(words))), int(port, 16)))
        return found

    def set_link(self, index, state):
        """Take a host's link down, or up again."""
        _run("ip", "link", "set", f"p{index}", state, namespace=self.switch)

    def set_rate(self, index, mbit):
        """Let no more than so many Mbit/s out of a host, and into it."""
        for device, namespace in (("eth0", self.spaces[index]), (f"p{index}", self.switch)):
            _run("tc", "qdisc", "replace", "dev", device, "root", "tbf", "rate", f"{mbit}mbit", "burst", "128kb", "latency", "50ms", namespace=namespace)

    def close(self):
        """Take all down. Idempotent."""
        for server in self.servers:
            server.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.wait(5.0)
        for index, space in enumerate(self.spaces):
            if Path(f"/run/netns/{space}").exists():
                for pid in self.processes(index):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
        for space in (*self.spaces, self.switch):
            if Path(f"/run/netns/{space}").exists():
                subprocess.run(["ip", "netns", "del", space], check=False, timeout=_LIMIT_S)
        self.servers.clear()
