"""Hosts for tests: network namespaces on one bridge, each with an sshd, a host key, an address and temporary folders of its own.

Whoever may not make namespaces, or has no sshd, gets no such hosts: `why_none` says what is missing. Nothing of them is
reachable from outside: the bridge lies in a namespace of its own, without any other interface.
"""

import contextlib
import ipaddress
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

from tests.support.paths import RANK_SCRIPTS

NETWORK = "10.77.0"
NETWORK_6 = "fd77::"
_SSHD = shutil.which("sshd") or "/usr/sbin/sshd"
_LIMIT_S = 60.0
_LISTENS, _OPEN = (
    "0A",
    ("01", "08"),
)  # states of sockets, as the kernel shows them; what is closing belongs to nobody any more


def why_none():
    """Return why there can be no hosts for tests here, and what to do; empty where there can."""
    if os.geteuid() != 0:
        return "only root may make network namespaces"
    for program, package in (
        ("ip", "iproute2"),
        ("ssh", "openssh-client"),
        ("ssh-keygen", "openssh-client"),
        (_SSHD, "openssh-server"),
    ):
        if shutil.which(program) is None:
            return f"there is no {program}: apt-get install {package}"
    probe = f"sv-probe-{uuid.uuid4().hex[:8]}"  # two processes of tests ask at the same time, and must come to the same
    done = subprocess.run(
        ["ip", "netns", "add", probe], capture_output=True, text=True, check=False, timeout=_LIMIT_S
    )
    if done.returncode:
        return f"no network namespace can be made: {done.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", probe], check=False, timeout=_LIMIT_S)
    return ""


def _run(*words, namespace=None):
    prefix = ["ip", "netns", "exec", namespace] if namespace else []
    subprocess.run([*prefix, *words], check=True, capture_output=True, timeout=_LIMIT_S)


