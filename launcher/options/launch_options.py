"""The options of one start of a job, in six records; `parse_options.parse` makes them.

The table of options (`option_table`) says which field gets the value of which option. `validate`
of a record checks options against each other; single values are checked when they are read.
The records are named tuples: importing `dataclasses` would delay the start of a job.
"""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING, NamedTuple

from syncvar.core.environment import split_evenly
from syncvar.core.errors import ConfigError
from syncvar_launcher.options.option_table import (
    COUNT_MAX,
    is_ip_address,
    parse_address,
    shown_ranks,
)

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from syncvar.core.settings import RuntimeConfig
    from syncvar_launcher.options.host_selection import Allocation
    from syncvar_launcher.options.hostfile import Host


class ProgramOptions(NamedTuple):
    """The program that the ranks run, and its environment.

    Args:
        kind: "script", "module" or "command".
        target: The script, module or command.
        args: The arguments of the program, unchanged.
        cwd: The absolute path of the folder in which the ranks start.
        env: Variables that each rank gets.
        env_clear: Whether the ranks inherit only the variables of an allow-list.
        config: The absolute path of the TOML file that was read, or None.
        dry_run: Whether the launcher only shows what it would do.
    """

    kind: str
    target: str
    args: tuple[str, ...]
    cwd: Path
    env: Mapping[str, str]
    env_clear: bool
    config: Path | None
    dry_run: bool

    def validate(self, origin: Mapping[str, str], *, has_hosts: bool) -> None:
        """Check that the folder exists; other hosts check their own."""
        if has_hosts or self.cwd.is_dir():
            return
        if origin["cwd"] == "default":
            raise ConfigError(
                f"the current folder {self.cwd} has been removed: start in another one, "
                "or give --cwd"
            )
        raise ConfigError(f"--cwd {self.cwd}: there is no such folder")


class RankOptions(NamedTuple):
    """The processes of the job.

    Args:
        workers: The number of ranks, at least 1; 0 for all slots of several hosts.
        servers: The number of processes that hold variables for the workers.
        server_replicas: The number of other servers that hold copies of a server's variables.
        fake_hosts: The number of hosts as which this machine poses, at least 1.
        start_method: "spawn" (a fresh interpreter for each worker), "fork" (from a process that
            has imported NumPy and syncvar) or "auto".
        bind: "auto", "none" or "cores".
        cores_per_worker: The cores of each worker, or None for an equal share.
        torch_env: Whether ranks also get MASTER_ADDR and MASTER_PORT.
        debug: The rank that gets the terminal, or None.
    """

    workers: int
    servers: int
    server_replicas: int
    fake_hosts: int
    start_method: str
    bind: str
    cores_per_worker: int | None
    torch_env: bool
    debug: int | None

    def validate(self, program: ProgramOptions, *, has_hosts: bool) -> None:
        """Check the numbers of processes against each other, and the start method."""
        replicas = self.server_replicas
        if replicas > 1:
            raise ConfigError(
                f"--server-replicas {replicas}: one copy on another server is kept, or none (0)"
            )
        if replicas and self.servers < 2:
            raise ConfigError(
                "--server-replicas 1: copies are kept on other servers, and there are "
                f"{self.servers}; give --servers 2 or more"
            )
        if self.servers > COUNT_MAX:
            raise ConfigError(f"--servers {self.servers}: at most {COUNT_MAX} are possible")
        check_debugged(self.debug, self.workers or COUNT_MAX)
        if not has_hosts:
            try:
                split_evenly(self.workers, self.fake_hosts)
            except ConfigError as error:
                raise ConfigError(f"--fake-hosts {self.fake_hosts}: {error}") from None
        if program.kind == "command" and self.start_method == "fork":
            raise ConfigError(
                f"--start-method fork: {program.target} is a program of its own (--no-python), "
                "and only a Python script or module can be forked from a process that has "
                "imported NumPy; use --start-method spawn"
            )


