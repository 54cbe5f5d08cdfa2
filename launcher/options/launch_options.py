"""The options of one start of a job, in six records; `parse_options.parse` makes them.

The table of options (`option_table`) gives each option its field. `validate` of a record checks
options against each other; their readers have checked single values.
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
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from syncvar.core.settings import RuntimeConfig
    from syncvar_launcher.options.hostfile import Host

_HOSTS_MAX = 1 << 16
_WITH_JOIN = frozenset(
    (
        *("join", "key_file", "slots", "cwd", "config"),
        *("verbose", "start_timeout", "rendezvous_timeout_s", "color"),
    )
)
_WITHOUT_LISTEN = ("hostfile", "include", "exclude", "ssh_always", "ssh_port", "remote_python")


class RankProgram(NamedTuple):
    """One program of a job, and the ranks that run it."""

    kind: str  # "script", "module" or "command"
    target: str  # script, module or command
    args: tuple[str, ...]  # arguments of the program
    env: Mapping[str, str]  # variables that each of its ranks gets
    workers: int  # number of its ranks; 0 while that depends on the slots of several hosts

    @property
    def label(self) -> str:
        """The program in messages, for instance "-m train"."""
        return f"-m {self.target}" if self.kind == "module" else self.target


class ProgramOptions(NamedTuple):
    """The program that the ranks run, with its environment; the first one if there are several."""

    kind: str  # "script", "module" or "command"
    target: str  # script, module or command
    args: tuple[str, ...]  # arguments of the program
    cwd: Path  # absolute path of the folder in which the ranks start
    env: Mapping[str, str]  # variables that each rank gets
    env_clear: bool  # whether the ranks inherit only the variables of an allow-list
    config: Path | None  # absolute path of the TOML file that was read, or None
    dry_run: bool  # whether the launcher only shows what it would do
    more: tuple[RankProgram, ...] = ()  # programs of the ranks that follow, each after a ":"

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
    """The processes of the job."""

    workers: int  # number of ranks, at least 1; 0 for all slots of several hosts
    servers: int  # number of processes that hold variables for the workers
    server_replicas: int  # number of other servers that hold copies of a server's variables
    fake_hosts: int  # number of hosts as which this machine poses, at least 1
    # "spawn" (a fresh interpreter for each worker), "fork" (from a process that has imported NumPy
    # and syncvar) or "auto"
    start_method: str
    bind: str  # "auto", "none" or "cores"
    cores_per_worker: int | None  # cores of each worker, or None for an equal share
    torch_env: bool  # whether ranks also get MASTER_ADDR and MASTER_PORT
    debug: int | None  # rank that gets the terminal, or None
    spares: int = 0  # workers of an elastic job that wait until another one is lost
    fewest: int = 0  # fewest members of an elastic job; 0: the job is not elastic

    def validate(self, programs: Sequence[RankProgram], *, has_hosts: bool) -> None:
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
        if self.spares and not self.fewest:
            raise ConfigError(
                f"--spares {self.spares}: spare workers replace lost ones of an elastic job; give "
                "--workers MIN:MAX"
            )
        if self.fewest:
            self._check_elastic(programs)
        if not has_hosts:
            try:
                split_evenly(self.workers, self.fake_hosts)
            except ConfigError as error:
                raise ConfigError(f"--fake-hosts {self.fake_hosts}: {error}") from None
        for one in programs:
            if one.kind == "command" and self.start_method == "fork":
                raise ConfigError(
                    f"--start-method fork: {one.target} is a program of its own (--no-python), "
                    "and only a Python script or module can be forked from a process that has "
                    "imported NumPy; use --start-method spawn"
                )

    @property
    def forms_generations(self) -> bool:
        """Whether workers of an elastic job make calls together, in generations.

        With parameter servers each worker makes its calls to the servers.
        """
        return self.fewest > 0 and not self.servers

    @property
    def most(self) -> int:
        """The most members of an elastic job at a time."""
        return self.workers - self.spares

    def _check_elastic(self, programs: Sequence[RankProgram]) -> None:
        """Check that nothing contradicts an elastic job."""
        reasons = {
            "--spares beside --servers, where nobody waits for others": (
                self.servers > 0 and self.spares > 0
            ),
            "several programs (:)": len(programs) > 1,
            "--debug": self.debug is not None,
            "--torch-env": self.torch_env,
            "--no-python": any(one.kind == "command" for one in programs),
        }
        for name, is_chosen in reasons.items():
            if is_chosen:
                raise ConfigError(
                    f"--workers {self.fewest}:{self.most} makes an elastic job, which cannot have "
                    f"{name}: leave it out, or give a single number of workers"
                )


class Starter(NamedTuple):
    """The program of a scheduler that starts an agent on a host of the job, in place of ssh."""

    program: str  # "srun", "blaunch" or "pbsdsh"
    # its arguments for a host; {host} stands for the name and {place} for the index
    where: tuple[str, ...]
    # whether the agent has no pipes to the launcher, so that the host joins by TCP
    joins: bool = False
    # variables to remove, because they would change what the program does
    unset: tuple[str, ...] = ()

    def command(self, host: Host, place: int, words: Sequence[str]) -> list[str]:
        """Return the command line that runs a command on a host.

        Example:
            >>> from syncvar_launcher.options.hostfile import Host
            >>> Starter("pbsdsh", ("-n", "{place}", "--")).command(Host("n1"), 4, ["true"])
            ['pbsdsh', '-n', '4', '--', 'true']
        """
        where = [
            word.replace("{host}", host.name).replace("{place}", str(place)) for word in self.where
        ]
        return [self.program, *where, *words]


class Allocation(NamedTuple):
    """The job of a scheduler."""

    name: str  # name for messages, for instance "job 7 of Slurm"
    hosts: tuple[Host, ...]  # hosts with their slots, in the scheduler's order
    places: dict[str, int]  # index of each host for the scheduler; empty for one that uses names
    here: str  # host on which the launcher runs; empty for a host outside of the job
    starter: Starter  # program that starts agents on the other hosts

    def command(self, host: Host, words: Sequence[str]) -> list[str]:
        """Return the command line that runs a command on a host of the job."""
        return self.starter.command(host, self.places.get(host.name, 0), words)


def short_name(name: str) -> str:
    """Return a host's name without its domain."""
    return name if name.replace(".", "").isdigit() else name.partition(".")[0]


