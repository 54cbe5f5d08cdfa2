"""The launcher: from options to workers to an exit code.

Handlers for Ctrl-C and SIGTERM, and three standard streams, must be there before any slow import.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from typing import TYPE_CHECKING

from syncvar_launcher.job.start_progress import clock, write_error

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path
    from typing import NoReturn

    from syncvar.core.errors import SyncvarError
    from syncvar_launcher.local.worker_start import ForkServer
    from syncvar_launcher.options.launch_options import Allocation, LaunchOptions


_FORWARDED = (signal.SIGUSR1, signal.SIGUSR2)  # by default; they kill a process without handler
_SCHEDULER_VARIABLES = ("SLURM_JOB_ID", "SLURM_JOBID", "LSB_JOBID", "PBS_JOBID")
_SPARE_S = 2.0  # added to the limit of the clock, so that a step meets its own deadline first


def program() -> NoReturn:
    """Run `syncvar-launch`, and end the process with its exit code.

    It skips the interpreter's own end, which takes longer and only unloads modules.
    """
    code = main()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError):  # no reader: the interpreter reports that at its own end
        sys.exit(code)
    os._exit(code)


def main(argv: list[str] | None = None) -> int:
    """Run `syncvar-launch`, and return its exit code."""
    _handle_early_signals()
    _open_streams()
    clock.read_limits(os.environ)
    clock.enter("starts the process that workers are forked from")
    from syncvar_launcher.local.worker_start import start_early

    arguments = sys.argv[1:] if argv is None else argv
    ahead = start_early(arguments, os.environ)
    clock.enter("imports what reads its options")
    from syncvar.core.errors import SyncvarError
    from syncvar_launcher.local.host_resources import OF_LIMITS

    try:
        return _launch(arguments, ahead)
    except SyncvarError as error:
        from syncvar.core.errors import error_message

        _refuse(error_message(error), _code_of(error))
        return _exit_code_of(error)
    except OSError as error:
        if error.errno not in OF_LIMITS:
            raise
        from syncvar.core.exit_status import LIMITS
        from syncvar_launcher.local.host_resources import LimitTooLow

        _refuse(f"a limit of the system is too low: {error.strerror}", LimitTooLow.code)
        return LIMITS
    finally:
        clock.stop()
        if ahead is not None:
            ahead.close()


def _handle_early_signals() -> None:
    """Handle signals until the ranks begin: some end the launcher, others are dropped."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        is_ignored = signal.getsignal(number) == signal.SIG_IGN
        if not (number == signal.SIGHUP and is_ignored):  # as under nohup
            signal.signal(number, _end)
    for number in _FORWARDED:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _drop)
    # Some daemons leave SIGCHLD ignored: then no end of a rank could be seen.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def _exit_code_of(error: SyncvarError) -> int:
    from syncvar.core import exit_status
    from syncvar.core.errors import ConfigError, HostUnreachable
    from syncvar_launcher.local.host_resources import LimitTooLow, TimePassed

    codes: tuple[tuple[type[SyncvarError], int], ...] = (
        (LimitTooLow, exit_status.LIMITS),
        (ConfigError, exit_status.CONFIGURATION),
        (TimePassed, exit_status.TIMEOUT),
        (HostUnreachable, exit_status.RENDEZVOUS),
    )
    return next((code for kind, code in codes if isinstance(error, kind)), exit_status.INTERNAL)


def _code_of(error: SyncvarError) -> str:
    """Return the code for `syncvar explain`; the launcher's settings have one of their own."""
    from syncvar.core.errors import ConfigError
    from syncvar_launcher.options.option_table import WRONG_OPTION

    return WRONG_OPTION if error.code == ConfigError.code else error.code


def _refuse(sentence: str, code: str) -> None:
    """Report why nothing has started, on standard error or to the caller of `sv.run`."""
    outcome = os.environ.get("SYNCVAR_OUTCOME_FILE")
    if outcome is not None:
        from syncvar.protocol.object_codec import pack_object

        with contextlib.suppress(OSError):  # the caller is gone, or no file can be opened
            with open(outcome, "wb") as file:  # noqa: PTH123
                file.write(pack_object({"refused": sentence}))
            return
    from syncvar.core.errors import with_code

    sys.stderr.write(f"syncvar-launch: {with_code(sentence, code)}\n")


def _options_of(arguments: list[str], here: Path) -> LaunchOptions:
    """Read the options; for `sv.run` raise an exception for wrong ones."""
    from syncvar.core.errors import ConfigError
    from syncvar_launcher.options.parse_options import parse

    if "SYNCVAR_OUTCOME_FILE" not in os.environ:
        return parse(arguments, os.environ, here, _find_allocation)
    from contextlib import redirect_stderr
    from io import StringIO

    messages = StringIO()
    try:
        with redirect_stderr(messages):
            return parse(arguments, os.environ, here, _find_allocation)
    except SystemExit:
        sentence = messages.getvalue().partition("\n")[0].removeprefix("syncvar-launch: ")
        raise ConfigError(sentence) from None


