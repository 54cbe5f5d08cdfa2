"""The command `syncvar doctor`: options, and the order of the checks."""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING, Any

from syncvar.cli.doctor.doctor_check import DoctorCheck, report_text
from syncvar.cli.doctor.host_jobs import (
    LauncherRuns,
    failed_job,
    groups_of_hosts,
    job_checks,
    survey_checks,
)
from syncvar.cli.doctor.machine_checks import machine_checks

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

FORMAT = "syncvar doctor 1"
_PASSED_ON = ("ssh", "iface", "remote_python")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--hostfile", metavar="FILE", help="check the hosts of this host file")
    where.add_argument(
        "-H", "--hosts", metavar="HOST[:N],…", help="check these hosts, as with syncvar-launch"
    )
    parser.add_argument("--ssh", metavar="CMD", help="command for ssh, as with syncvar-launch")
    parser.add_argument(
        "--iface", metavar="NAMES", help="interfaces and networks of links, as with syncvar-launch"
    )
    parser.add_argument(
        "--remote-python", metavar="PATH", help="interpreter on the hosts, as with syncvar-launch"
    )
    parser.add_argument(
        "--no-job", action="store_true", help="start no job: only look at this machine and log in"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "-v", "--verbose", action="store_true", help="say for every line why it matters"
    )
    parser.add_argument(
        "-T", "--timeout", type=float, default=120.0, metavar="S", help="limit of each job (120)"
    )


def run(chosen: argparse.Namespace) -> int:
    """Print the checks; return 1 if one of them failed, else 0."""
    checks = []
    shows_progress = sys.stderr.isatty()
    for check in all_checks(chosen):
        checks.append(check)
        if shows_progress:
            sys.stderr.write(f"\r\x1b[K{check.host} {check.name}")
            sys.stderr.flush()
    if shows_progress:
        sys.stderr.write("\r\x1b[K")
    if chosen.json:
        print(json.dumps(to_data(checks), indent=1))
    else:
        print(report_text(checks, verbose=chosen.verbose), end="")
    return int(any(not check.is_ok for check in checks))


def to_data(checks: list[DoctorCheck]) -> dict[str, Any]:
    """Return the checks as plain data, for JSON."""
    return {
        "format": FORMAT,
        "is_ok": all(check.is_ok for check in checks),
        "checks": [check._asdict() for check in checks],
    }


def all_checks(chosen: argparse.Namespace) -> Iterator[DoctorCheck]:
    """Yield the checks of this machine, and then those of the named hosts."""
    yield from machine_checks(os.environ)
    options = []
    for name in _PASSED_ON:
        if getattr(chosen, name) is not None:
            options += [f"--{name.replace('_', '-')}", getattr(chosen, name)]
    hosts = []
    if chosen.hostfile is not None:
        hosts = ["--hostfile", chosen.hostfile]
    elif chosen.hosts is not None:
        hosts = ["-H", chosen.hosts]
    runs = LauncherRuns(options, chosen.timeout)
    survey = runs.survey(hosts or ["--allocation", "off"])
    yield from survey_checks(survey, has_hosts=bool(hosts))
    if chosen.no_job:
        return
    if hosts:
        for lines in groups_of_hosts(survey):
            names = ", ".join(line.partition(" ")[0] for line in lines)
            yield from _measured(*runs.job(lines), names, is_local=False)
        return
    scheduled = survey.get("scheduler", {}).get("host_count", 0)
    if scheduled > 1:
        yield from _measured(*runs.job(scheduled=scheduled), "all hosts", is_local=False)
    yield from _measured(*runs.job(), "", is_local=True)


def _measured(
    ranks: list[dict[str, Any]], reason: str, hosts: str, *, is_local: bool
) -> Iterator[DoctorCheck]:
    if reason:
        yield failed_job(reason, hosts)
    else:
        yield from job_checks(ranks, is_local=is_local)
