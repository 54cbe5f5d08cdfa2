"""The dashboard of a running job: a page, its data as JSON, and metrics, over HTTP.

The server is a process of its own, and only a client of the launcher's private socket. Nothing that
happens at its port reaches the launcher or the ranks, except one question a second.
"""

from __future__ import annotations

import os
import secrets
import socket
import sys
from typing import TYPE_CHECKING

from syncvar.core.errors import ConfigError

if TYPE_CHECKING:
    import argparse

LOOPBACK = "127.0.0.1"
NICENESS = 10

_BACKLOG = 64
_TOKEN_NBYTES = 16


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    from syncvar.cli.running_jobs import add_job_argument

    add_job_argument(parser)
    parser.add_argument(
        "--address",
        metavar="ADDR[:PORT]",
        default=LOOPBACK,
        help="the address of the page; without a port, a free one [%(default)s]",
    )


def run(chosen: argparse.Namespace) -> int:
    """Show the page of a job until the job ends, or until Ctrl-C."""
    from syncvar.cli.dashboard.http_server import AccessRules, serve
    from syncvar.cli.dashboard.job_poller import JobPoller
    from syncvar.cli.running_jobs import ask_job, choose_job

    path = choose_job(chosen.job)
    launcher = int(ask_job(path, question="job")["job"]["pid"])
    try:
        end = os.pidfd_open(launcher)  # readable when the launcher has ended
    except ProcessLookupError:
        raise ConfigError("the job has just ended") from None
    try:
        host, port = split_address(chosen.address)
        with open_listener(host, port) as listener:
            token = new_token()
            print(f"dashboard: {page_url(listener, token)}", flush=True)
            os.nice(NICENESS)
            try:
                access = AccessRules(token, listener, host)
                serve(listener, access, JobPoller(launcher, path), end)
            except KeyboardInterrupt:
                return 0
    finally:
        os.close(end)
    sys.stderr.write("syncvar: the job has ended\n")
    return 0


def new_token() -> str:
    """Return a random token of 128 bits, in hexadecimal digits."""
    return secrets.token_hex(_TOKEN_NBYTES)


def split_address(text: str) -> tuple[str, int]:
    """Return host and port of ADDR, ADDR:PORT or [IPv6]:PORT; the port is 0 without one.

    Example:
        >>> split_address("10.0.0.1:8787"), split_address("[::1]:80"), split_address("::1")
        (('10.0.0.1', 8787), ('::1', 80), ('::1', 0))
    """
    host, port = text, ""
    if text.startswith("["):
        host, _, rest = text[1:].partition("]")
        port = rest.removeprefix(":")
    elif text.count(":") == 1:
        host, _, port = text.partition(":")
    if not host or (port and not (port.isascii() and port.isdigit() and len(port) < 6)):
        raise ConfigError(f"--address must be an address such as 10.0.0.1:8787, not {text!r}")
    return host, int(port or 0)


def open_listener(host: str, port: int) -> socket.socket:
    """Return a socket that listens; raise ConfigError if the address cannot be used."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except (OSError, OverflowError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        port_text = f", port {port}" if port else ""
        raise ConfigError(f"the dashboard cannot listen at {host}{port_text}: {reason}") from None


def page_url(listener: socket.socket, token: str) -> str:
    """Return the URL of the page, with the token."""
    host, port = listener.getsockname()[:2]
    if host in {"0.0.0.0", "::"}:  # noqa: S104  (compares)
        host = socket.gethostname()
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/?token={token}"