class HostOptions(NamedTuple):
    """The hosts of the job, and how the launcher reaches them."""

    # hosts that `-H`, a host file or a scheduler names; none for this machine
    entries: tuple[Host, ...]
    notices: tuple[str, ...]  # sentences about them for the user
    hostfile: str | None  # host file, as the user named it, or None
    include: str | None  # hosts to use of them, or None for all
    exclude: str | None  # hosts not to use, or None
    allocation: str  # "auto": use the hosts of a scheduler's job. "off": do not
    scheduled: Allocation | None  # Job of a scheduler that starts the agents; None for ssh.
    map_by: str  # "slot" fills a host before the next one; "host" gives each one worker in turn
    ssh: tuple[str, ...]  # command line of ssh, with its own options
    ssh_port: int | None  # Port of ssh where a host names none; None for its own choice.
    ssh_always: bool  # whether ssh also leads to this machine
    remote_python: str | None  # Interpreter where a host names none; None for this one's path.
    iface: str | None  # Interfaces and networks of links between hosts; None for all that serve.
    stage: bool  # whether the launcher copies the script's folder to the hosts
    discovery: Path | None = None  # script that prints the hosts that there are now, or None

    def validate(self, origin: Mapping[str, str], fake_hosts: int, *, has_hosts: bool) -> None:
        """Check that `--fake-hosts` and `--stage` fit the hosts."""
        if self.entries and fake_hosts > 1:
            raise ConfigError(
                "--fake-hosts simulates hosts, and --hostfile or -H name real hosts; leave one out"
            )
        if self.stage and origin["stage"] == "command line" and not has_hosts:
            raise ConfigError(
                "--stage copies the script to other hosts, and none are named: "
                "give --hostfile, -H or --listen, or leave it out"
            )
        if self.stage and origin["cwd"] != "default":
            raise ConfigError(
                "--stage starts the ranks in the copy of the script's folder, and --cwd names "
                "another folder: leave one of them out"
            )


class JoinOptions(NamedTuple):
    """How hosts join a job by themselves."""

    listen: str | None  # Address at which hosts join, perhaps with a port; None without `--listen`.
    address: str | None  # Launcher that this host joins, with the port; None to launch a job.
    key_file: Path  # absolute path of the key that both sides need
    slots: int | None  # Slots that this host offers when it joins; None for one per usable core.
    # Number of hosts that `--listen` waits for; None for as many hosts as offer slots for all
    # workers.
    host_count: int | None = None

    def validate(self, origin: Mapping[str, str], words: list[str]) -> None:
        """Check the other options beside `--join` or `--listen`; `words` are the program's."""
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
                    "with --listen hosts join by themselves; leave one out"
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


