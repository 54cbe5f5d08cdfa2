"""The launcher: options in, workers out, one loop that listens to all of them, an exit code that tells the truth."""

from __future__ import annotations

import contextlib
import gc
import os
import select
import socket
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from syncvar.env import RankEnvironment
from syncvar.errors import ConfigError, SyncvarError
from syncvar.topology import HostMap, divided
from syncvar_launcher import exits, options
from syncvar_launcher.binding import Binding, blas_environment, blas_threads, plan_binding
from syncvar_launcher.directory import JobDirectory, runtime_directory
from syncvar_launcher.flight import FlightRecords
from syncvar_launcher.forking import ForkServer
from syncvar_launcher.output import OutputForwarder, Sink
from syncvar_launcher.report import Failure, failure_block
from syncvar_launcher.restarting import Restarting
from syncvar_launcher.sharing import Sharing, why_no_arena
from syncvar_launcher.show import dry_run_text
from syncvar_launcher.watch import Watch

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from syncvar_launcher.generation import Generation
    from syncvar_launcher.options import LaunchOptions
    from syncvar_launcher.supervise import Outcome

__all__ = ["Job", "main"]

_LOOPBACK = "127.0.0.1"
_NEVER_PASSED = (
    "SYNCVAR_KEY_FD", "SYNCVAR_KEY", "SYNCVAR_STATUS_FD", "SYNCVAR_PASS_FDS", "SYNCVAR_PARENT_FD", "SYNCVAR_OUTCOME_FILE",
)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Run `syncvar-launch`; returns its exit code."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    try:
        chosen = options.parse(arguments, os.environ, Path.cwd())
        job = Job(chosen, arguments, os.environ)
        if chosen.dry_run:
            sys.stdout.write(job.dry_run())
            return 0
        return job.run()
    except ConfigError as error:
        sys.stderr.write(f"syncvar-launch: {error}\n")
        return exits.CONFIGURATION
    except SyncvarError as error:
        sys.stderr.write(f"syncvar-launch: {error}\n")
        return exits.INTERNAL
    finally:
        gc.freeze()  # the interpreter's end need not look for cycles in what the process leaves to the system