class HostOptions(NamedTuple):
    """The hosts of the job, and how the launcher reaches them.

    Args:
        entries: The hosts that `-H`, a host file or a scheduler names; none for this machine.
        notices: Sentences about them for the user.
        hostfile: The host file, as the user named it, or None.
        include: The hosts to use of them, or None for all.
        exclude: The hosts not to use, or None.
        allocation: "auto": use the hosts of a scheduler's job. "off": do not.
        scheduled: The job of a scheduler that starts the agents; None for ssh.
        map_by: "slot" fills a host before the next one; "host" gives each one worker in turn.
        ssh: The command line of ssh, with its own options.
        ssh_port: The port of ssh where a host names none; None for its own choice.
        ssh_always: Whether ssh also leads to this machine.
        remote_python: The interpreter where a host names none; None for this one's path.
        iface: The interfaces and networks of links between hosts; None for all that serve.
        stage: Whether the launcher copies the script's folder to the hosts.
    """

    entries: tuple[Host, ...]
    notices: tuple[str, ...]
    hostfile: str | None
    include: str | None
    exclude: str | None
    allocation: str
    scheduled: Allocation | None
    map_by: str
    ssh: tuple[str, ...]
    ssh_port: int | None
    ssh_always: bool
    remote_python: str | None
    iface: str | None
    stage: bool

    def validate(self, origin: Mapping[str, str], fake_hosts: int, *, has_hosts: bool) -> None:
        """Check that fake hosts and staging fit the hosts."""
        if self.entries and fake_hosts > 1:
            raise ConfigError(
                "--fake-hosts poses, and --hostfile or -H name real hosts; leave one of them out"
            )
        if self.stage and origin["stage"] == "command line" and not has_hosts:
            raise ConfigError(
                "--stage copies the script to other hosts, and none are named: "
                "give --hostfile, -H or --listen, or leave it out"
            )
        if self.stage and origin["cwd"] != "default":
            raise ConfigError(
                "--stage starts the ranks in the copy of the script's folder, and --cwd says "
                "otherwise: leave one of them out"
            )


class OutputOptions(NamedTuple):
    """What the user sees of the job.

    Args:
        selection: Whose lines the launcher shows: "all", "first", "failed", "none" or ranks.
        log_dir: The absolute path of the folder for one file per rank and stream, or None.
        events: The absolute path of the file of events, or None.
        stats: Whether to show totals of all calls at the end; a path writes them as JSON.
        timestamps: Whether each line begins with the local time.
        color: "auto", "always" or "never".
        verbose: Whether the launcher says more.
    """

    selection: str
    log_dir: Path | None
    events: Path | None
    stats: bool | Path
    timestamps: bool
    color: str
    verbose: bool

    def validate(self, origin: Mapping[str, str], workers: int) -> None:
        """Check that the ranks whose lines to show exist."""
        try:
            shown_ranks(self.selection, workers or COUNT_MAX)
        except ConfigError as error:
            source = origin["output"]
            raise ConfigError(f"--output {self.selection} ({source}): {error}") from None

    def has_color(self, *, is_terminal: bool) -> bool:
        """Return whether to colour what goes to a file or terminal."""
        return is_terminal if self.color == "auto" else self.color == "always"


class LimitOptions(NamedTuple):
    """When the launcher ends or restarts the job.

    Args:
        timeout_s: The time limit of the whole job in seconds; infinite for none.
        forward_signals: The signals that the launcher forwards to all ranks, as text.
        max_restarts: How often the launcher starts all ranks again after a failure.
    """

    timeout_s: float
    forward_signals: str
    max_restarts: int


class LaunchOptions(NamedTuple):
    """All options of one start of a job.

    Args:
        program: The program that the ranks run.
        ranks: The processes of the job.
        hosts: The hosts of the job.
        join: How hosts join it.
        output: What the user sees.
        limits: When the launcher ends or restarts it.
        runtime: The settings of the runtime.
        origin: For each option (by its key) and setting: "command line", "environment", "file" or
            "default"; also "env.NAME" for each variable of `program.env`.
    """

    program: ProgramOptions
    ranks: RankOptions
    hosts: HostOptions
    join: JoinOptions
    output: OutputOptions
    limits: LimitOptions
    runtime: RuntimeConfig
    origin: Mapping[str, str]

    @property
    def has_hosts(self) -> bool:
        """Whether agents start the workers, on hosts that the user named or that join."""
        return bool(self.hosts.entries) or self.join.listen is not None

    def validate(self) -> None:
        """Check the options against each other."""
        self.output.validate(self.origin, self.ranks.workers)
        self.hosts.validate(self.origin, self.ranks.fake_hosts, has_hosts=self.has_hosts)
        self.ranks.validate(self.program, has_hosts=self.has_hosts)
        self.program.validate(self.origin, has_hosts=self.has_hosts)