class OutputOptions(NamedTuple):
    """The output of the job: what the user sees, and files to write."""

    selection: str  # whose lines the launcher shows: "all", "first", "failed", "none" or ranks
    log_dir: Path | None  # absolute path of the folder for one file per rank and stream, or None
    events: Path | None  # absolute path of the file of events, or None
    stats: bool | Path  # whether to show totals of all calls at the end; a path writes them as JSON
    dashboard: str  # address of the dashboard, perhaps with a port; empty for none
    timestamps: bool  # whether each line begins with the local time
    color: str  # "auto", "always" or "never"
    verbose: bool  # whether the launcher shows more

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
    """When the launcher ends or restarts the job."""

    timeout_s: float  # time limit of the whole job in seconds; infinite for none
    forward_signals: str  # signals that the launcher forwards to all ranks, as text
    max_restarts: int  # how often the launcher starts all ranks again after a failure


class LaunchOptions(NamedTuple):
    """All options of one start of a job."""

    program: ProgramOptions  # program that the ranks run
    ranks: RankOptions  # processes of the job
    hosts: HostOptions  # hosts of the job
    join: JoinOptions  # how hosts join it
    output: OutputOptions  # what the user sees
    limits: LimitOptions  # when the launcher ends or restarts it
    runtime: RuntimeConfig  # settings of the runtime
    # for each option (by its key) and setting: "command line", "environment", "file" or "default";
    # also "env.NAME" for each variable of `program.env`
    origin: Mapping[str, str]

    @property
    def has_hosts(self) -> bool:
        """Whether agents start the workers, on hosts that the user named or that join."""
        is_named = bool(self.hosts.entries) or self.hosts.discovery is not None
        return is_named or self.join.listen is not None

    @property
    def may_grow(self) -> bool:
        """Whether hosts may come while the job runs."""
        has_source = self.hosts.discovery is not None or self.join.listen is not None
        return self.ranks.fewest > 0 and has_source

    @property
    def programs(self) -> tuple[RankProgram, ...]:
        """The programs of the job, in the order of their ranks."""
        first, more = self.program, self.program.more
        workers = max(0, self.ranks.workers - sum(one.workers for one in more))
        return (RankProgram(first.kind, first.target, first.args, first.env, workers), *more)

    def with_workers(self, workers: int) -> LaunchOptions:
        """Return the options for hosts that turned out to have so many workers together."""
        after = sum(one.workers for one in self.program.more)
        if workers <= after:
            raise ConfigError(
                f"the hosts have {workers} slots, and the programs after the first ':' have "
                f"{after} ranks: none is left for {self.programs[0].label}"
            )
        return self._replace(ranks=self.ranks._replace(workers=workers, fake_hosts=1))

    def _check_discovery(self) -> None:
        script, hosts = self.hosts.discovery, self.hosts
        if script is None:
            return
        if not self.ranks.fewest:
            raise ConfigError(
                f"--host-discovery {script}: only an elastic job takes hosts while it runs; give "
                "--workers MIN:MAX"
            )
        if hosts.entries or self.join.listen is not None:
            raise ConfigError(
                f"--host-discovery {script} and -H, --hostfile or --listen both name hosts; leave "
                "one out"
            )

    def validate(self) -> None:
        """Check the options against each other."""
        if self.ranks.workers > COUNT_MAX:
            raise ConfigError(
                f"--workers: the programs have {self.ranks.workers} ranks together, and at most "
                f"{COUNT_MAX} are possible"
            )
        self.output.validate(self.origin, self.ranks.workers)
        self.hosts.validate(self.origin, self.ranks.fake_hosts, has_hosts=self.has_hosts)
        self._check_discovery()
        self.ranks.validate(self.programs, has_hosts=self.has_hosts)
        self.program.validate(self.origin, has_hosts=self.has_hosts)


def check_debugged(rank: int | None, workers: int) -> None:
    """Check that the rank of `--debug` exists."""
    if rank is not None and rank >= workers:
        others = "the only rank is 0" if workers == 1 else f"ranks are 0 to {workers - 1}"
        raise ConfigError(f"--debug {rank}: there is no such rank among {workers} ({others})")


def host_count_of(text: str | None) -> int | None:
    """Return the number of hosts in `--hosts N` beside `--listen`."""
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 6 and 1 <= int(text) <= _HOSTS_MAX):
        raise ConfigError(f"--hosts {text}: with --listen it is how many hosts join, such as 2")
    return int(text)