class Job:
    """One launch on one host.

    Args:
        chosen: The options.
        arguments: The command line as it was given, for advice in messages.
        environ: The launcher's environment.
    """

    def __init__(self, chosen: LaunchOptions, arguments: Sequence[str], environ: Mapping[str, str]) -> None:
        self.options = chosen
        self.arguments = list(arguments)
        self.environ = environ
        self.config = chosen.runtime
        self.job_id = os.urandom(16).hex()
        self.hosts = HostMap(divided(chosen.workers, chosen.fake_hosts))
        self.host = socket.gethostname()
        self.flight_name = f"syncvar-flight-{self.job_id[:8]}"
        self.flight_dir = chosen.log_dir or Path.cwd() / self.flight_name
        self.usable = options.usable_cores()
        self.core_count = options.core_count()
        why_no_arena(chosen, os.uname().machine)  # raises where the settings do not fit together
        self.binding: Binding = plan_binding(
            chosen.workers, self.usable, os.cpu_count() or 1, chosen.bind, chosen.cores_per_worker
        )

    # -- what a worker gets ---------------------------------------------------------------------------------------

    def command(self) -> list[str]:
        """Return the command line of a worker, or of the process that workers are forked from."""
        chosen = self.options
        if chosen.kind == "command":
            return [chosen.target, *chosen.args]
        how = ["-m", chosen.target] if chosen.kind == "module" else [chosen.target]
        first = "syncvar.forkserver" if chosen.start_method == "fork" else "syncvar.bootstrap"
        return [sys.executable, "-m", first, *how, *chosen.args]

    def host_name(self, rank: int) -> str:
        """Return the name of a rank's host, for messages; a fake one has its number beside it."""
        return f"{self.host}#{self.hosts.host_of(rank)}" if len(self.hosts.sizes) > 1 else self.host

    def own_environment(
        self,
        rank: int,
        rendezvous: str,
        directory: str,
        torch: Mapping[str, str],
        generation: int = 0,
        restarts: int = 0,
    ) -> dict[str, str]:
        """Return the variables that the launcher sets for a rank."""
        chosen = self.options
        host = self.hosts.host_of(rank)
        contract = RankEnvironment(
            rank=rank,
            world_size=chosen.workers,
            local_rank=self.hosts.local_rank(rank),
            local_world_size=self.hosts.sizes[host],
            host_index=host,
            host_count=len(self.hosts.sizes),
            generation=generation,
            rendezvous=rendezvous,
            job_id=self.job_id,
            host=self.host_name(rank),
            flight_dir=str(self.flight_dir),
            host_directory=directory,
            host_address=_LOOPBACK if len(self.hosts.sizes) > 1 else "",
            restarts=restarts,
        )
        return {**self._settings(), **torch, **chosen.env, **contract.to_mapping()}

    def base_environment(self) -> dict[str, str]:
        """Return what workers inherit of the launcher's environment."""
        return {name: value for name, value in self.environ.items() if name not in _NEVER_PASSED}

    def pass_fds(self) -> list[int]:
        """Return the descriptors that workers inherit from whoever started the launcher."""
        return [int(text) for text in self.environ.get("SYNCVAR_PASS_FDS", "").split(",") if text]

    def _settings(self) -> dict[str, str]:
        """Return the variables that tell all ranks the same."""
        chosen = self.options
        threads = blas_threads(chosen.workers, self.core_count, chosen.cores_per_worker)
        return {
            **blas_environment(threads, {**self.environ, **chosen.env}),
            **self.config.to_mapping(),
        }

    def dry_run(self) -> str:
        """Return what a launch would do, as text."""
        torch = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "<free port>"} if self.options.torch_env else {}
        hidden = {"SYNCVAR_JOB_ID": "<random>"}
        if self.options.log_dir is None:
            hidden["SYNCVAR_FLIGHT_DIR"] = "syncvar-flight-<random>"
        environments = [
            self.own_environment(rank, "ipc://<private directory>/store", "<private directory>", torch) | hidden
            for rank in range(self.options.workers)
        ]
        folder, _ = runtime_directory(self.environ)
        folders = [folder] * len(self.hosts.sizes)
        _, transport = Sharing(self.options, self.job_id, self.core_count, folders, hands_over=False).describe()
        return dry_run_text(
            self.options,
            self.binding.cores,
            environments,
            self.command(),
            host=self.host,
            binding=self.binding.reason,
            transport=transport,
        )

    # -- running --------------------------------------------------------------------------------------------------

    def run(self) -> int:
        """Start the workers, again where that is asked for and may help; return the exit code."""
        forwarder = _forwarder(self.options)
        FlightRecords(self.flight_dir).remove()  # of an earlier job with the same folder for its output
        restarting = Restarting(self.options.max_restarts, self.config.restart_delay_s)
        began = time.monotonic()
        number, had_met = 0, False
        with Watch(self.environ) as watch:
            while True:
                generation, outcome = self._start_once(forwarder, watch, number, restarting.number, began, had_met=had_met)
                code, had_met, number = outcome.exit_code, generation.has_met, generation.next_number
                decision = restarting.after(generation.ending(outcome))
                generation.tell(outcome, is_last=not decision.restarts)
                if not decision.restarts:
                    if decision.reason and not outcome.interrupted:
                        forwarder.say(f"syncvar: not started again: {decision.reason}\n")
                    break
                forwarder.say(f"syncvar: {decision.reason}, in {decision.pause_s:g} s, as generation {number}\n")
                ended = self._pause(watch, decision.pause_s, began)
                if ended is not None:
                    code = code if code == exits.PREEMPTED else ended[0]
                    forwarder.say(ended[1])
                    break
                forwarder.begin(f"syncvar: {decision.reason}, generation {number}")
        for line in restarting.summary():
            forwarder.say(f"syncvar: {line}\n" if not line.startswith(" ") else f"{line}\n")
        forwarder.finish()
        return code

    def _start_once(
        self, forwarder: OutputForwarder, watch: Watch, number: int, restarts: int, began: float, *, had_met: bool
    ) -> tuple[Generation, Outcome]:
        """Start all ranks and stay until they have ended; the arguments are those of `Generation`."""
        with contextlib.ExitStack() as stack:
            server = stack.enter_context(self._fork_server()) if self.options.start_method == "fork" else None
            # It brings ZeroMQ; meanwhile the fork server imports NumPy.
            from syncvar_launcher.generation import Generation

            directory = JobDirectory(self.environ)
            stack.callback(directory.remove)
            generation = Generation(self, forwarder, directory, watch, number, restarts, began, server, had_met=had_met)
            return generation, generation.run()

    def _fork_server(self) -> ForkServer:
        argv = self.command()
        environ = {**self.base_environment(), **self._settings(), **self.options.env}
        try:
            return ForkServer(argv, environ, self.options.cwd, self.pass_fds())
        except OSError as error:
            raise ConfigError(f"a worker cannot be started: {argv[0]}: {error.strerror}") from error

    def _pause(self, watch: Watch, pause_s: float, began: float) -> tuple[int, str] | None:
        """Wait before a restart; return exit code and words where the job ends meanwhile."""
        until = time.monotonic() + pause_s
        limit = began + self.options.timeout_s
        poller = select.poll()
        for descriptor in watch.descriptors():
            poller.register(descriptor, select.POLLIN)
        while True:
            if watch.pending:
                number = watch.pending.popleft()
                return 128 + number, f"syncvar: interrupted by {exits.signal_name(number)} before the restart\n"
            now = time.monotonic()
            if now >= limit:
                failure = Failure(
                    rank=-1, status=None, elapsed_s=now - began,
                    reason=f"the time limit of {self.options.timeout_s:g} s passed before the restart",
                )  # fmt: skip
                return exits.TIMEOUT, failure_block(failure)
            if now >= until:
                return None
            for descriptor, _ in poller.poll(int((min(until, limit) - now) * 1000) + 1):
                watch.readable(descriptor)


def _forwarder(chosen: LaunchOptions) -> OutputForwarder:
    sinks = []
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        is_terminal = stream.isatty()
        sinks.append(Sink(stream.buffer.raw if hasattr(stream.buffer, "raw") else stream.buffer, is_terminal, chosen.color_on(is_terminal)))
    return OutputForwarder(
        sinks[0],
        sinks[1],
        mode=chosen.output,
        clock=time.time if chosen.timestamps else None,
        log_dir=chosen.log_dir,
        ranks=tuple(range(chosen.workers)),
    )
