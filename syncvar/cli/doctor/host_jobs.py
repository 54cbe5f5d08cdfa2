"""What `syncvar doctor` learns from the launcher: a survey of the hosts, and a job that measures.

The survey logs in to each host. Then a job with two ranks on each host that can be used runs
`pair_probe`. Hosts that do not reach all others run it in jobs of their own.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from syncvar.algorithms.cost_model import PairRate, network_lines
from syncvar.bootstrap.worker_entry import command_of
from syncvar.cli.doctor.doctor_check import DoctorCheck
from syncvar.cli.doctor.machine_checks import package_versions, usable_cores
from syncvar.cli.doctor.pair_probe import MARK
from syncvar.core.environment import PREFIX, RankEnvironment
from syncvar.core.settings import RuntimeConfig

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

_PROGRAM = ("-m", "syncvar.cli.doctor.pair_probe")
_HERE = "this machine"  # as the survey calls it
_CLOCK_LIMIT_S = 0.5
_LATENCY_LIMIT_S = 0.01  # between hosts
_LATENCY_LIMIT_HERE_S = 1e-3
_RATE_LIMIT = 50e6  # bytes per second between hosts: half of 1 Gbit/s
_REMOVED = (*RankEnvironment(0, 1, 0, 1, 0, 1, 0, "", "").to_mapping(), f"{PREFIX}STATUS_FD")
_CODE = re.compile(r"\s*\[SV-\d+\]$")
_LINES_SHOWN = 4


class LauncherRuns:
    """Runs the survey and jobs of the launcher.

    Args:
        options: Options of syncvar-launch that say how to reach the hosts, for instance --ssh.
        timeout_s: Limit of each job, in seconds.
    """

    def __init__(self, options: Sequence[str], timeout_s: float) -> None:
        self._options = [*options]
        self._timeout_s = timeout_s

    def survey(self, hosts: Sequence[str]) -> dict[str, Any]:
        """Return the survey; `hosts` are the options that name the hosts, or none."""
        words = [*command_of("syncvar_launcher.hosts.host_survey"), *hosts, *self._options]
        code, out, err = self._run([*words, *_PROGRAM])
        with contextlib.suppress(ValueError):
            found: dict[str, Any] = json.loads(out)
            return found
        return {"error": f"the survey of the hosts ended with {code}: {_last_lines(err)}"}

    def job(
        self, lines: Sequence[str] = (), *, scheduled: int = 0
    ) -> tuple[list[dict[str, Any]], str]:
        """Return the answers of the ranks on some hosts, or why there are none.

        `lines` are those of a host file. Without any, a rank runs on each of the `scheduled` hosts
        of a scheduler's job, or else two ranks on this machine.
        """
        words = [*command_of("syncvar_launcher.main"), "--bind", "none"]
        words += ["--timeout", str(self._timeout_s)]
        with tempfile.TemporaryDirectory(prefix="syncvar-doctor-") as folder:
            if lines:
                path = Path(folder) / "hosts"
                path.write_text("\n".join(lines) + "\n", "utf-8")
                words += ["--hostfile", str(path), *self._options]
            elif scheduled:
                words += ["--workers", str(scheduled), "--map-by", "host"]
            else:
                words += ["--workers", "2", "--allocation", "off"]
            code, out, err = self._run([*words, *_PROGRAM])
        for line in out.splitlines():
            _, mark, data = line.partition(MARK)
            if mark:
                ranks: list[dict[str, Any]] = json.loads(data)
                return ranks, ""
        return [], _last_lines(err) or f"it ended with {code} and without a message"

    def _run(self, words: list[str]) -> tuple[int, str, str]:
        environ = {name: text for name, text in os.environ.items() if name not in _REMOVED}
        environ[f"{PREFIX}STALL_WARNING_S"] = str(self._timeout_s)
        alive_read, alive_write = os.pipe2(os.O_CLOEXEC)  # a job ends with this process
        environ[f"{PREFIX}PARENT_FD"] = str(alive_read)
        try:
            process = subprocess.Popen(  # noqa: S603
                words,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=(alive_read,),
                text=True,
                errors="replace",
            )
            with process:
                try:
                    out, err = process.communicate(timeout=2 * self._timeout_s)
                except subprocess.TimeoutExpired:
                    process.send_signal(signal.SIGTERM)
                    out, err = process.communicate()
        finally:
            os.close(alive_read)
            os.close(alive_write)
        return process.returncode, out, err


def _last_lines(text: str) -> str:
    """Return the start of the launcher's message as one line."""
    lines = [_CODE.sub("", line.strip()) for line in text.splitlines() if line.strip()]
    lines = [line for line in lines if not line.startswith("See syncvar-launch")]
    return " ".join(lines[:_LINES_SHOWN]).removeprefix("syncvar-launch: ")


def _split_remedy(reason: str) -> tuple[str, str]:
    """Return what is wrong and what to do, from a reason of the launcher."""
    value, _, remedy = reason.partition("; ")
    return value, remedy or "see the reason"


# -- the survey ------------------------------------------------------------------------------------