class Hosts:
    """Some hosts; the first one is where a test starts the launcher.

    Args:
        folder: An empty folder of its own.
        count: How many.
        ahead_s: By how many seconds the clocks of hosts are ahead of that of this machine, by host.
    """

    def __init__(self, folder, count, ahead_s=None):
        self.folder = Path(folder)
        self.ahead_s = ahead_s or {}
        self.names = [f"{NETWORK}.{10 + index}" for index in range(count)]
        self.names_6 = [f"{NETWORK_6}{10 + index}" for index in range(count)]
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
        self.config.write_text(
            f"IdentityFile {self.folder}/key\nUserKnownHostsFile {self.known}\nGlobalKnownHostsFile /dev/null\nIdentitiesOnly yes\n"
        )
        _run("ip", "netns", "add", self.switch)
        _run("ip", "link", "add", "br0", "type", "bridge", namespace=self.switch)
        _run("ip", "link", "set", "br0", "up", namespace=self.switch)
        for index in range(len(self.names)):
            self._connect(index)
        for index in range(len(self.names)):
            self.servers.append(self._serve(index))

    def _connect(self, index):
        space = self.spaces[index]
        _run("ip", "netns", "add", space)
        own = f"02:00:00:00:77:{10 + index:02x}"  # the same after `restore`: the others remember it
        _run(
            "ip",
            "link",
            "add",
            "eth0",
            "address",
            own,
            "netns",
            space,
            "type",
            "veth",
            "peer",
            "name",
            f"p{index}",
            "netns",
            self.switch,
        )
        _run("ip", "link", "set", f"p{index}", "master", "br0", "up", namespace=self.switch)
        _run("ip", "addr", "add", f"{self.names[index]}/24", "dev", "eth0", namespace=space)
        _run(
            "ip",
            "addr",
            "add",
            f"{self.names_6[index]}/64",
            "dev",
            "eth0",
            "nodad",
            namespace=space,
        )
        for link in ("lo", "eth0"):
            _run("ip", "link", "set", link, "up", namespace=space)

    def temporary(self, index):
        """Return the folder in which a host keeps what lives as long as a job, where ssh has led there."""
        return self.folder / f"t{index}"

    def _serve(self, index):
        key = self.folder / f"host{index}"
        if not key.exists():
            _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key))
            with self.known.open("a") as file:
                names = f"{self.names[index]},{self.names_6[index]}"
                file.write(f"{names} {' '.join(Path(f'{key}.pub').read_text().split()[:2])}\n")
        self.temporary(index).mkdir(mode=0o700, exist_ok=True)
        config = self.folder / f"sshd{index}.conf"
        config.write_text(
            f"Port 22\nListenAddress {self.names[index]}\nListenAddress {self.names_6[index]}\nHostKey {key}\nAuthorizedKeysFile {self.folder}/key.pub\nPidFile none\n"
            "StrictModes no\nUsePAM no\nPermitRootLogin yes\nPasswordAuthentication no\nMaxStartups 100:30:200\nPrintMotd no\n"
            f"SetEnv XDG_RUNTIME_DIR={self.temporary(index)} TMPDIR={self.temporary(index)}\n"
        )
        with (self.folder / f"sshd{index}.log").open("wb") as log:
            server = subprocess.Popen(
                [*self._in_space(index), _SSHD, "-D", "-e", "-f", str(config)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log,
            )
        until = time.monotonic() + _LIMIT_S
        while "listening on" not in (self.folder / f"sshd{index}.log").read_text():
            if server.poll() is not None or time.monotonic() > until:
                server.kill()
                raise AssertionError((self.folder / f"sshd{index}.log").read_text())
            time.sleep(0.01)
        return server

    def _in_space(self, index):
        space = ["ip", "netns", "exec", self.spaces[index]]
        ahead_s = self.ahead_s.get(index)
        return [*space, "unshare", "--time", "--monotonic", str(ahead_s)] if ahead_s else space

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
                    words = (
                        Path(f"/proc/{entry}/cmdline")
                        .read_bytes()
                        .replace(b"\0", b" ")
                        .decode(errors="replace")
                        .strip()
                    )
                    if os.stat(f"/proc/{entry}/ns/net").st_ino == space and not words.startswith(
                        ("sshd: " + _SSHD, _SSHD)
                    ):
                        found[int(entry)] = words
        return found

    def agent(self, index):
        """Return the process of the launcher's agent on a host."""
        found = [
            pid
            for pid, words in self.processes(index).items()
            if "syncvar_launcher.hosts.agent_main" in words
            and not words.startswith(("ssh", "sh ", "bash"))
        ]
        assert len(found) == 1, self.processes(index)
        return found[0]

    def await_quiet(self, limit_s=60.0):
        """Wait until nothing of a job is left on any host: no process, no socket, no file; return what is."""
        until = time.monotonic() + limit_s
        while True:
            left = {
                name: found for index, name in enumerate(self.names) if (found := self.left(index))
            }
            if not left or time.monotonic() > until:
                return left
            time.sleep(0.05)

    def left(self, index):
        """Return what jobs have left on a host: processes, sockets that are open, files in its own temporary folder.

        Names of shared memory are not of one host: the check after each test (tests/conftest.py) looks for them.
        """
        files = [
            str(path)
            for path in self.temporary(index).rglob("*")
            if path.name not in ("syncvar", ".lock")
        ]
        return {
            **self.processes(index),
            **{f"socket {one}": "open" for one in self._sockets(index, _LISTENS, *_OPEN)},
            **dict.fromkeys(files, "a file"),
        }

    def listening(self, index):
        """Return the addresses at which a host listens over tcp, but for its sshd."""
        return [address for address, _ in self._sockets(index, _LISTENS)]

    def ports(self, index):
        """Return where a host listens over tcp, as address:port, but for its sshd."""
        return [
            f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
            for address, port in self._sockets(index, _LISTENS)
        ]

    def _sockets(self, index, *states):
        """Return address and port of the tcp sockets in some states, but for those of sshd."""
        found = []
        for name in ("tcp", "tcp6"):
            for line in (
                Path(f"/proc/{self.servers[index].pid}/net/{name}").read_text().splitlines()[1:]
            ):
                fields = line.split()
                digits, port = fields[1].split(":")
                words = [
                    bytes.fromhex(digits[start : start + 8])[::-1]
                    for start in range(0, len(digits), 8)
                ]  # each in the host's order
                if fields[3] in states and int(port, 16) != 22:
                    found.append((str(ipaddress.ip_address(b"".join(words))), int(port, 16)))
        return found

    def set_link(self, index, state):
        """Take a host's link down, or up again."""
        _run("ip", "link", "set", f"p{index}", state, namespace=self.switch)

    def set_rate(self, index, mbit):
        """Let no more than so many Mbit/s out of a host, and into it; None lets pass what comes."""
        burst_kb = max(128, (mbit or 0) // 8)  # a timer that is 1 ms late loses nothing
        for device, namespace in (("eth0", self.spaces[index]), (f"p{index}", self.switch)):
            if mbit is None:
                _run("tc", "qdisc", "del", "dev", device, "root", namespace=namespace)
                continue
            _run(
                "tc",
                "qdisc",
                "replace",
                "dev",
                device,
                "root",
                "tbf",
                "rate",
                f"{mbit}mbit",
                "burst",
                f"{burst_kb}kb",
                "latency",
                "50ms",
                namespace=namespace,
            )

    def join_slowly(self, first, second, mbit):
        """Let what two hosts send each other take a wire of its own, of so many Mbit/s."""
        ends = ((first, second), (second, first))
        one, other = (self.spaces[host] for host in (first, second))
        wire = f"slow{first}{second}"
        far = ("peer", "name", wire, "netns", other)
        _run("ip", "link", "add", wire, "netns", one, "type", "veth", *far)
        rate = ("tbf", "rate", f"{mbit}mbit", "burst", "16kb", "latency", "50ms")
        for here, there in ends:
            space = self.spaces[here]
            _run("ip", "link", "set", wire, "up", namespace=space)
            _run("tc", "qdisc", "replace", "dev", wire, "root", *rate, namespace=space)
            place = ("dev", wire, "src", self.names[here])
            _run("ip", "route", "replace", f"{self.names[there]}/32", *place, namespace=space)

    def set_deaf(self, index, others, *, is_deaf=True):
        """Let what a host sends to some others vanish, or no longer; what they send still arrives."""
        for other in others:
            if is_deaf:
                self.vanish(index, self.names[other])
            else:
                _run(
                    "ip",
                    "neigh",
                    "del",
                    self.names[other],
                    "dev",
                    "eth0",
                    namespace=self.spaces[index],
                )

    def vanish(self, index, address):
        """Let what a host sends to an address vanish: no interface takes it."""
        words = (
            "ip",
            "neigh",
            "replace",
            address,
            "lladdr",
            "02:00:00:00:77:ff",
            "nud",
            "permanent",
            "dev",
            "eth0",
        )
        _run(*words, namespace=self.spaces[index])

    def reset(self, index):
        """Reset all tcp connections of a host but those of ssh; return how many."""
        chosen = ["ss", "-HKtn", "state", "established", "( not sport = :22 and not dport = :22 )"]
        done = subprocess.run(
            ["ip", "netns", "exec", self.spaces[index], *chosen],
            capture_output=True,
            text=True,
            check=False,
            timeout=_LIMIT_S,
        )
        return len(done.stdout.splitlines())

    @contextlib.contextmanager
    def delayed(self, index, delay_s):
        """Let all that a host sends and receives arrive so much later."""
        space, far, near = self.switch, f"w{index}", f"v{index}"
        _run("ip", "link", "add", near, "type", "veth", "peer", "name", far, namespace=space)
        for words in (
            ("set", f"p{index}", "nomaster"),
            ("set", far, "master", "br0", "up"),
            ("set", near, "up"),
        ):
            _run("ip", "link", *words, namespace=space)
        wire = subprocess.Popen(
            [
                "ip",
                "netns",
                "exec",
                space,
                sys.executable,
                str(RANK_SCRIPTS / "delayed_wire.py"),
                f"p{index}",
                near,
                str(delay_s),
            ],
            stdout=subprocess.PIPE,
        )
        try:
            assert wire.stdout.readline() == b"ready\n"
            yield
        finally:
            wire.kill()
            wire.wait(_LIMIT_S)
            wire.stdout.close()
            _run("ip", "link", "del", near, namespace=space)
            _run("ip", "link", "set", f"p{index}", "master", "br0", namespace=space)

    def lose(self, index):
        """Let a host vanish, as when its power fails: the others hear nothing of it, not even that its connections end."""
        self.set_link(index, "down")
        for pid in (self.servers[index].pid, *self.processes(index)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.servers[index].wait(_LIMIT_S)
        _run("ip", "link", "del", f"p{index}", namespace=self.switch)
        _run("ip", "netns", "del", self.spaces[index])

    def restore(self, index):
        """Start a host that was lost; its disk is empty."""
        shutil.rmtree(self.temporary(index))
        self._connect(index)
        self.servers[index] = self._serve(index)

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
