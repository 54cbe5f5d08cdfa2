"""The launcher: from options to workers to an exit code.

Handlers for Ctrl-C and SIGTERM, and three standard streams, must be there before any slow import.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from typing import TYPE_CHECKING

from syncvar_launcher.job.start_clock import clock, write_error

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path
    from typing import NoReturn

    from syncvar_launcher.local.fork_client import ForkServer
    from syncvar_launcher.options.allocated_hosts import Allocation
    from syncvar_launcher.options.launch_options import LaunchOptions


_EARLY = (
    signal.SIGUSR1,
    signal.SIGUSR2,
)  # the launcher passes them on by default; unhandled they kill
_SCHEDULER_VARIABLES = ("SLURM_JOB_ID", "SLURM_JOBID", "LSB_JOBID", "PBS_JOBID")
_SPARE_S = 2.0  # a step with a deadline of its own meets that first


def program() -> NoReturn:
    """Run `syncvar-launch`, and end the process with its exit code.

    It skips the interpreter's own end, which takes longer and only unloads modules.
    """
    code = main()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError):  # nobody reads it, which the interpreter says at its own end
        sys.exit(code)
    os._exit(code)


def main(argv: list[str] | None = None) -> int:
    """Run `syncvar-launch`, and return its exit code."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if (
            number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN
        ):  # ignored under nohup
            signal.signal(number, _end)
    for number in _EARLY:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _drop)
    signal.signal(
        signal.SIGCHLD, signal.SIG_DFL
    )  # ignored, as some daemons leave it, no end of a rank could be told
    _open_streams()
    clock.read_limits(os.environ)
    clock.enter("starts the process that workers are forked from")
    from syncvar_launcher.local.fork_client import start_early

    arguments = sys.argv[1:] if argv is None else argv
    ahead = start_early(arguments, os.environ)
    clock.enter("imports what reads its options")
    from syncvar.core import exit_status
    from syncvar.core.errors import ConfigError, HostUnreachable, SyncvarError
    from syncvar_launcher.job.resource_limits import OF_LIMITS, LimitTooLow, TimePassed

    try:
        return _run(arguments, ahead)
    except ConfigError as error:
        _refuse(str(error))
        return exit_status.LIMITS if isinstance(error, LimitTooLow) else exit_status.CONFIGURATION
    except OSError as error:
        if error.errno not in OF_LIMITS:
            raise
        _refuse(f"a limit of the system is too low: {error.strerror}")
        return exit_status.LIMITS
    except HostUnreachable as error:
        _refuse(str(error))
        return exit_status.TIMEOUT if isinstance(error, TimePassed) else exit_status.RENDEZVOUS
    except SyncvarError as error:
        _refuse(str(error))
        return exit_status.INTERNAL
    finally:
        clock.stop()
        if ahead is not None:
            ahead.close()


def _refuse(sentence: str) -> None:
    """Report why nothing has started, on standard error or to the caller of `sv.run`."""
    outcome = os.environ.get("SYNCVAR_OUTCOME_FILE")
    if outcome is not None:
        from syncvar.protocol.object_codec import pack_object

        with contextlib.suppress(OSError):  # the caller is gone, or no file can be opened
            with open(outcome, "wb") as file:  # noqa: PTH123
                file.write(pack_object({"refused": sentence}))
            return
    sys.stderr.write(f"syncvar-launch: {sentence}\n")


def _options_of(arguments: list[str], here: Path) -> LaunchOptions:
    """Read the options; for `sv.run` raise an exception for wrong ones."""
    from syncvar.core.errors import ConfigError
    from syncvar_launcher.options.parse_options import parse

    if "SYNCVAR_OUTCOME_FILE" not in os.environ:
        return parse(arguments, os.environ, here, _find_allocation)
    from contextlib import redirect_stderr
    from io import StringIO

    said = StringIO()
    try:
        with redirect_stderr(said):
            return parse(arguments, os.environ, here, _find_allocation)
    except SystemExit:
        sentence = said.getvalue().partition("\n")[0].removeprefix("syncvar-launch: ")
        raise ConfigError(sentence) from None


