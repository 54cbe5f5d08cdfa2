"""The text of `--dry-run`: which rank would run where, with which cores, command and settings.

Modules that only one kind of job needs are imported where its text is built.
"""

from __future__ import annotations

import contextlib
import shlex
from itertools import accumulate
from typing import TYPE_CHECKING

from syncvar.core.process_ids import rank_list, rank_spans
from syncvar_launcher.io.output import escape
from syncvar_launcher.job.failure_report import mask_environment
from syncvar_launcher.job.settings_table import columns, settings_rows
from syncvar_launcher.local.host_resources import BLAS_VARIABLES
from syncvar_launcher.local.worker_start import ON_HOSTS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from syncvar_launcher.job.job import Job
    from syncvar_launcher.local.worker_start import StartMethod
    from syncvar_launcher.options.launch_options import LaunchOptions


def dry_run(job: Job) -> str:
    """Return the text of `--dry-run` for a job on this machine."""
    from syncvar import _native
    from syncvar.bootstrap.job_private import runtime_directory
    from syncvar_launcher.local.shm_service import make_shm_service

    options = job.options
    torch = {}
    if options.ranks.torch_env:
        torch = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "<free port>"}
    hidden = {"SYNCVAR_JOB_ID": "<random>"}
    if options.output.log_dir is None:
        hidden["SYNCVAR_FLIGHT_DIR"] = "<private directory of the job>"
    # Without --env-clear ranks inherit all variables, and only the added ones are shown.
    inherited = job.base_environment() if options.program.env_clear else {}
    environments = [
        inherited
        | job.own_environment(rank, "ipc://<private directory>/store", "<private directory>", torch)
        | hidden
        for rank in range(options.ranks.workers)
    ]
    folder, _ = runtime_directory(job.environ)
    folders = [folder] * len(job.hosts.sizes)
    _, transport = make_shm_service(
        options, job.job_id, job.core_count, folders, hands_over=False
    ).describe()
    return dry_run_text(
        options,
        job.binding.cores,
        environments,
        [job.command(first) for first in _first_ranks(options)],
        host=job.host,
        notes=(
            *_elastic_lines(options),
            job.binding.reason,
            transport,
            _native.runner_text(options.runtime.call_runner),
            f"workers: {_checked_start(job.start_method)}",
        ),
        servers=[
            (job.host_name(one), mirrors, job.server_command(one))
            for one, mirrors in zip(job.servers, job.mirrors(), strict=True)
        ],
    )


def _checked_start(method: StartMethod) -> StartMethod:
    """Return how workers would start, after the checks that need NumPy."""
    from syncvar.bootstrap.preloaded_imports import unsupported_blas_reason

    doubt = unsupported_blas_reason() if method.may_change else ""
    return method._replace(is_forked=False, reason=doubt, may_change=False) if doubt else method


def dry_run_text(
    options: LaunchOptions,
    cores: Sequence[Sequence[int] | None],
    environments: Sequence[Mapping[str, str]],
    commands: Sequence[Sequence[str]],
    *,
    host: str = "localhost",
    notes: Sequence[str] = (),
    servers: Sequence[tuple[str, Sequence[int], Sequence[str]]] = (),
) -> str:
    """Write what a launch would do, as lines.

    Args:
        options: The options.
        cores: For each rank its cores, or None without binding.
        environments: For each rank its variables. The text shows those of rank 0 and masks secrets.
        commands: The command line of the workers of each program.
        host: The name of the host.
        notes: Lines about cores, transport, persistent calls and the start of workers.
        servers: For each server its host, the servers with copies of its variables, and its command
            line.
    """
    number = "worker" if options.ranks.fewest else "rank"
    table = [(number, "host", "cores", "BLAS threads")]
    for rank, (own, environ) in enumerate(zip(cores, environments, strict=True)):
        shown = "any" if own is None else rank_spans(own).replace(" ", "")
        where = escape(environ.get("SYNCVAR_HOST", host))
        table.append((str(rank), where, shown, _threads(environ)))
    lines = columns(table)
    if servers:
        rows = [
            (str(index), escape(host), rank_spans(mirrors) or "none")
            for index, (host, mirrors, _) in enumerate(servers)
        ]
        lines += ["", *columns([("server", "host", "copies on"), *rows]), ""]
    lines += [line for line in notes if line]
    lines += [f"folder {escape(str(options.program.cwd))}", ""]
    for ranks, argv in zip(_rank_lists(options), commands, strict=True):
        of = f" of {ranks}" if options.program.more else ""
        lines += [f"command{of}:", f"  {escape(shlex.join(argv))}"]
    if servers:
        lines += ["", "command of server 0:", f"  {escape(shlex.join(servers[0][2]))}"]
    if environments:
        extent = "of rank 0, and nothing else" if options.program.env_clear else "set for rank 0"
        masked = sorted(mask_environment(environments[0]).items())
        lines += ["", f"environment {extent}:"]
        lines += [f"  {escape(name)}={escape(shlex.quote(value))}" for name, value in masked]
        lines += _own_variables(options)
    lines += ["", "settings:", *(f"  {line}" for line in columns(settings_rows(options)))]
    return "".join(f"{line}\n" for line in lines)


def _first_ranks(options: LaunchOptions) -> list[int]:
    """Return the first rank of each program."""
    return list(accumulate((one.workers for one in options.programs[:-1]), initial=0))


def _rank_lists(options: LaunchOptions) -> list[str]:
    """Return the ranks of each program as text."""
    return [
        rank_list(range(first, first + one.workers))
        for first, one in zip(_first_ranks(options), options.programs, strict=True)
    ]