def check_debugged(rank: int | None, workers: int) -> None:
    """Check that the rank of `--debug` exists."""
    if rank is not None and rank >= workers:
        others = "the only rank is 0" if workers == 1 else f"ranks are 0 to {workers - 1}"
        raise ConfigError(f"--debug {rank}: there is no such rank among {workers} ({others})")


_HOSTS_MAX = 1 << 16
_WITH_JOIN = frozenset(
    (
        "join",
        "key_file",
        "slots",
        "cwd",
        "config",
        "verbose",
        "start_timeout",
        "rendezvous_timeout_s",
        "color",
    )
)
_WITHOUT_LISTEN = ("hostfile", "include", "exclude", "ssh_always", "ssh_port", "remote_python")


class JoinOptions(NamedTuple):
    """How hosts join a job by themselves.

    Args:
        listen: The address at which hosts join, perhaps with a port; None without `--listen`.
        address: The launcher that this host joins, with the port; None to launch a job.
        key_file: The absolute path of the key that both sides need.
        slots: The slots that this host offers when it joins; None for one per usable core.
        host_count: The number of hosts that `--listen` waits for; None for as many hosts as
            offer slots for all workers.
    """

    listen: str | None
    address: str | None
    key_file: Path
    slots: int | None
    host_count: int | None = None

    def validate(self, origin: Mapping[str, str], words: list[str]) -> None:
        """Check the other options beside `--join` or `--listen`.

        Args:
            origin: Where each option comes from.
            words: The program and its arguments.
        """
        if self.address is not None:
            self._validate_join(self.address, origin, words)
        elif self.listen is not None:
            self._validate_listen(self.listen, origin)

    def _validate_join(self, address: str, origin: Mapping[str, str], words: list[str]) -> None:
        if not parse_address(address)[1]:
            raise ConfigError(
                f"--join {address}: the port is missing; syncvar-launch --listen prints it"
            )
        if words:
            raise ConfigError(
                f"--join runs the program that syncvar-launch --listen names: leave {words[0]} out"
            )
        for key, source in origin.items():
            if source == "command line" and key not in _WITH_JOIN and not key.startswith("env."):
                raise ConfigError(
                    f"--{key.replace('_', '-')} is for syncvar-launch --listen, which sends "
                    "its options to the hosts that join: leave it out here"
                )

    def _validate_listen(self, listen: str, origin: Mapping[str, str]) -> None:
        for key in _WITHOUT_LISTEN:
            if origin[key] == "command line":
                raise ConfigError(
                    f"--{key.replace('_', '-')} is for hosts that the launcher logs in to, and "
                    "with --listen they come by themselves; leave one out"
                )
        if self.slots is not None:
            raise ConfigError(
                "--slots is an option of each host that joins; here --workers gives the number "
                "of workers"
            )
        host, _ = parse_address(listen)
        if is_ip_address(host) and ipaddress.ip_address(host).is_unspecified:
            raise ConfigError(
                f"--listen {listen} would listen on all networks of this machine: "
                "name one of its addresses"
            )
        if self.host_count is None and origin["workers"] == "default":
            raise ConfigError(
                "--listen does not know how many hosts to wait for: give --hosts N, or "
                "--workers N for as many as have the slots"
            )


def host_count_of(text: str | None) -> int | None:
    """Return the number of hosts in `--hosts N` beside `--listen`."""
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 6 and 1 <= int(text) <= _HOSTS_MAX):
        raise ConfigError(f"--hosts {text}: with --listen it is how many hosts join, such as 2")
    return int(text)
