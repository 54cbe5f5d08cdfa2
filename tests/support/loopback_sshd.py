"""An sshd of the test's own user on 127.0.0.1, with keys of its own: real ssh for tests that need no network, and no root."""

import getpass
import shutil
import subprocess
import time
from pathlib import Path

_SSHD = shutil.which("sshd") or "/usr/sbin/sshd"
_LIMIT_S = 20.0


def why_no_sshd():
    """Return why no sshd can be started here, and what to do; empty where one can."""
    for program, package in (
        ("ssh", "openssh-client"),
        ("ssh-keygen", "openssh-client"),
        (_SSHD, "openssh-server"),
    ):
        if shutil.which(program) is None:
            return f"there is no {program}: apt-get install {package}"
    return ""


class Sshd:
    """The server, its keys, and what makes ssh use them.

    Args:
        folder: An empty folder of its own.
        port: Where it listens.
        takes: Logins by the key are accepted.
    """

    def __init__(self, folder, port, *, takes=True):
        self.port = port
        folder = Path(folder)
        for name in ("host", "key"):
            subprocess.run(
                ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name],
                check=True,
                timeout=_LIMIT_S,
            )
        self.known = folder / "known_hosts"
        self.known.write_text(
            f"[127.0.0.1]:{port} {' '.join((folder / 'host.pub').read_text().split()[:2])}\n"
        )
        (folder / "ssh_config").write_text(
            f"IdentityFile {folder}/key\nIdentitiesOnly yes\nUserKnownHostsFile {self.known}\nGlobalKnownHostsFile /dev/null\n"
        )
        (folder / "sshd.conf").write_text(
            f"Port {port}\nListenAddress 127.0.0.1\nHostKey {folder}/host\nAuthorizedKeysFile {folder}/{'key.pub' if takes else 'none'}\nPidFile none\n"
            "StrictModes no\nUsePAM no\nPermitRootLogin yes\nPasswordAuthentication no\nKbdInteractiveAuthentication no\nPrintMotd no\n"
        )
        self.ssh = ("--ssh", f"ssh -F {folder}/ssh_config", "--ssh-always")
        self.place = f"{getpass.getuser()}@127.0.0.1 port={port}"
        if getpass.getuser() == "root":
            Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # it wants it, where root starts it
        self._log = folder / "sshd.log"
        with self._log.open("wb") as log:
            self._server = subprocess.Popen(
                [_SSHD, "-D", "-e", "-f", folder / "sshd.conf"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        until = time.monotonic() + _LIMIT_S
        while "listening on" not in self.log:
            if self._server.poll() is not None or time.monotonic() > until:
                self.close()
                raise AssertionError(self.log)
            time.sleep(0.01)

    @property
    def log(self):
        """What the server has said."""
        return self._log.read_text(errors="replace")

    def close(self):
        """End the server. Idempotent."""
        self._server.terminate()
        self._server.wait(_LIMIT_S)