def survey_checks(survey: Mapping[str, Any], *, has_hosts: bool) -> Iterator[DoctorCheck]:
    """Yield the checks of a survey."""
    yield _scheduler_check(survey.get("scheduler", {}))
    listed = [f"{name} {address}" for name, address in survey.get("interfaces", [])]
    links = survey.get("addresses", [])
    yield DoctorCheck.of_value(
        "addresses",
        f"{', '.join(listed) or 'none'}; links to other hosts would try "
        f"{', '.join(links) or 'none'}",
        "ranks of other hosts connect to one of these; --iface chooses the network",
        "" if links or not has_hosts else "connect this machine to a network, or name --iface",
    )
    if survey.get("error"):
        first, _, rest = str(survey["error"]).partition("\n")
        yield DoctorCheck(
            "hosts",
            is_ok=False,
            value=first,
            reason="without a list of hosts, and a login to them, no job starts there",
            remedy=" ".join(rest.split()) or "correct this, and run the doctor again",
        )
    for host in survey.get("hosts", ()):
        yield _login_check(host)
    yield from _reach_checks(survey.get("reach", ()))


def _scheduler_check(scheduler: Mapping[str, Any]) -> DoctorCheck:
    return DoctorCheck.of_value(
        "scheduler",
        scheduler.get("name") or "none: syncvar-launch starts ranks here, or by -H on other hosts",
        "in a job of Slurm, PBS or LSF the launcher uses the hosts of that job",
        scheduler.get("error", ""),
    )


def _login_check(host: Mapping[str, Any]) -> DoctorCheck:
    value, remedy = _split_remedy(host["reason"]) if host["reason"] else ("", "")
    listed = ", ".join(f"{name} {address}" for name, address in host["interfaces"])
    return DoctorCheck.of_value(
        "login",
        f"{value} (named in {host['origin']})" if value else f"the agent answers at {listed}",
        "the launcher starts ranks through an agent on each host, by ssh or a scheduler",
        remedy,
    )._replace(host=host["name"])


def _reach_checks(reach: Iterable[Mapping[str, Any]]) -> Iterator[DoctorCheck]:
    for one in reach:
        good, tried = one["reached"], ", ".join(one["tried"]) or "no address"
        bad = [address for address in one["tried"] if address not in good]
        value = f"reaches {', '.join(good)}"
        value += f", not {', '.join(bad)}" if bad else ""
        yield DoctorCheck.of_value(
            "ports",
            value if good else f"reaches none of {tried}",
            "ranks listen on free ports, and those of all other hosts connect to them",
            ""
            if good
            else "open TCP ports 32768 to 60999 between the hosts (net.ipv4.ip_local_port_range), "
            "or name the network by --iface or addr=",
        )._replace(host=f"{one['from']} to {one['to']}")


def groups_of_hosts(survey: Mapping[str, Any]) -> list[list[str]]:
    """Return the host file lines of the jobs to run: all hosts that reach each other, then others.

    Example:
        >>> hosts = [{"name": name, "reason": "", "line": name} for name in "abc"]
        >>> blind = {"from": "a", "to": "c", "reached": []}
        >>> groups_of_hosts({"hosts": hosts, "reach": [blind]})
        [['b', 'c'], ['a']]
    """
    usable = {one["name"]: one["line"] for one in survey.get("hosts", ()) if not one["reason"]}
    blind = [(one["from"], one["to"]) for one in survey.get("reach", ()) if not one["reached"]]
    together, singles = dict(usable), []
    while True:
        counts = {
            name: sum(
                name in pair and all(one in together or one == _HERE for one in pair)
                for pair in blind
            )
            for name in together
        }
        worst = max(counts, key=lambda name: counts[name], default="")
        if not worst or not counts[worst]:
            break
        singles.append([together.pop(worst)])
    return ([[*together.values()]] if together else []) + singles


# -- the job ---------------------------------------------------------------------------------------


def job_checks(ranks: Sequence[Mapping[str, Any]], *, is_local: bool) -> Iterator[DoctorCheck]:
    """Yield the checks of what the ranks of a job have measured."""
    here = package_versions()
    for rank in ranks:
        if rank["checks"]:
            host = "" if is_local else rank["host"]
            if not is_local:
                yield from (DoctorCheck(**{**one, "host": host}) for one in rank["checks"])
                yield versions_check(rank["versions"], here, host)
            yield _reading_check(rank, host)
    if not is_local:
        for rank in ranks:
            if rank["checks"] and rank["rank"]:  # rank 0 is on the first host
                yield clock_check(rank["offset_ns"], rank["error_ns"], rank["host"])
    hosts = {rank["rank"]: rank["host"] for rank in ranks}
    ways = {rank["rank"]: rank["transport"] for rank in ranks}
    for rank in ranks:
        for pair in rank["pairs"]:
            yield rate_check(pair, hosts, ways[pair["first"]], is_local=is_local)
    if not is_local:
        yield from _network_checks(ranks)