def _find_allocation(environ: Mapping[str, str]) -> Allocation | None:
    """Return the scheduler's job in which the launcher runs, or None."""
    if not any(name in environ for name in _SCHEDULER_VARIABLES):
        return None
    from syncvar_launcher.schedulers.allocation import find_allocation

    return find_allocation(environ)


def _launch(arguments: list[str], ahead: ForkServer | None) -> int:
    from pathlib import Path

    from syncvar_launcher.options.option_table import parse_signals

    try:
        here = Path.cwd()
    except FileNotFoundError:  # somebody has removed the folder; with --cwd nothing needs it
        here = Path(os.environ.get("PWD", "/"))
    clock.enter("reads its options")
    chosen = _options_of(arguments, here)
    clock.set_limits(
        chosen.runtime.missing_report_s, chosen.runtime.rendezvous_timeout_s + _SPARE_S
    )
    if signal.SIGALRM in parse_signals(chosen.limits.forward_signals):
        clock.turn_off()
    joins = chosen.join.address is not None
    if ahead is not None and (joins or chosen.has_hosts or chosen.program.dry_run):
        ahead.close()
    if joins or chosen.has_hosts:
        clock.stop()  # logins, and waits for hosts, have limits and messages of their own
    if joins:
        from syncvar_launcher.join.join_client import join

        return join(chosen)
    _warn_about_other_launcher()
    if chosen.program.dry_run:
        sys.stdout.write(_dry_run(chosen, arguments))
        return 0
    for number in set(_FORWARDED).difference(parse_signals(chosen.limits.forward_signals)):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    _warn_about_settings(chosen)
    if chosen.has_hosts:
        from syncvar_launcher.hosts import multi_host  # one host needs nothing of it

        return multi_host.launch(chosen, arguments)
    return _launch_here(chosen, arguments, ahead)


def _warn_about_other_launcher() -> None:
    """Warn if another launcher, such as mpirun, has started several of this one."""
    from syncvar.bootstrap.launch_env.detection import started_with_others
    from syncvar.core.environment import wants_world_of_one

    seen = None if wants_world_of_one(os.environ) else started_with_others(os.environ)
    if seen is not None:
        sys.stderr.write(
            f"syncvar-launch: {seen[0]}, and each starts a job of its own beside the others; "
            "for one job start syncvar-launch without that launcher "
            "(SYNCVAR_WORLD_SIZE=1 turns this warning off)\n"
        )


def _warn_about_settings(chosen: LaunchOptions) -> None:
    """Warn about unknown variables, and about links between hosts without encryption."""
    from syncvar.core.settings import doubtful_variables

    for sentence in doubtful_variables(os.environ):
        sys.stderr.write(f"syncvar-launch: {sentence}\n")
    warning = chosen.runtime.exposure_warning
    if warning and (chosen.has_hosts or chosen.ranks.fake_hosts > 1):
        has_color = chosen.output.has_color(is_terminal=sys.stderr.isatty())
        begin, end = ("\x1b[31m", "\x1b[0m") if has_color else ("", "")
        sys.stderr.write(f"{begin}syncvar-launch: {warning}{end}\n")


def _dry_run(chosen: LaunchOptions, arguments: list[str]) -> str:
    from syncvar_launcher.dry_run import dry_run, dry_run_hosts
    from syncvar_launcher.job.job import Job

    if chosen.has_hosts:
        return dry_run_hosts(chosen)
    return dry_run(Job(chosen, arguments, os.environ))


def _launch_here(chosen: LaunchOptions, arguments: list[str], ahead: ForkServer | None) -> int:
    """Run a job on this machine; `ahead` is a fork server that may fit."""
    from syncvar_launcher.job.job import Job
    from syncvar_launcher.local.host_resources import check_limits

    clock.enter("looks for cores, and for the limits of the system")
    job = Job(chosen, arguments, os.environ)
    check_limits(chosen)
    clock.enter("starts the process that workers are forked from")
    with contextlib.ExitStack() as stack:
        server = job.fork_server(ahead)
        if server is not None:
            stack.enter_context(server)
        clock.enter("imports what starts ranks")
        from syncvar_launcher.job import restart_loop  # meanwhile the fork server imports NumPy

        return restart_loop.run(job, server)


def _end(number: int, _frame: object) -> None:
    """End at once, because no worker runs yet; a fork server ends with this process."""
    name = signal.Signals(number).name
    write_error(f"received {name} before the ranks began; nothing was started")
    os._exit(128 + number)


def _drop(number: int, _frame: object) -> None:
    """Report a signal to forward, and drop it, because no rank runs yet."""
    name = signal.Signals(number).name
    os.write(2, f"syncvar-launch: {name} was dropped: no rank has begun\n".encode())


def _open_streams() -> None:
    """Open /dev/null for each closed standard stream, so that no other file gets its number."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)  # the lowest free number, which is this one
            os.set_inheritable(null, True)  # noqa: FBT003  (it takes no keyword)
        if getattr(sys, name) is None:
            stream = open(number, "w" if number else "r", closefd=False, encoding="utf-8")  # noqa: SIM115
            setattr(sys, name, stream)
