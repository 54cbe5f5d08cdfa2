"""A job on several hosts, from the command line to the exit code."""

from __future__ import annotations

import contextlib
import os
import resource
import shlex
import signal
import sys
from functools import partial
from typing import TYPE_CHECKING

from syncvar.core.rank_text import rank_list
from syncvar_launcher.hosts.placement import HostCapacity, place_workers
from syncvar_launcher.hosts.provision import JobHosts
from syncvar_launcher.hosts.staging import collect_files
from syncvar_launcher.io.output import escape
from syncvar_launcher.job.dry_run import columns, settings_rows
from syncvar_launcher.job.job import Job
from syncvar_launcher.local.host_resources import LimitTooLow
from syncvar_launcher.local.worker_start import ON_HOSTS
from syncvar_launcher.options.launch_options import check_debugged
from syncvar_launcher.options.option_table import shown_ranks

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from syncvar_launcher.options.launch_options import LaunchOptions

_FILES, _FILES_OF_A_HOST = 32, 4


def launch(chosen: LaunchOptions, arguments: Sequence[str]) -> int:
    """Start a job on the named hosts; return the exit code."""
    for sentence in chosen.hosts.notices:
        _say(sentence)
    _check_files(chosen)
    # In the background reading a terminal fails, and does not stop us and with us all ranks.
    signal.signal(signal.SIGTTIN, signal.SIG_IGN)
    with contextlib.closing(JobHosts(chosen, _say)) as host_group:
        host_group.open(_import_the_rest)
        # Not before the logins.
        from syncvar_launcher.hosts.remote_workers import RemoteWorkers
        from syncvar_launcher.job import restart_loop

        workers = sum(one.workers for one in host_group.sites)
        shown_ranks(chosen.output.selection, workers)
        check_debugged(chosen.ranks.debug, workers)
        final = chosen._replace(ranks=chosen.ranks._replace(workers=workers, fake_hosts=1))
        job = Job(final, arguments, os.environ, host_group)
        host_group.exit_code = restart_loop.run(job, None, partial(RemoteWorkers, host_group))
        return host_group.exit_code


def _import_the_rest() -> None:
    """Import what a job needs later; a login takes longer than that."""
    from syncvar_launcher.job import restart_loop  # noqa: F401


def _check_files(chosen: LaunchOptions) -> None:
    hosts = len(chosen.hosts.entries) or chosen.join.host_count or chosen.ranks.workers
    needed = (
        _FILES
        + hosts * _FILES_OF_A_HOST * (1 + (chosen.join.listen is not None))
        + 2 * (chosen.ranks.workers or hosts) * (chosen.output.log_dir is not None)
    )
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < needed:
        raise LimitTooLow(
            f"the launcher needs {needed} open files for {hosts} hosts, and {soft} are allowed: "
            f"ulimit -n {needed}"
        )


def _say(sentence: str) -> None:
    sys.stderr.write(f"syncvar-launch: {sentence}\n")
    sys.stderr.flush()


def dry_run(chosen: LaunchOptions) -> str:
    """Return what a launch on these hosts would do; it contacts no host."""
    if chosen.join.listen is not None:
        return _dry_run_joined(chosen)
    rows = [("host", "slots", "named in", "reached by")]
    with contextlib.closing(JobHosts(chosen, _say)) as host_group:
        for host in chosen.hosts.entries:
            slots = "as many as cores" if host.slots is None else str(host.slots)
            slots += f", at most {host.max_slots}" if host.max_slots is not None else ""
            rows.append((host.name, slots, host.origin, shlex.join(host_group.command(host))))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    if chosen.hosts.stage:
        lines += ["", f"--stage copies to each host {collect_files(chosen).describe()}"]
    known = [HostCapacity(one.name, one.slots or 1, one.max_slots) for one in chosen.hosts.entries]
    if all(one.slots is not None for one in chosen.hosts.entries):
        sizes = place_workers(known, chosen.ranks.workers or None, chosen.hosts.map_by)
        lines += [
            "",
            *(
                f"{one.name}: {rank_list(range(first, first + size))}"
                for one, first, size in _spans(known, sizes)
            ),
        ]
    else:
        lines += [
            "",
            (
                f"workers: {chosen.ranks.workers or 'one for each core'}, placed by "
                f"{chosen.hosts.map_by} when the hosts have told their cores"
            ),
        ]
    if chosen.ranks.servers:
        copies = (
            f", {chosen.ranks.server_replicas} "
            f"cop{'ies' if chosen.ranks.server_replicas > 1 else 'y'} of each on others"
            if chosen.ranks.server_replicas
            else ""
        )
        lines += [
            f"servers: {chosen.ranks.servers}, in turns on the hosts that have workers{copies}"
        ]
    job = chosen.hosts.scheduled
    if job is not None:
        others = f"all hosts but {job.here}" if job.here else "all hosts"
        lines += [
            (
                f"{job.name}: {job.starter.program} starts the agents on {others}; "
                "--ssh CMD does it otherwise, --allocation off takes no host from the job"
            )
        ]
    network = (
        "by which all reach each other" if job is not None else "of the network by which ssh goes"
    )
    lines += [
        (
            "addresses: asked for when the job starts, "
            f"{'by --iface ' + chosen.hosts.iface if chosen.hosts.iface else network}"
        )
    ]
    lines += [f"workers are {ON_HOSTS[chosen.ranks.start_method]}"]
    lines += [f"links: {chosen.runtime.between_hosts} (encryption {chosen.runtime.encryption})"]
    lines += [chosen.runtime.exposure_warning] if chosen.runtime.exposure_warning else []
    return "".join(
        f"{escape(line)}\n"
        for line in (
            *chosen.hosts.notices,
            *lines,
            "",
            "settings:",
            *columns(settings_rows(chosen)),
        )
    )


def _dry_run_joined(chosen: LaunchOptions) -> str:
    """Return what a launch with `--listen` would do; it does not listen."""
    from syncvar_launcher.join.join_rendezvous import (
        join_command,
        listen_address,
    )  # brings sockets for hosts that join

    address, port = listen_address(chosen.join.listen or "")
    whom = (
        f"{chosen.join.host_count} hosts"
        if chosen.join.host_count is not None
        else f"as many hosts as have {chosen.ranks.workers} slots together"
    )
    is_there = chosen.join.key_file.exists()
    lines = [
        (
            f"waits at {address}, port {port or 'chosen by the system'}, for {whom}, up to "
            f"{chosen.runtime.rendezvous_timeout_s:g} s; each runs:"
        ),
        f"  {join_command(address, port or 'PORT', chosen)}",
        f"key: {'read from' if is_there else 'to be made in'} {chosen.join.key_file}",
        *(
            [f"--stage copies to each host {collect_files(chosen).describe()}"]
            if chosen.hosts.stage
            else []
        ),
        (
            f"workers: {chosen.ranks.workers or 'one for each slot that is offered'}, placed by "
            f"{chosen.hosts.map_by} when all have joined"
        ),
        f"workers are {ON_HOSTS[chosen.ranks.start_method]}",
    ]
    return "".join(
        f"{escape(line)}\n" for line in (*lines, "", "settings:", *columns(settings_rows(chosen)))
    )


def _spans(
    rooms: Sequence[HostCapacity], sizes: Sequence[int]
) -> Iterator[tuple[HostCapacity, int, int]]:
    first = 0
    for one, size in zip(rooms, sizes, strict=True):
        if size:
            yield one, first, size
        first += size
