"""The launcher's connection to the agent of another host: a process such as ssh, and its pipes.

The command for the remote shell is fixed; all data of the job travel on its standard input. The
user's own settings of ssh stay in force: nothing weakens the check of host keys, and nothing is
forwarded.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import shlex
import subprocess
import time
from typing import IO, TYPE_CHECKING, Any, NamedTuple, Protocol
from urllib.parse import unquote, urlsplit

import syncvar
from syncvar.core.errors import WireError, error_message
from syncvar_launcher.hosts.agent_protocol import Message, PipeOutbox, Reader, checked_facts, pack
from syncvar_launcher.local.worker_start import child_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from syncvar_launcher.options.hostfile import Host

AGENT = "syncvar_launcher.hosts.agent_main"
"""The module that serves a host."""

# ssh opens no terminal, display or key agent, asks nothing and does not wait long, whatever `--ssh`
# or the user's own file asks for.
_SETTINGS = ("BatchMode=yes", "ConnectTimeout=10", "ClearAllForwardings=yes")
SSH_OPTIONS = ("-T", "-x", "-a", *(word for one in _SETTINGS for word in ("-o", one)))

NOT_UNDERSTOOD = "its agent is not understood"

_CHUNK = 1 << 18
_WORDS_MAX = 8192
_READS_AT_ONCE = 8  # so that the output of one host does not keep the launcher from the others
_BEGIN = "from syncvar.bootstrap.worker_entry import main; main()"
_SSH_FAILED = 255
_NOT_FOUND = (126, 127)
_LINES_SHOWN = 3

_INSTALL = "install"  # stands for the text of `describe_installation`
_MEANINGS = (
    (
        r"could not resolve|name or service not known|temporary failure in name",
        "its name is unknown",
        "check the spelling, or name it in /etc/hosts or ~/.ssh/config",
    ),
    (
        r"connection refused",
        "nobody listens for ssh there",
        "start sshd, or give its port (port=N, --ssh-port)",
    ),
    (
        r"host key verification failed|no matching host key|host key is known",
        "its host key is not known, or has changed",
        (
            "compare the key with what its administrator says, then add it: ssh-keyscan HOST >> "
            "~/.ssh/known_hosts"
        ),
    ),
    (
        r"permission denied|too many authentication failures|no more authentication methods",
        "the login is refused",
        (
            "`ssh {host} true` must work without a password: ssh-copy-id {host}, "
            "or user= and a key in ssh-agent"
        ),
    ),
    (
        r"timed out|no route to host|network is unreachable|host is down",
        "it cannot be reached",
        "check the network and `ssh {host} true`",
    ),
    (r"no module named '?syncvar", "syncvar is not installed for {python} there", _INSTALL),
    (
        r"no such file or directory|not found",
        "there is no {python} there",
        "give python=PATH in the host file, or --remote-python",
    ),
)


class AgentProcess(Protocol):
    """The process that leads to an agent, or an object with the same three pipes."""

    @property
    def stdin(self) -> IO[bytes] | None:
        """Takes messages of the launcher."""

    @property
    def stdout(self) -> IO[bytes] | None:
        """Yields messages of the agent."""

    @property
    def stderr(self) -> IO[bytes] | None:
        """Yields other text."""

    def poll(self) -> int | None:
        """Return the exit status, or None while it runs."""

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit status after its end."""

    def kill(self) -> None:
        """Kill it."""