def _find_allocation(environ: Mapping[str, str]) -> Allocation | None:
    """Return the job of a scheduler in which the launcher runs, or None."""
    if not any(name in environ for name in _SCHEDULER_VARIABLES):
        return None
    from syncvar_launcher.schedulers.allocation import find_allocation

    return find_allocation(environ)


def _run(arguments: list[str], ahead: ForkServer | None) -> int:
    from pathlib import Path

    from syncvar.bootstrap.launch_env.detection import started_with_others
    from syncvar.core.environment import wants_world_of_one
    from syncvar.core.settings import doubtful_variables
    from syncvar_launcher.job.job import Job
    from syncvar_launcher.job.job_runner import run_job
    from syncvar_launcher.job.resource_limits import check_limits
    from syncvar_launcher.options.forwarded_signals import parse_signals

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
    if ahead is not None and (
        chosen.join.address is not None or chosen.has_hosts or chosen.program.dry_run
    ):
        ahead.close()
    if chosen.join.address is not None or chosen.has_hosts:
        clock.stop()  # to log in, and to wait for hosts, has limits and words of its own
    if chosen.join.address is not None:
        from syncvar_launcher.join.join_client import join

        return join(chosen)
    if chosen.has_hosts:
        from syncvar_launcher.hosts import multi_host  # one host needs nothing of it
    seen = None if wants_world_of_one(os.environ) else started_with_others(os.environ)
    if seen is not None:
        sys.stderr.write(
            f"syncvar-launch: {seen[0]}, and each starts a job of its own beside the others; "
            "where one job is meant, start "
            "syncvar-launch without that launcher (SYNCVAR_WORLD_SIZE=1 says that they are "
            "meant)\n"
        )
    if chosen.program.dry_run:
        sys.stdout.write(
            multi_host.dry_run(chosen)
            if chosen.has_hosts
            else Job(chosen, arguments, os.environ).dry_run()
        )
        return 0
    for number in set(_EARLY).difference(parse_signals(chosen.limits.forward_signals)):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    for sentence in doubtful_variables(os.environ):
        sys.stderr.write(f"syncvar-launch: {sentence}\n")
    if chosen.runtime.exposure_warning and (chosen.has_hosts or chosen.ranks.fake_hosts > 1):
        words = f"syncvar-launch: {chosen.runtime.exposure_warning}"
        sys.stderr.write(
            f"\x1b[31m{words}\x1b[0m\n"
            if chosen.output.has_color(is_terminal=sys.stderr.isatty())
            else f"{words}\n"
        )
    if chosen.has_hosts:
        return multi_host.launch(chosen, arguments)
    clock.enter("looks for cores, and for the limits of the system")
    job = Job(chosen, arguments, os.environ)
    check_limits(chosen)
    return run_job(job, ahead)


def _end(number: int, _frame: object) -> None:
    """End at once, because no worker runs yet; a fork server ends with this process."""
    name = signal.Signals(number).name
    write_error(f"{name} came before the ranks began; nothing was started")
    os._exit(128 + number)


def _drop(number: int, _frame: object) -> None:
    """Report a signal to forward, and drop it, because no rank runs yet."""
    name = signal.Signals(number).name
    os.write(
        2,
        f"syncvar-launch: {name} came before the ranks began, and is dropped\n".encode(),
    )


def _open_streams() -> None:
    """Open /dev/null for each closed standard stream, so that no other file gets its number."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(
                os.open(os.devnull, os.O_RDWR), True
            )  # the lowest number that is free, which is this one
        if getattr(sys, name) is None:
            stream = open(number, "w" if number else "r", closefd=False, encoding="utf-8")  # noqa: SIM115
            setattr(sys, name, stream)
