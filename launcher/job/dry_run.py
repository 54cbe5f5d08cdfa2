"""The text of `--dry-run`: which rank would run where, with which cores, command and settings."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from syncvar.core.process_ids import rank_spans
from syncvar.core.settings import RuntimeConfig
from syncvar_launcher.io.output import escape
from syncvar_launcher.job.failure_report import mask_environment
from syncvar_launcher.local.host_resources import BLAS_VARIABLES
from syncvar_launcher.options.option_table import OPTIONS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from syncvar_launcher.job.job import Job
    from syncvar_launcher.local.worker_start import StartMethod
    from syncvar_launcher.options.launch_options import LaunchOptions

# `env` and `hosts` have their content.
_NOT_SHOWN = ("env", "hostfile", "include", "exclude", "join")
_UNITS = {"timeout": "s"}


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
        job.command(),
        host=job.host,
        notes=(
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
    argv: Sequence[str],
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
        argv: The command line of a worker.
        host: The name of the host.
        notes: Lines about cores, transport, persistent calls and the start of workers.
        servers: For each server its host, the servers with copies of its variables, and its command
            line.
    """
    table = [("rank", "host", "cores", "BLAS threads")]
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
    lines += ["command:", f"  {escape(shlex.join(argv))}"]
    if servers:
        lines += ["", "command of server 0:", f"  {escape(shlex.join(servers[0][2]))}"]
    if environments:
        extent = "of rank 0, and nothing else" if options.program.env_clear else "set for rank 0"
        masked = sorted(mask_environment(environments[0]).items())
        lines += ["", f"environment {extent}:"]
        lines += [f"  {escape(name)}={escape(shlex.quote(value))}" for name, value in masked]
    lines += ["", "settings:", *(f"  {line}" for line in columns(settings_rows(options)))]
    return "".join(f"{line}\n" for line in lines)


def settings_rows(options: LaunchOptions) -> list[tuple[str, str, str]]:
    """Return all settings as rows of name, value with unit, and origin."""
    origin = options.origin
    rows = []
    shown = [one for one in OPTIONS if not one.setting and one.key not in _NOT_SHOWN]
    shown.sort(key=lambda one: one.key == "config")  # last
    for one in shown:
        value = getattr(getattr(options, one.section), one.field_name)
        rows.append((one.key, _value(value, _UNITS.get(one.key, "")), origin[one.key]))
    for name, text in mask_environment(options.program.env).items():
        rows.append((f"env.{name}", escape(shlex.quote(text)), origin[f"env.{name}"]))
    for item in RuntimeConfig.runtime_settings():
        value = getattr(options.runtime, item.name)
        rows.append((item.name, _value(value, item.unit), origin[item.name]))
    return rows


def _value(value: object, unit: str) -> str:
    if value is None:
        return "none"
    if isinstance(value, tuple):
        words = [one if isinstance(one, str) else one.name for one in value]
        return escape(" ".join(words)) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        # Not :g, which would round a number of bytes.
        text = f"{value:g}" if isinstance(value, float) else str(value)
        return f"{text} {unit}" if unit else text
    return escape(str(value))


def _threads(environ: Mapping[str, str]) -> str:
    found = {environ[name] for name in BLAS_VARIABLES if name in environ}
    return escape("/".join(sorted(found))) if found else "as set"


def columns(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Return rows as lines with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