def start_agent(
    argv: Sequence[str], environ: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Start ssh, or an agent on this machine; `environ` None passes our own environment."""
    return subprocess.Popen(
        list(argv),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
        start_new_session=True,  # Ctrl-C is the launcher's
        env=None if environ is None else dict(environ),
        preexec_fn=child_of(os.getpid()),  # noqa: PLW1509  (one that hangs before it reads its input ends with us too)
    )


class RemoteHost:
    """The connection to the agent of a host. It never blocks: its owner polls the descriptors.

    `known` are facts that override those of the agent: the addresses of a host that has joined.
    """

    def __init__(
        self, host: Host, process: AgentProcess, known: Mapping[str, Any] | None = None
    ) -> None:
        self.host = host
        self.process = process
        self.known = dict(known or {})
        self.began = time.monotonic()  # when the login began, in seconds of the monotonic clock
        self.facts: dict[str, Any] = {}  # what the agent has reported about its host; empty before
        self.heard = time.monotonic()  # when a message last came, in seconds of the monotonic clock
        self.loss_reason = ""  # why no more messages will come; empty while they may
        self.is_released = False  # whether the agent ends because its host was released
        # Whether the launcher ended the connection, so that the exit status explains nothing.
        self.is_ended = False
        self.staged = ""  # the folder with the copy of the script's folder; empty without one
        self._words = bytearray()
        self._reader = Reader(awaits_greeting=True)
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        pipes = (self.process.stdin, self.process.stdout, self.process.stderr)
        to_agent, self._out, self._err = (one.fileno() for one in pipes)
        for descriptor in (to_agent, self._out, self._err):
            os.set_blocking(descriptor, False)
        self._outbox = PipeOutbox(to_agent)
        self._open = {self._out, self._err}

    def descriptors(self) -> list[int]:
        """Return the descriptors to poll for reading."""
        return list(self._open)

    def unsent(self) -> list[int]:
        """Return the descriptors to poll for writing."""
        return self._outbox.descriptors()

    @property
    def unsent_nbytes(self) -> int:
        """The number of bytes that wait to be sent."""
        return self._outbox.nbytes

    def send(self, kind: str, **fields: Any) -> None:
        """Send a message to the agent, unless it is gone."""
        if not self.loss_reason:
            self._outbox.add(pack(kind, **fields))
            self.flush()

    def flush(self) -> None:
        """Send waiting bytes, as far as the pipe takes them.

        The output of a process that reads no more shows the reason at its end.
        """
        self._outbox.flush()

    def readable(self, descriptor: int) -> list[Message]:
        """Handle a descriptor that poll reported; ignore others."""
        if descriptor not in self._open:
            return []
        messages: list[Message] = []
        for _ in range(_READS_AT_ONCE):
            try:
                data = os.read(descriptor, _CHUNK)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            if descriptor == self._err:
                self._words += data
                del self._words[:-_WORDS_MAX]
            if not data:
                self._open.discard(descriptor)
                if descriptor == self._out:
                    self._lose("its agent has ended")
                break
            if descriptor == self._out:
                self.heard = time.monotonic()
                try:
                    messages += self._reader.feed(data)
                except WireError as error:
                    self.end(f"{NOT_UNDERSTOOD}: {error_message(error)}")
                    break
        return messages

    def learn(self, facts: Message) -> None:
        """Keep the facts that the agent sends."""
        self.facts = {**checked_facts(facts), **self.known}

    def learn_from(self, messages: Iterable[Message]) -> None:
        """Keep the facts among messages; end the connection if they are not understood."""
        for message in messages:
            if message["kind"] == "facts":
                try:
                    self.learn(message["facts"])
                except WireError as error:
                    self.end(f"{NOT_UNDERSTOOD}: {error_message(error)}")

    @property
    def slots(self) -> int:
        """The slots of the host, after its facts have come: by default one per usable core."""
        return int(self.host.slots or self.facts["core_count"])

    @property
    def is_available(self) -> bool:
        """Whether the agent can start workers: it is neither lost nor released."""
        return not self.loss_reason and not self.is_released

    def words(self) -> str:
        """Return the last text that ssh, the remote shell and the agent wrote to standard error."""
        for _ in range(_READS_AT_ONCE):
            if self._err in self._open:
                self.readable(self._err)
        before = self._reader.before if not self._reader.has_greeted else b""
        return (before + bytes(self._words)).decode("utf-8", "replace").strip()

    def end(self, reason: str) -> None:
        """End the connection and so the agent."""
        self._lose(reason)
        self.is_ended = True
        self.kill()

    def drain(self) -> None:
        """Read messages that have arrived unread, perhaps the agent's end."""
        for descriptor in list(self._open):
            self.readable(descriptor)

    def end_input(self) -> None:
        """Let the agent end by closing its input."""
        with contextlib.suppress(OSError):
            if self.process.stdin is not None:
                self.process.stdin.close()

    def kill(self) -> None:
        """Kill the process that leads to the agent; the end of its input ends the agent."""
        if self.process.poll() is None:
            self.process.kill()

    def release(self) -> None:
        """End a lost connection, and close its pipes; do not wait. Idempotent."""
        if self.process.poll() is None and not self.is_ended:  # `poll` also leaves no zombie
            self.end("its connection is closed")
        self._close_pipes()

    def _close_pipes(self) -> None:
        for one in (self.process.stdin, self.process.stdout, self.process.stderr):
            with contextlib.suppress(OSError):
                if one is not None:
                    one.close()
        self._open.clear()
        self._outbox.clear()

    def close(self) -> None:
        """Release the connection; the agent ends with its input."""
        self._close_pipes()
        try:
            self.process.wait(2.0)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def status(self, timeout_s: float = 1.0) -> int | None:
        """Return the exit status of the process that leads to the agent; None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.process.wait(timeout_s)
        return None

    def _lose(self, reason: str) -> None:
        self.loss_reason = self.loss_reason or reason
        self._outbox.clear()


class HostSlot(NamedTuple):
    """A host that has workers."""

    remote: RemoteHost  # the connection to its agent
    name: str  # the name for messages
    workers: int  # the number of its workers, at least 1
    address: str  # the address at which its ranks listen for other hosts
    facts: dict[str, Any]  # the facts that its agent has sent


def poll_hosts(
    remotes: Sequence[RemoteHost], timeout_s: float, others: Sequence[int] = ()
) -> tuple[list[list[Message]], list[int]]:
    """Wait for messages, or for room to send; return the messages of each host.

    It also returns which of the `others`, more descriptors to poll for reading, are ready.
    """
    poller = select.poll()
    for one in remotes:
        for descriptor in one.descriptors():
            poller.register(descriptor, select.POLLIN)
        for descriptor in one.unsent():
            poller.register(descriptor, select.POLLOUT)
    for descriptor in others:
        poller.register(descriptor, select.POLLIN)
    ready = [descriptor for descriptor, _ in poller.poll(timeout_s * 1000)]
    received: list[list[Message]] = []
    for one in remotes:
        one.flush()
        received.append([message for descriptor in ready for message in one.readable(descriptor)])
    return received, [descriptor for descriptor in others if descriptor in ready]


def remote_command(python: str) -> str:
    """Return the command for the remote shell, which contains nothing of the job.

    Example:
        >>> remote_command("/opt/my env/bin/python").partition(" -P -c ")[0]
        "exec '/opt/my env/bin/python'"
    """
    return "exec " + shlex.join(agent_command_line(python))


def agent_command_line(python: str) -> list[str]:
    """Return the command line of an agent under an interpreter."""
    return module_command(python, AGENT)


def module_command(python: str, module: str) -> list[str]:
    """Return the command line of one of our modules under an interpreter."""
    return [python, "-P", "-c", _BEGIN, module]


def ssh_command(ssh: Sequence[str], host: Host, port: int | None, python: str) -> list[str]:
    """Return the command line of ssh for a host.

    Example:
        >>> from syncvar_launcher.options.hostfile import Host
        >>> ssh_command(("ssh",), Host("n1", user="ann", port=2222), None, "python3")[-5:-1]
        ['-p', '2222', '--', 'ann@n1']
    """
    number = host.port or port
    chosen = ["-p", str(number)] if number else []
    return [*ssh, *SSH_OPTIONS, *chosen, "--", host.login(), remote_command(host.python or python)]


def ssh_error_text(
    host: Host, status: int | None, words: str, python: str, program: str = "ssh"
) -> str:
    """Return why no agent answers on a host, and what to do.

    `status` is None while the process runs. `words` is its standard error.

    Example:
        >>> from syncvar_launcher.options.hostfile import Host
        >>> refused = "ssh: connect to host n1 port 22: Connection refused"
        >>> ssh_error_text(Host("n1"), 255, refused, "python3")
        'nobody listens for ssh there; start sshd, or give its port (port=N, --ssh-port)'
    """
    is_ssh = program == "ssh"
    login, there = host.login(), host.python or python
    if status is None:
        question = f"does {program} start anything there?"
        advice = f"check the network and `ssh {login} true`" if is_ssh else question
        return f"it does not answer in time; {advice}"
    for pattern, meaning, remedy in _MEANINGS:
        is_of_remote = "python" in meaning
        is_possible = (status == _SSH_FAILED) is not is_of_remote if is_ssh else is_of_remote
        if is_possible and re.search(pattern, words, re.IGNORECASE):
            advice = describe_installation(there, login) if remedy is _INSTALL else remedy
            text = f"{meaning}; {advice}"
            return text.replace("{host}", login).replace("{python}", there)
    if status in _NOT_FOUND:
        return f"there is no {there} there; give python=PATH in the host file, or --remote-python"
    last = [line.strip() for line in words.splitlines() if line.strip()][-_LINES_SHOWN:]
    ended = program if status == _SSH_FAILED or not is_ssh else "the agent"
    return f"{ended} ended with {status}" + (
        f": {' | '.join(last)}" if last else ", and said nothing"
    )


def describe_installation(python: str, host: str) -> str:
    """Return how to install the syncvar of this host for an interpreter of another one."""
    return installation_text(python, host, _origin())


def installation_text(python: str, host: str, origin: dict[str, Any]) -> str:
    """Return how to install a package of a given origin.

    `origin` is pip's direct_url.json, or empty.

    Example:
        >>> origin = {"url": "file:///opt/syncvar", "dir_info": {}}
        >>> text = installation_text("python3", "n1", origin)
        >>> text.removeprefix(f"install syncvar {syncvar.__version__} as on this host: ")
        'copy /opt/syncvar to n1 and run there: python3 -m pip install /opt/syncvar'
    """
    begin = f"install syncvar {syncvar.__version__} as on this host: "
    url = str(origin.get("url", ""))
    source = origin.get("vcs_info")
    if source:
        place = f"{source['vcs']}+{url}@{source['commit_id']}"
        return f"{begin}run on {host}: {python} -m pip install {shlex.quote(place)}"
    if url.startswith("file:"):
        path = shlex.quote(unquote(urlsplit(url).path))
        return f"{begin}copy {path} to {host} and run there: {python} -m pip install {path}"
    return f"{begin}copy its folder or wheel to {host} and run there: {python} -m pip install PATH"


def _origin() -> dict[str, Any]:
    from importlib.metadata import PackageNotFoundError, distribution  # slow, and seldom needed

    try:
        text = distribution("syncvar").read_text("direct_url.json")
        origin = json.loads(text or "{}")
    except (PackageNotFoundError, OSError, ValueError):
        return {}
    return origin if isinstance(origin, dict) else {}
