"""Hosts of network namespaces: those of the tests on several hosts, with an sshd each.

Their links have 1 Gbit/s until `Several.set_rate` gives them another rate. The hosts share the cores of this machine,
its name and its /dev/shm. So no library may bind its workers, and no MPI may use shared memory.

Only root may make them; `gigabit` says what is missing where there can be none.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from comparison.libraries import script

if TYPE_CHECKING:
    from collections.abc import Iterator

    from comparison.libraries import Library

__all__ = ["MBIT", "NoHosts", "Several", "gigabit"]

MBIT = 1000
REPOSITORY = str(Path(__file__).resolve().parents[2])
NIC = "eth0"


class NoHosts(Exception):
    """There can be no such hosts here."""


@dataclass(frozen=True, slots=True)
class Several:
    """Some hosts, the first of which starts the jobs.

    Args:
        made: The testbed's.
        folder: For host files.
    """

    made: Any
    folder: Path

    def set_rate(self, mbit: int | None) -> None:
        """Let each host send and receive so many Mbit/s; None for as many as the machine can."""
        for index in range(len(self.made.names)):
            self.made.set_rate(index, mbit)

    def start(self, library: Library, each: int, *options: str) -> list[str]:
        """Return the command that starts `each` workers of a library on every host, up to the script.

        Args:
            library: Which.
            each: Workers on a host.
            *options: More options of syncvar's launcher.
        """
        workers = str(each * len(self.made.names))
        match library.name:
            case "syncvar":
                launcher = [library.python, "-m", "syncvar_launcher", *self.made.ssh]
                return [
                    *self.made.prefix,
                    *launcher,
                    "--hostfile",
                    self._host_file(each),
                    "--workers",
                    workers,
                    *options,
                ]
            case "intelmpi":
                hydra = [str(library.folder / "bin" / "mpiexec.hydra"), "-bootstrap", "ssh"]
                login = ["-bootstrap-exec-args", f"-F {self.made.config}", "-iface", NIC]
                where = ["-hosts", ",".join(self.made.names), "-ppn", str(each), "-n", workers]
                return [*self.made.prefix, *hydra, *login, *where, library.python]
            case "openmpi":
                root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
                way = ["--mca", "plm_rsh_agent", f"ssh -F {self.made.config}"]
                nic = [
                    "--bind-to",
                    "none",
                    "--mca",
                    "btl",
                    "self,tcp",
                    "--mca",
                    "btl_tcp_if_include",
                    NIC,
                    "--mca",
                    "oob_tcp_if_include",
                    NIC,
                ]
                launcher = [
                    "mpirun.openmpi",
                    *root,
                    *way,
                    *nic,
                    "--hostfile",
                    self._host_file(each),
                    "-np",
                    workers,
                ]
                return [*self.made.prefix, *launcher, library.python]
            case _:
                spaces = ["--spaces", ",".join(self.made.spaces), "--address", self.made.names[0]]
                return [
                    library.python,
                    script("launch_by_variables.py"),
                    *spaces,
                    "--workers",
                    workers,
                ]

    def environment(self, library: Library) -> dict[str, str]:
        """Return what is set for the workers beside the caller's environment."""
        return {
            "torch": {"GLOO_SOCKET_IFNAME": NIC, "OMP_NUM_THREADS": "1"},
            "intelmpi": {
                **library.environment(1),
                "I_MPI_FABRICS": "ofi",
                "I_MPI_PIN": "off",
                "FI_PROVIDER": "tcp",
                "FI_TCP_IFACE": NIC,
            },
        }.get(library.name, {})

    def _host_file(self, each: int) -> str:
        path = self.folder / f"hosts-{each}"
        path.write_text(
            "".join(f"{name} slots={each}\n" for name in self.made.names), encoding="utf-8"
        )
        return str(path)


@contextlib.contextmanager
def gigabit(count: int) -> Iterator[Several]:
    """Make hosts and take them down.

    Args:
        count: How many.

    Raises:
        NoHosts: Something is missing for them; the message says what.
    """
    if REPOSITORY not in sys.path:
        sys.path.append(REPOSITORY)
    from tests.support.host_testbed import Hosts, why_none

    if why := why_none():
        raise NoHosts(why)
    with tempfile.TemporaryDirectory(prefix="compare-") as folder:
        os.chmod(folder, 0o755)  # noqa: S103  (sshd reads its keys there)
        made = Hosts(folder, count)
        with contextlib.closing(made):
            for index in range(count):
                made.set_rate(index, MBIT)
            yield Several(made, Path(folder))
