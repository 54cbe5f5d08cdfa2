"""`syncvar report`: one file about a job and its machine, to attach to an issue.

The file is a zip archive. Every system opens one, forums for issues take it, and the flight records
in it stay files that `syncvar explain` reads. All texts pass `Redactor`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import sys
import time
import zipfile
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import syncvar
from syncvar.cli.doctor import doctor_command
from syncvar.cli.doctor.doctor_check import DoctorCheck, report_text
from syncvar.cli.explain import explain_records
from syncvar.cli.record_files import load
from syncvar.cli.redaction import Redactor, own_host_names
from syncvar.cli.running_jobs import ask, environment_of, find_jobs
from syncvar.cli.stacks import stacks_text
from syncvar.core.errors import ConfigError, error_message
from syncvar.core.output_files import PRIVATE, find_job, is_record, refuse_foreign_links
from syncvar.core.settings import RuntimeConfig

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

_LOG_LINES = 200
_LOG_BYTES = 1 << 20  # read from the end of a log
_RECORD_BYTES = 64 << 20
_FILES_MAX = 512  # of each kind: a job may have thousands of ranks
_LOGS = ("*.out", "*.err", "*.log")
_VARIABLES = (  # beginnings of the names of variables that the report shows
    *("SYNCVAR_", "OMP_", "MKL_", "OPENBLAS_", "NUMEXPR_", "VECLIB_", "PYTHON", "LD_", "MALLOC_"),
    *("SLURM_", "PBS_", "LSB_", "FLUX_", "PALS_", "JSM_", "OMPI_", "PMI", "HYDI_", "MV2_", "MPI_"),
    *("TORCHELASTIC_", "MASTER_", "GROUP_", "LOCAL_", "ROLE_", "HOROVOD_", "JOB_COMPLETION_"),
    *("TF_CONFIG", "RANK", "WORLD_SIZE", "XDG_", "TMPDIR", "CUDA_", "JAX_", "XLA_", "ZMQ_"),
)


class ReportedJob(NamedTuple):
    """The job of a report, as far as it is known."""

    socket: str = ""  # of its launcher; "" for a job that has ended
    about: Mapping[str, Any] = {}  # the launcher's answer: name, process, command, folders
    folders: tuple[Path, ...] = ()  # with its flight records and logs


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument(
        "job",
        nargs="?",
        metavar="JOB|FOLDER",
        help="name of a job, process number of its syncvar-launch, or a folder with flight records "
        "or logs (default: the newest running job, else the latest with flight records)",
    )
    parser.add_argument("-o", "--output", metavar="FILE", help="the file (syncvar-report-….zip)")
    parser.add_argument(
        "--keep-hosts", action="store_true", help="keep the names and addresses of hosts"
    )


def run(chosen: argparse.Namespace) -> int:
    """Write the report; print what is in it."""
    job = find_reported_job(chosen.job)
    launcher = environment_of(int(job.about["pid"])) if job.about else {}
    own = dict(os.environ)
    hosts = None if chosen.keep_hosts else _host_names(job)
    redactor = Redactor([own, launcher], hosts)
    parts = dict(_parts(job, launcher or own, redactor))
    path = Path(chosen.output or f"syncvar-report-{time.strftime('%Y%m%d-%H%M%S')}.zip")
    contents = "".join(f"{name:24} {title}\n" for name, (title, _) in parts.items())
    head = (
        f"syncvar report 1, by syncvar {syncvar.__version__} on {time.strftime('%Y-%m-%d %H:%M')}\n"
        f"job: {redactor.text(_job_line(job))}\n\n{contents}\nreplaced: {redactor.summary()}\n"
    )
    _write_zip(path, {"README.txt": head} | {name: text for name, (_, text) in parts.items()})
    print(f"{path}: {path.stat().st_size / 1024:.0f} KiB, {len(parts) + 1} files")
    print("".join(f"  {line}\n" for line in contents.splitlines()), end="")
    print(f"replaced: {redactor.summary()}")
    print(f"Look through it before you attach it: unzip -p {path} | less")
    return 0


def find_reported_job(name: str | None) -> ReportedJob:
    """Return the job of this name, process number or folder; without one the newest.

    Raises ConfigError if there is none of this name.
    """
    if name is not None and Path(name).is_dir():
        return ReportedJob(folders=(Path(name),))
    try:
        path, _ = find_jobs(name, os.environ)
    except ConfigError:
        records = find_job(os.environ, name or "")
        if records is None and name is not None:
            raise
        return ReportedJob(folders=(records,) if records is not None else ())
    answer = ask(path, question="job") or {}
    about = answer.get("job", {})
    status = ask(path, question="status", log=False) or {}
    about = {**about, **status.get("job", {})}
    named = [about.get("records", ""), about.get("log_dir", "")]
    records = find_job(os.environ, str(about.get("name", "")))
    folders = [Path(one) for one in dict.fromkeys(named) if one]
    folders += [records] if records is not None and records not in folders else []
    return ReportedJob(path, about, tuple(folders))


def _job_line(job: ReportedJob) -> str:
    if job.about:
        return f"{job.about['name']}, running since {job.about['lasted_s']:.0f} s: " + str(
            job.about["command"]
        )
    if job.folders:
        return f"ended; flight records and logs in {', '.join(map(str, job.folders))}"
    return "none"


def _host_names(job: ReportedJob) -> list[str]:
    """Return the names of this machine, and of the hosts of the job."""
    names = [*own_host_names(), *map(str, job.about.get("hosts", ()))]
    for path in _records(job):
        with contextlib.suppress(ValueError, OSError, AttributeError):
            names.append(str(json.loads(path.read_text("utf-8")).get("host", "")))
    return [*dict.fromkeys(names)]


def _records(job: ReportedJob) -> list[Path]:
    found = [
        path
        for folder in job.folders
        for path in sorted(folder.glob("flight-*.json"))
        if is_record(path.name) and path.stat().st_size <= _RECORD_BYTES
    ]
    return found[:_FILES_MAX]


# -- the parts -------------------------------------------------------------------------------------


def _parts(
    job: ReportedJob, environ: Mapping[str, str], redactor: Redactor
) -> Iterator[tuple[str, tuple[str, str]]]:
    """Yield (file name, (title, text)) of each part, with everything replaced."""
    checks = _doctor()
    yield "doctor.txt", ("checks of this machine", redactor.text(report_text(checks, verbose=True)))
    doctor = redactor.data(doctor_command.to_data(checks))
    yield "doctor.json", ("the same for programs", _json(doctor))
    yield "versions.txt", ("versions of Python and packages", redactor.text(_versions()))
    yield "settings.txt", ("settings of syncvar", redactor.text(_settings(environ)))
    shown = {name: text for name, text in environ.items() if name.startswith(_VARIABLES)}
    yield "environment.txt", ("variables about launchers", redactor.environment(shown))
    if job.socket:
        yield from _of_running(job, redactor)
    records = _records(job)
    for path in records:
        with contextlib.suppress(OSError, ValueError):
            data = redactor.data(json.loads(path.read_text("utf-8")))
            yield f"records/{redactor.text(path.name)}", ("flight record", _json(data))
    if records:
        yield "explain.txt", ("syncvar explain", redactor.text(_explained(records)))
    for path in _log_files(job):
        title = f"end of a log: the last {_LOG_LINES} lines"
        yield f"logs/{redactor.text(path.name)}", (title, redactor.text(_last_lines(path)))


def _of_running(job: ReportedJob, redactor: Redactor) -> Iterator[tuple[str, tuple[str, str]]]:
    stacks = ask(job.socket, question="stacks", all_threads=True)
    if stacks is not None and "ranks" in stacks:
        text = stacks_text(stacks, all_threads=True)
        yield "stacks.txt", ("stacks of the ranks", redactor.text(text))
    status = ask(job.socket, question="status", log=True)
    if status is not None and "ranks" in status:
        lines = [str(line) for line in status.pop("log", ())]
        yield "status.json", ("what the ranks do", _json(redactor.data(status)))
        if lines:
            text = redactor.text("\n".join(lines[-_LOG_LINES:]) + "\n")
            yield "log.txt", ("end of the output", text)


def _json(data: Any) -> str:
    return json.dumps(data, indent=1) + "\n"


def _doctor() -> list[DoctorCheck]:
    parser = argparse.ArgumentParser()
    doctor_command.add_options(parser)
    return list(doctor_command.all_checks(parser.parse_args(["--no-job"])))


def _versions() -> str:
    lines = [
        f"syncvar {syncvar.__version__}",
        f"Python {sys.version}",
        f"{platform.system()} {platform.release()} {platform.machine()}",
        "",
    ]
    lines += sorted({f"{one.name} {one.version}" for one in metadata.distributions() if one.name})
    return "\n".join(lines) + "\n"


def _settings(environ: Mapping[str, str]) -> str:
    lines = []
    try:
        config = RuntimeConfig.from_mapping(environ)
    except ConfigError as error:
        lines.append(f"# {error_message(error)}; these are the defaults")
        config = RuntimeConfig()
    for item in RuntimeConfig.runtime_settings():
        value = getattr(config, item.name)
        default = "" if value == item.default else f"  # default {item.default}"
        lines.append(f"{item.name} = {value}{default}")
    return "\n".join(lines) + "\n"


def _explained(records: Iterable[Path]) -> str:
    try:
        return explain_records(load([str(path) for path in records]))[0]
    except (ConfigError, LookupError, ValueError) as error:
        return f"{type(error).__name__}: {error}\n"


def _log_files(job: ReportedJob) -> list[Path]:
    found = [path for folder in job.folders for kind in _LOGS for path in sorted(folder.glob(kind))]
    return [path for path in found if path.is_file() and not path.is_symlink()][:_FILES_MAX]


def _last_lines(path: Path) -> str:
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _LOG_BYTES))
            text = file.read().decode("utf-8", "replace")
    except OSError as error:
        return f"{error}\n"
    return "".join(text.splitlines(keepends=True)[-_LOG_LINES:])


def _write_zip(path: Path, files: Mapping[str, str]) -> None:
    """Write a zip archive that only this user can read; a file of that name is replaced."""
    draft = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        refuse_foreign_links(str(path))
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with (
            open(os.open(draft, flags, PRIVATE), "wb") as file,
            zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive,
        ):
            for name, text in files.items():
                archive.writestr(name, text)
        draft.replace(path)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error
