"""What `syncvar doctor` checks on one machine, without another process."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import resource
import shutil
import sys
from importlib import metadata
from typing import TYPE_CHECKING, Any

import numpy as np

from syncvar import _native
from syncvar.bootstrap.job_private import base_directory, runtime_directory
from syncvar.bootstrap.launch_env.detection import (
    LAUNCHERS,
    launcher_info,
    unknown_identity_reason,
)
from syncvar.cli.doctor.doctor_check import DoctorCheck
from syncvar.core.environment import PREFIX
from syncvar.core.errors import ConfigError, error_message
from syncvar.core.output_files import check_folder, state_folder
from syncvar.core.settings import RuntimeConfig, doubtful_variables
from syncvar.shm.host_limits import (
    CONTROL_GROUPS,
    MemoryLimits,
    control_groups,
    core_quota,
    read_file,
)
from syncvar.shm.segment_file import create, format_bytes, unsupported_machine

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_OPTIONAL = (
    *("torch", "jax", "mpi4py", "cloudpickle", "ray", "distributed", "rich", "prometheus-client"),
    *("matplotlib", "scikit-learn"),
)
_BLAS_VARIABLES = (
    *("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"),
    *("NUMEXPR_NUM_THREADS", "VECLIB_MAXIMUM_THREADS"),
)
_SHM_FOLDER = "/dev/shm"  # noqa: S108  (only looked at)
_SHM_LEAST = 32 << 20  # containers get 64 MiB by default
_RANK_BYTES = 100 << 20  # Python, NumPy and syncvar of a rank
_CORES_LEAST = 2
_FILES_LEAST = 256  # 16 ranks on two hosts
_TASKS_OF_A_RANK, _TASKS = 4, 5
_FOLDER_LEAST = 16 << 20
_MEMLOCK_LEAST = 64 << 10
_PTRACE_SCOPES = (
    *("allowed for processes of one user", "ranks permit each other"),
    *("only an administrator", "nobody", "unknown"),
)


def machine_checks(environ: Mapping[str, str]) -> list[DoctorCheck]:
    """Return the checks of this machine, for a process with this environment."""
    return [
        *_versions(environ),
        *_cores(),
        *_memory(),
        *_limits(),
        *_folders(environ),
        *_environment(environ),
    ]


def package_versions() -> dict[str, str]:
    """Return the versions of Python and of what syncvar needs; "" for a missing package."""
    found = {"python": platform.python_version()}
    for name in ("syncvar", *(name for name, _ in _requirements())):
        found[name] = _installed(name)
    return found


def usable_cores() -> int:
    """Return the number of cores by affinity and quota."""
    return min(len(os.sched_getaffinity(0)), core_quota() or sys.maxsize)


# -- versions --------------------------------------------------------------------------------------


def _installed(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def _requirements() -> list[tuple[str, str]]:
    """Return name and least version of the packages that syncvar needs."""
    try:
        lines = metadata.requires("syncvar") or []
    except metadata.PackageNotFoundError:
        lines = []
    matches = (re.match(r"([\w.-]+)\s*>=\s*([\d.]+)\s*$", line) for line in lines)
    return [(match[1], match[2]) for match in matches if match]


def _numbers(version: str) -> tuple[int, ...]:
    """Return the numbers at the start of a version, for comparisons."""
    match = re.match(r"[\d.]+", version)
    return tuple(int(part) for part in match[0].split(".") if part) if match else ()


def _versions(environ: Mapping[str, str]) -> Iterator[DoctorCheck]:
    python = platform.python_version()
    yield DoctorCheck(
        "Python",
        is_ok=True,
        value=f"{python} ({sys.executable})",
        reason="all ranks of a job need the same version",
    )
    needed = dict(_requirements())
    wrong, shown = [], [f"syncvar {_installed('syncvar') or 'not installed by pip'}"]
    for name, least in needed.items():
        version = _installed(name)
        shown.append(f"{name} {version or 'missing'}")
        if _numbers(version) < _numbers(least):
            wrong.append(f"{name}>={least}")
    with contextlib.suppress(ImportError):
        import zmq

        has_curve = bool(zmq.has("curve"))
        shown.append(f"libzmq {zmq.zmq_version()}{'' if has_curve else ' without CURVE'}")
        if not has_curve:
            wrong.append("pyzmq with CURVE, which encrypts links between hosts")
    yield DoctorCheck.of_value(
        "packages",
        ", ".join(shown),
        "syncvar was tested with these versions or newer ones, and all hosts need the same",
        f"{sys.executable} -m pip install {' '.join(map(repr, wrong))}" if wrong else "",
    )
    extras = [f"{name} {version}" for name in _OPTIONAL if (version := _installed(name))]
    yield DoctorCheck(
        "optional packages",
        is_ok=True,
        value=", ".join(extras) or "none",
        reason='`pip install "syncvar[NAME]"` adds what a part of syncvar needs',
    )
    missing = _native.missing_reason()
    remedy = missing and "install a C compiler and Python's headers, and then syncvar again"
    if environ.get(f"{PREFIX}CALL_RUNNER") == "python":
        missing = f"{PREFIX}CALL_RUNNER=python turns it off"
        remedy = f"unset {PREFIX}CALL_RUNNER"
    yield DoctorCheck.of_value(
        "C extension",
        f"not used: {missing}" if missing else "used",
        "small calls take several times longer without it; results are the same",
        remedy,
    )


# -- cores and memory ------------------------------------------------------------------------------


def _cores() -> Iterator[DoctorCheck]:
    allowed, online = sorted(os.sched_getaffinity(0)), os.cpu_count() or 1
    quota = core_quota()
    shared = len(allowed) == 1 < online
    yield DoctorCheck.of_value(
        "cores",
        f"{len(allowed)} of {online} usable{f' (core {allowed[0]})' if shared else ''}",
        "ranks that share a core wait for each other in every call",
        "the affinity leaves one core: start from a shell without taskset, or ask the scheduler "
        "for more cores (srun --cpus-per-task)"
        if shared
        else "",
    )
    groups = control_groups("cpu", None, CONTROL_GROUPS)
    version = f"cgroup v{groups[0][0]}" if groups else "no control group"
    yield DoctorCheck.of_value(
        "CPU quota",
        f"{version}: {f'about {quota} of {len(allowed)} cores' if quota else 'none'}",
        "the system stops a process that has used its quota, and all ranks wait for it",
        "raise the quota (docker --cpus, Kubernetes limits.cpu): two ranks share one core"
        if quota is not None and quota < _CORES_LEAST <= len(allowed)
        else "",
    )


def _memory() -> Iterator[DoctorCheck]:
    limits = MemoryLimits()
    needed = usable_cores() * _RANK_BYTES
    least = limits.shortage(1 << 60)  # more than any machine has: it names the nearest limit
    value = "unknown"
    if least is not None:
        free = max(0, least.limit - least.used)
        value = (
            f"{format_bytes(free)} free of {format_bytes(least.limit)}, by {least.limit_name}; "
            f"{usable_cores()} idle ranks need about {format_bytes(needed)}"
        )
    shortage = limits.shortage(needed)
    yield DoctorCheck.of_value(
        "memory",
        value,
        "the system kills a rank that exceeds the limit, and with it the job",
        f"start fewer ranks, or raise {shortage.limit_name}" if shortage else "",
    )
    yield _shared_memory()
    yield _shm_folder()
    yield _ptrace_scope()


def _shared_memory() -> DoctorCheck:
    size = RuntimeConfig().shm_bytes
    problem = unsupported_machine(os.uname().machine)
    segment, problem = (None, problem) if problem else create(size, 2, 2)
    if segment is not None:
        segment.close()
    return DoctorCheck.of_value(
        "shared memory",
        f"none: {problem}"
        if segment is None
        else f"{segment.form}, {format_bytes(size)} virtual for each job",
        "ranks of one host exchange arrays through it; without it they use sockets",
        "allow memfd_create in the container's seccomp profile, or enlarge /dev/shm"
        if segment is None
        else "",
    )


def _shm_folder() -> DoctorCheck:
    try:
        usage = shutil.disk_usage(_SHM_FOLDER)
    except OSError as error:
        value, is_small = f"none ({error.strerror})", True
    else:
        value = f"{format_bytes(usage.free)} free of {format_bytes(usage.total)}"
        is_small = usage.free < _SHM_LEAST
    return DoctorCheck.of_value(
        _SHM_FOLDER,
        value,
        "syncvar uses it where memfd is missing, and so do MPI libraries and data loaders of "
        "PyTorch; a full one ends a process with SIGBUS",
        "docker run --shm-size=1g; in Kubernetes mount an emptyDir with medium: Memory there; or "
        f"remove old files (ls {_SHM_FOLDER})"
        if is_small
        else "",
    )


def _ptrace_scope() -> DoctorCheck:
    scope = read_file("/proc/sys/kernel/yama/ptrace_scope").strip().decode("ascii", "replace")
    meaning = _PTRACE_SCOPES[int(scope or 0) if scope in ("", "0", "1", "2", "3") else -1]
    is_root = os.geteuid() == 0
    is_refused = scope == "3" or (scope == "2" and not is_root)
    return DoctorCheck.of_value(
        "single copy",
        f"{f'ptrace_scope {scope}' if scope else 'no Yama'}: {meaning}",
        "a rank reads long arrays from the memory of another one (process_vm_readv); without that "
        "they are copied twice",
        "sysctl kernel.yama.ptrace_scope=1" if is_refused else "",
    )


# -- limits ----------------------------------------------------------------------------------------


def _limits() -> Iterator[DoctorCheck]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = f"{_limit_text(soft)} allowed (ulimit -n), at most {_limit_text(hard)}"
    is_low = soft != resource.RLIM_INFINITY and soft < _FILES_LEAST
    can_rise = hard == resource.RLIM_INFINITY or hard >= _FILES_LEAST
    yield DoctorCheck.of_value(
        "open files",
        files,
        "the launcher and every link between ranks need some",
        (
            f"ulimit -n {_FILES_LEAST if hard == resource.RLIM_INFINITY else hard}"
            if can_rise
            else "ask the administrator for a higher limit (limits.conf, LimitNOFILE=)"
        )
        if is_low
        else "",
    )
    yield _task_limit()
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    is_low = soft != resource.RLIM_INFINITY and soft < _MEMLOCK_LEAST
    yield DoctorCheck.of_value(
        "locked memory",
        "unlimited" if soft == resource.RLIM_INFINITY else f"{format_bytes(soft)} (ulimit -l)",
        "libsodium locks the keys of encrypted links; MPI libraries lock buffers of InfiniBand",
        "ulimit -l 65536" if is_low else "",
    )


def _limit_text(number: int) -> str:
    return "unlimited" if number == resource.RLIM_INFINITY else str(number)


def _task_limit() -> DoctorCheck:
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    needed = _TASKS + _TASKS_OF_A_RANK * usable_cores()
    rooms = {}
    if soft != resource.RLIM_INFINITY and os.geteuid():  # the system asks root for none
        rooms["ulimit -u"] = soft
    for _, folder in control_groups("pids", None, CONTROL_GROUPS):
        most, now = (read_file(f"{folder}/pids.{name}").strip() for name in ("max", "current"))
        if most.isdigit() and now.isdigit():
            rooms[f"{folder}/pids.max"] = max(0, int(most) - int(now))
    name = min(rooms, key=lambda one: rooms[one], default="")
    value = f"{rooms[name]} more by {name}" if name else "no limit"
    return DoctorCheck.of_value(
        "processes",
        f"{value}; a job with a rank for each core needs {needed}",
        "each rank is a process with three more threads",
        f"raise {name}, or start fewer ranks" if name and rooms[name] < needed else "",
    )


# -- folders ---------------------------------------------------------------------------------------


def _folders(environ: Mapping[str, str]) -> Iterator[DoctorCheck]:
    folder = str(runtime_directory(environ)[0])
    problem = ""
    value = folder
    try:
        about = os.statvfs(folder)
        free = about.f_bavail * about.f_frsize
        noexec = ", noexec" if about.f_flag & os.ST_NOEXEC else ""
        value = f"{folder}, {format_bytes(free)} free{noexec}"
        base_directory(environ)
        check_folder(folder, "temporary files")
        if free < _FOLDER_LEAST:
            problem = f"free at least {format_bytes(_FOLDER_LEAST)} there, or set TMPDIR"
    except (ConfigError, OSError) as error:
        text = error_message(error) if isinstance(error, ConfigError) else str(error)
        problem = f"{text}; set TMPDIR or XDG_RUNTIME_DIR to a folder of yours with room"
    yield DoctorCheck.of_value(
        "temporary folder",
        value,
        "sockets of a job, and copies of scripts (--stage), are there while it runs",
        problem,
    )
    state, refusal = state_folder(environ)
    yield DoctorCheck.of_value(
        "flight records",
        f"in {state}" if state else "nowhere",
        "ranks of a failed job leave their last calls there, for syncvar explain",
        refusal,
    )


# -- environment -----------------------------------------------------------------------------------


def _environment(environ: Mapping[str, str]) -> Iterator[DoctorCheck]:
    yield _settings(environ)
    yield _blas(environ)
    yield launch_environment(environ)


def _settings(environ: Mapping[str, str]) -> DoctorCheck:
    names = {PREFIX + name.upper() for name in RuntimeConfig.names()}
    shown = sorted(names & set(environ))
    problems = doubtful_variables(environ)
    try:
        RuntimeConfig.from_mapping(environ)
    except ConfigError as error:
        problems.append(error_message(error))
    return DoctorCheck.of_value(
        "settings",
        ", ".join(shown) or "defaults",
        "a variable with a wrong name or value stops a job, or has no effect",
        "; ".join(problems),
    )


def _blas(environ: Mapping[str, str]) -> DoctorCheck:
    cores = usable_cores()
    chosen = {name: environ[name] for name in _BLAS_VARIABLES if name in environ}
    first = {name: text.split(",")[0] for name, text in chosen.items()}  # OMP takes "4,2"
    numbers = {name: int(text) for name, text in first.items() if text.isdecimal()}
    most = max(numbers.values(), default=1)
    wrong = [name for name in chosen if name not in numbers or numbers[name] < 1]
    many = [name for name, number in numbers.items() if number > max(1, cores // 2)]
    value = ", ".join(f"{name}={text}" for name, text in chosen.items())
    value = value or f"the launcher sets them ({cores} cores shared among the ranks of a host)"
    remedy = ""
    if wrong or many:
        names = ", ".join(wrong or many)
        remedy = f"unset {names}: the launcher then gives each rank its share of the cores"
    return DoctorCheck.of_value(
        "BLAS threads",
        f"{_blas_name()}; {value}",
        f"two ranks would start {2 * most} threads on {cores} cores"
        if many
        else "threads of several ranks on one core slow each other down",
        remedy,
    )


def _blas_name() -> str:
    with contextlib.suppress(Exception):  # the form of show_config is not promised
        config: Any = np.show_config(mode="dicts")
        about = config["Build Dependencies"]["blas"]
        return f"{about['name']} {about['version']}"
    return "unknown BLAS"


def launch_environment(environ: Mapping[str, str]) -> DoctorCheck:
    """Return which launcher or scheduler has started this process, and by which variables."""
    present = [one for one in (kind(environ) for kind in LAUNCHERS) if one.is_present()]
    names = [f"{one.name} ({one.source()})" for one in present]
    value = ", inside ".join(names) or "none: a process of its own"
    problem = ""
    try:
        info = launcher_info(environ)
        if info is not None:
            value = f"rank {info.rank} of {info.world_size} by {info.source}; found: {value}"
        else:
            problem = unknown_identity_reason(environ)
    except ConfigError as error:
        problem = error_message(error)
    return DoctorCheck.of_value(
        "launcher around this process",
        value,
        "variables of another launcher say which rank a process is; the innermost counts",
        problem,
    )