def _own_variables(options: LaunchOptions) -> Iterator[str]:
    """Yield what `--env` sets for the programs after the first one."""
    for ranks, one in zip(_rank_lists(options)[1:], options.program.more, strict=True):
        yield f"--env of {ranks}:"
        for name, value in sorted(mask_environment(one.env).items()):
            yield f"  {escape(name)}={escape(shlex.quote(value))}"


def _threads(environ: Mapping[str, str]) -> str:
    found = {environ[name] for name in BLAS_VARIABLES if name in environ}
    return escape("/".join(sorted(found))) if found else "as set"


def dry_run_hosts(chosen: LaunchOptions) -> str:
    """Return the text of `--dry-run` for a job on several hosts; it contacts no host."""
    if chosen.join.listen is not None:
        lines = _joined_lines(chosen)
    else:
        lines = [*chosen.hosts.notices, *_host_lines(chosen), *_placement_lines(chosen)]
        lines += _network_lines(chosen)
    lines += [*_elastic_lines(chosen), *_program_lines(chosen)]
    lines += ["", "settings:", *columns(settings_rows(chosen))]
    return "".join(f"{escape(line)}\n" for line in lines)


def _elastic_lines(chosen: LaunchOptions) -> list[str]:
    """Return a line about the members of an elastic job; nothing for other jobs."""
    ranks = chosen.ranks
    if not ranks.fewest:
        return []
    spares = f", and {ranks.spares} spare" if ranks.spares else ""
    members = f"{ranks.fewest} to {ranks.most} workers{spares}"
    return [
        f"elastic: {members}; the numbers of workers stay, and each generation ranks its members"
    ]


def _program_lines(chosen: LaunchOptions) -> Iterator[str]:
    """Yield which ranks run which program, if there are several."""
    if not chosen.program.more:
        return
    ranks = _rank_lists(chosen)
    if not chosen.ranks.workers:  # the first rank of the second program is not known yet
        counts = [one.workers for one in chosen.programs]
        ranks = [f"{count or 'all other'} rank{'s' * (count != 1)}" for count in counts]
    for text, one in zip(ranks, chosen.programs, strict=True):
        yield f"{text}: {shlex.join([*one.label.split(' ', 1), *one.args])}"


def _host_lines(chosen: LaunchOptions) -> list[str]:
    from syncvar_launcher.hosts.file_transfer import collect_files
    from syncvar_launcher.hosts.multi_host import JobHosts, show

    rows = [("host", "slots", "named in", "reached by")]
    with contextlib.closing(JobHosts(chosen, show)) as host_group:
        for host in chosen.hosts.entries:
            slots = "as many as cores" if host.slots is None else str(host.slots)
            slots += f", at most {host.max_slots}" if host.max_slots is not None else ""
            rows.append((host.name, slots, host.origin, shlex.join(host_group.command(host))))
    lines = columns(rows)
    if chosen.hosts.stage:
        lines += ["", f"--stage copies to each host {collect_files(chosen).describe()}"]
    return lines


def _placement_lines(chosen: LaunchOptions) -> Iterator[str]:
    from syncvar_launcher.hosts.host_checks import HostCapacity, place_workers

    ranks, entries = chosen.ranks, chosen.hosts.entries
    yield ""
    if chosen.hosts.discovery is not None:
        script = shlex.quote(str(chosen.hosts.discovery))
        yield f"hosts: those that {script} names, at the start and while the job runs"
    elif all(one.slots is not None for one in entries):
        known = [HostCapacity(one.name, one.slots or 1, one.max_slots) for one in entries]
        first = 0
        map_by, fewest = chosen.hosts.map_by, ranks.fewest
        sizes = place_workers(known, ranks.workers or None, map_by, fewest=fewest)
        for one, size in zip(known, sizes, strict=True):
            if size:
                numbers = range(first, first + size)
                text = f"workers {rank_spans(numbers)}" if fewest else rank_list(numbers)
                yield f"{one.name}: {text}"
            first += size
    else:
        yield (
            f"workers: {ranks.workers or 'one for each core'}, placed by "
            f"{chosen.hosts.map_by} when the hosts have reported their cores"
        )
    if ranks.servers:
        copies = ""
        if ranks.server_replicas:
            word = "copies" if ranks.server_replicas > 1 else "copy"
            copies = f", {ranks.server_replicas} {word} of each on others"
        yield f"servers: {ranks.servers}, one after another on the hosts that have workers{copies}"


def _network_lines(chosen: LaunchOptions) -> Iterator[str]:
    job = chosen.hosts.scheduled
    network = "of the network by which ssh goes"
    if job is not None:
        others = f"all hosts but {job.here}" if job.here else "all hosts"
        yield (
            f"{job.name}: {job.starter.program} starts the agents on {others}; "
            "--ssh CMD does it otherwise, --allocation off takes no host from the job"
        )
        network = "by which all reach each other"
    if chosen.hosts.iface:
        network = f"by --iface {chosen.hosts.iface}"
    yield f"addresses: found when the job starts, {network}"
    yield f"workers are {ON_HOSTS[chosen.ranks.start_method]}"
    yield f"links: {chosen.runtime.between_hosts} (encryption {chosen.runtime.encryption})"
    if chosen.runtime.exposure_warning:
        yield chosen.runtime.exposure_warning


def _joined_lines(chosen: LaunchOptions) -> list[str]:
    from syncvar_launcher.hosts.file_transfer import collect_files
    from syncvar_launcher.join.join_rendezvous import join_lines

    lines = join_lines(chosen)
    if chosen.hosts.stage:
        lines.append(f"--stage copies to each host {collect_files(chosen).describe()}")
    lines.append(
        f"workers: {chosen.ranks.workers or 'one for each slot that is offered'}, placed by "
        f"{chosen.hosts.map_by} when all have joined"
    )
    return [*lines, f"workers are {ON_HOSTS[chosen.ranks.start_method]}"]