def _network_checks(ranks: Sequence[Mapping[str, Any]]) -> Iterator[DoctorCheck]:
    """Yield which path data between hosts take, and what follows from the measured network."""
    names = list(dict.fromkeys(rank["host"] for rank in ranks))
    places = {rank["rank"]: names.index(rank["host"]) for rank in ranks}
    pairs = {
        (places[pair["first"]], places[pair["second"]]): _rate_of(pair)
        for rank in ranks
        for pair in rank["pairs"]
        if places[pair["first"]] < places[pair["second"]]
    }
    if not pairs:
        return
    yield DoctorCheck(
        "data between hosts",
        is_ok=True,
        value="; ".join(sorted({rank["path"] for rank in ranks})),
        reason="lanes are faster than ZeroMQ links",
    )
    choice = RuntimeConfig.from_mapping(os.environ).algorithm_choice
    changes = network_lines(names, pairs, choice)[len(pairs) :]
    yield DoctorCheck(
        "algorithms between hosts",
        is_ok=True,
        value="; ".join(changes) or "those of the rules",
        reason=f"with algorithm_choice {choice} they follow from the measured links",
    )


def _rate_of(pair: Mapping[str, Any]) -> PairRate:
    return PairRate(max(1, int(pair["latency_s"] * 1e9)), max(1, int(pair["bytes_per_s"] / 1e3)))


def versions_check(theirs: Mapping[str, str], ours: Mapping[str, str], host: str) -> DoctorCheck:
    """Return whether a host has the packages of this machine."""
    differing = [name for name in ours if theirs.get(name, "") != ours[name]]
    shown = [f"{name} {theirs.get(name) or 'missing'}, here {ours[name]}" for name in differing]
    packages = [f"{name}=={ours[name]}" for name in differing if name != "python"]
    return DoctorCheck.of_value(
        "versions",
        "; ".join(shown) or "the same as here",
        "ranks with different versions may disagree about messages or round differently",
        ""
        if not differing
        else f"install the same on all hosts: python -m pip install {' '.join(packages)}"
        if packages
        else "use the same Python on all hosts (python= in the host file)",
    )._replace(host=host)


def _reading_check(rank: Mapping[str, Any], host: str) -> DoctorCheck:
    others = rank["reads_memory_of"]
    blind = [other for other, reads in others.items() if not reads]
    return DoctorCheck.of_value(
        "single copy between ranks",
        f"rank {rank['rank']} cannot read the memory of rank {', '.join(blind)}"
        if blind
        else f"works between {1 + len(others)} ranks"
        if others
        else "one rank here",
        "with it a long array is copied once on its way to another rank, else twice",
        "allow process_vm_readv in the container's seccomp profile (docker --cap-add SYS_PTRACE), "
        "or set sysctl kernel.yama.ptrace_scope=1"
        if blind
        else "",
    )._replace(host=host)


def clock_check(offset_ns: int, error_ns: int, host: str) -> DoctorCheck:
    """Return whether the clock of a host agrees with that of the first host.

    Example:
        >>> clock_check(3_000_000_000, 50_000, "b").is_ok
        False
    """
    offset = offset_ns / 1e9
    is_far = abs(offset) - error_ns / 1e9 > _CLOCK_LIMIT_S
    return DoctorCheck.of_value(
        "clock",
        f"{offset:+.6f} s from the first host (error {error_ns / 1e9:.6f} s)",
        "times in logs and checkpoints of two hosts are compared; syncvar itself needs no clock",
        "set the clock by NTP: timedatectl set-ntp true, or start chronyd" if is_far else "",
    )._replace(host=host)


def rate_check(
    pair: Mapping[str, Any], hosts: Mapping[int, str], way: str, *, is_local: bool
) -> DoctorCheck:
    """Return whether the latency and bandwidth of a pair of ranks are as one expects."""
    first, second = hosts[pair["first"]], hosts[pair["second"]]
    is_here = first == second
    latency, rate = pair["latency_s"], pair["bytes_per_s"]
    is_slow = latency > (_LATENCY_LIMIT_HERE_S if is_here else _LATENCY_LIMIT_S)
    is_thin = not is_here and rate < _RATE_LIMIT
    path = f" over {way.partition(':')[0]}" if is_here else ""
    remedy = ""
    if is_slow or is_thin:
        remedy = (
            f"free a core: two ranks share {usable_cores()} with what else runs"
            if is_here
            else "choose a faster network by --iface (see the addresses), and look whether other "
            "programs use it"
        )
    return DoctorCheck.of_value(
        "two ranks" if is_here else "link",
        f"8 bytes in {latency * 1e6:.1f} us, {rate / 1e6:,.0f} MB/s{path}",
        "every call waits at least this long, and large arrays go at this rate",
        remedy,
    )._replace(
        host=("" if is_local else first) if is_here else f"{first} to {second}",
        numbers=() if is_here else _rate_of(pair),
    )


def failed_job(reason: str, hosts: str) -> DoctorCheck:
    """Return the check of a job that has not measured."""
    value, remedy = _split_remedy(reason)
    return DoctorCheck(
        "job",
        is_ok=False,
        value=value,
        reason="a job of two ranks on each host shows whether ranks start, meet and send",
        remedy=remedy,
        host=hosts,
    )
