"""The command line of ssh to another host, and the meaning of its failures.

The remote command is fixed; all data of the job travel on its standard input. The user's own
settings of ssh stay in force: nothing weakens the check of host keys, and nothing is forwarded.
"""

from __future__ import annotations

import json
import re
import shlex
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

import syncvar

if TYPE_CHECKING:
    from collections.abc import Sequence

    from syncvar_launcher.options.hostfile import Host

AGENT = "syncvar_launcher.hosts.agent_main"
"""The module that serves a host."""

SSH_OPTIONS = (
    "-T",
    "-x",
    "-a",
    "-o",
    "BatchMode=yes",
    "-o",
    "ConnectTimeout=10",
    "-o",
    "ClearAllForwardings=yes",
)
"""No terminal, no question, no long wait, no display and no agent.

They hold whatever `--ssh` or the user's own file says.
"""

_BEGIN = "from syncvar.bootstrap.worker_entry import main; main()"
_SSH_FAILED = 255
_NOT_FOUND = (126, 127)
_LINES_SHOWN = 3

_INSTALL = "install"  # `describe_installation` has the words
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

    Args:
        ssh: The program and its own options, such as ("ssh",).
        host: The host.
        port: The port where the host names none; None for ssh's own choice.
        python: The interpreter where the host names none.

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

    Args:
        host: The host.
        status: The exit status of the process that leads there; None while it runs.
        words: Its standard error, with that of the remote shell.
        python: The interpreter on the host.
        program: The program that leads there.

    Example:
        >>> from syncvar_launcher.options.hostfile import Host
        >>> refused = "ssh: connect to host n1 port 22: Connection refused"
        >>> ssh_error_text(Host("n1"), 255, refused, "python3")
        'nobody listens for ssh there; start sshd, or give its port (port=N, --ssh-port)'
    """
    is_ssh = program == "ssh"
    if status is None:
        return "it does not answer in time; " + (
            f"check the network and `ssh {host.login()} true`"
            if is_ssh
            else f"does {program} start anything there?"
        )
    for pattern, what, remedy in _MEANINGS:
        is_of_remote = "python" in what
        if (
            is_of_remote if not is_ssh else (status == _SSH_FAILED) is not is_of_remote
        ) and re.search(pattern, words, re.IGNORECASE):
            there = host.python or python
            is_missing = remedy is _INSTALL
            advice = describe_installation(there, host.login()) if is_missing else remedy
            return f"{what}; {advice}".replace("{host}", host.login()).replace("{python}", there)
    if status in _NOT_FOUND:
        return (
            f"there is no {host.python or python} there; give python=PATH in the host file, or "
            "--remote-python"
        )
    last = [line.strip() for line in words.splitlines() if line.strip()][-_LINES_SHOWN:]
    who = program if status == _SSH_FAILED or not is_ssh else "the agent"
    return f"{who} ended with {status}" + (
        f": {' | '.join(last)}" if last else ", and said nothing"
    )


def describe_installation(python: str, host: str) -> str:
    """Return how to install the syncvar of this host for an interpreter of another one."""
    return remedy(python, host, _origin())


def remedy(python: str, host: str, origin: dict[str, Any]) -> str:
    """Return the advice for a package from a given origin.

    `origin` is pip's direct_url.json, or empty.

    Example:
        >>> words = remedy("python3", "n1", {"url": "file:///opt/syncvar", "dir_info": {}})
        >>> words.removeprefix(f"install syncvar {syncvar.__version__} as on this host: ")
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
