"""The table of the launcher's options: the only place where an option is declared.

From a row come the argument parser, the help, the key of a TOML file, the environment variable
(`SYNCVAR_LAUNCH_<KEY>`) and the field of `LaunchOptions` that gets the value. To add an option, add
a row here, a field in `launch_options`, and a line in `configs/local.toml`.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from syncvar.core.environment import PREFIX
from syncvar_launcher.options import forwarded_signals
from syncvar_launcher.options import option_values as read
from syncvar_launcher.options.option_values import OUTPUT_MODES, OptionReader

PROGRAM = "syncvar-launch"
LAUNCH_PREFIX = PREFIX + "LAUNCH_"

START_METHODS = ("auto", "spawn", "fork")
BIND_MODES = ("auto", "none", "cores")
MAP_BY = ("slot", "host")
_ENCRYPTION = ("required", "control-only", "off")
_COLOR = ("auto", "always", "never")

# Groups of the help.
RUN = "What to run"
WORKERS = "Workers"
HOSTS = "Several hosts"
OUTPUT = "Output"
LIMITS = "Limits"
ASIDE = ""  # another line of the help names it, or the help for several hosts


class Option(NamedTuple):
    """One option.

    Args:
        key: The name in a TOML file, and of the environment variable in lower case.
        flags: The spellings on the command line; the last one is the long one.
        group: The group of the help.
        field: The record and its field, for instance "ranks.workers". "runtime.NAME" sets
            a runtime setting: such an option has no key in a file and no variable of its own.
        read: The reader of a value.
        metavar: The value's name in the help.
        text: The help.
        default: The value without the option.
        choices: The allowed words, or none.
        in_file: Whether a TOML file may set it.
        spelling: The spelling in the help, where it is not that of the flags.
    """

    key: str
    flags: tuple[str, ...]
    group: str
    field: str
    read: OptionReader
    metavar: str
    text: str
    default: Any = None
    choices: tuple[str, ...] = ()
    in_file: bool = True
    spelling: str = ""

    @property
    def section(self) -> str:
        """The attribute of `LaunchOptions` that holds the field."""
        return self.field.partition(".")[0]

    @property
    def field_name(self) -> str:
        """The field in its record."""
        return self.field.partition(".")[2]

    @property
    def setting(self) -> str:
        """The runtime setting, or empty."""
        return self.field_name if self.section == "runtime" else ""

    @property
    def is_switch(self) -> bool:
        """Whether it takes no value."""
        return self.read is read.read_switch

    @property
    def off_flag(self) -> str:
        """The spelling that turns a switch off."""
        return f"--no-{self.key.replace('_', '-')}"

    def value(self, raw: Any, *, is_text: bool) -> Any:
        """Return the checked value of text, or of a value of a TOML file."""
        if self.choices:
            return read.read_choice(raw, self.choices)
        return self.read(raw, is_text=is_text)


OPTIONS = (
    Option("env", ("-x", "--env"), RUN, "program.env", read.read_variables, "NAME[=V]|PRE*",
           "set a variable of all ranks, or copy ours (repeat)", {},
           spelling="-x, --env NAME[=V]|PRE*"),
    Option("env_clear", ("--env-clear",), RUN, "program.env_clear", read.read_switch, "",
           "of ours only PATH, HOME and such, and what -x names", default=False),
    Option("cwd", ("--cwd",), RUN, "program.cwd", read.read_path, "DIR",
           "start the ranks in this folder"),
    Option("config", ("--config",), RUN, "program.config", read.read_path, "FILE",
           "read [launch] and [runtime] from a TOML file", in_file=False),
    Option("dry_run", ("--dry-run",), RUN, "program.dry_run", read.read_switch, "",
           "show what would be done, and do nothing", default=False),
    Option("workers", ("-n", "-np", "--nproc-per-node", "--workers"), WORKERS, "ranks.workers",
           read.read_workers, "N|auto", "how many ranks; auto: one per usable core", 1,
           spelling="-n, -np, --workers N|auto"),
    Option("servers", ("--servers",), WORKERS, "ranks.servers", read.read_number, "N",
           "hold variables; twice by --server-replicas 1", 0),
    Option("server_replicas", ("--server-replicas",), ASIDE, "ranks.server_replicas",
           read.read_number, "K", "copies of each on other servers", 0),
    Option("fake_hosts", ("--fake-hosts",), ASIDE, "ranks.fake_hosts", read.read_count, "K",
           "pose as K hosts joined by tcp, for tests", 1),
    Option("hostfile", ("--hostfile",), HOSTS, "hosts.hostfile", read.read_path, "FILE",
           "hosts and slots, one a line"),
    Option("hosts", ("-H", "--hosts"), HOSTS, "hosts.entries", read.read_text, "LIST",
           "hosts and slots: a:2,b:2"),
    Option("allocation", ("--allocation",), HOSTS, "hosts.allocation", read.read_text, "HOW",
           "take those of the Slurm, PBS or LSF job", "auto", ("auto", "off")),
    Option("include", ("--include",), HOSTS, "hosts.include", read.read_text, "LIST",
           "use these of them only"),
    Option("exclude", ("--exclude",), HOSTS, "hosts.exclude", read.read_text, "LIST",
           "do not use these"),
    Option("map_by", ("--map-by",), HOSTS, "hosts.map_by", read.read_text, "HOW",
           "fill each, or deal in turns", "slot", MAP_BY),
    Option("ssh", ("--ssh",), HOSTS, "hosts.ssh", read.read_text, "CMD",
           "what leads there", "ssh"),
    Option("ssh_port", ("--ssh-port",), HOSTS, "hosts.ssh_port", read.read_port, "PORT",
           "its port, where the file names none"),
    Option("ssh_always", ("--ssh-always",), HOSTS, "hosts.ssh_always", read.read_switch, "",
           "go through ssh to this machine too", default=False),
    Option("remote_python", ("--remote-python",), HOSTS, "hosts.remote_python", read.read_text,
           "PATH", "the interpreter there"),
    Option("encryption", ("--encryption",), HOSTS, "runtime.encryption", read.read_text, "HOW",
           "of links", choices=_ENCRYPTION),
    Option("insecure", ("--insecure",), HOSTS, "runtime.insecure", read.read_switch, "",
           "lets encryption be off, for isolated networks"),
    Option("iface", ("--iface",), HOSTS, "hosts.iface", read.read_text, "LIST",
           "eth0, ^docker0 or 10.0.0.0/8"),
    Option("stage", ("--stage",), HOSTS, "hosts.stage", read.read_switch, "",
           "copy the script's folder there first", default=False),
    Option("listen", ("--listen",), HOSTS, "join.listen", read.read_address, "ADDR[:PORT]",
           "wait here for --hosts N that join, no ssh"),
    Option("join", ("--join",), HOSTS, "join.address", read.read_address, "HOST:PORT",
           "join a job that listens, with this host", in_file=False),
    Option("key_file", ("--key-file",), HOSTS, "join.key_file", read.read_path, "FILE",
           "by which they join [~/.syncvar-key]"),
    Option("slots", ("--slots",), HOSTS, "join.slots", read.read_count, "K",
           "with --join: its place for workers [cores]"),
    Option("start_method", ("--start-method",), WORKERS, "ranks.start_method", read.read_text,
           "HOW", "fresh, or forked from one", "auto", START_METHODS),
    Option("bind", ("--bind",), WORKERS, "ranks.bind", read.read_text, "MODE",
           "cores of its own for each", "auto", BIND_MODES),
    Option("cores_per_worker", ("--cores-per-worker",), WORKERS, "ranks.cores_per_worker",
           read.read_count, "K", "cores and BLAS threads of each worker"),
    Option("torch_env", ("--torch-env",), WORKERS, "ranks.torch_env", read.read_switch, "",
           "also set MASTER_ADDR and MASTER_PORT", default=False),
    Option("debug", ("--debug",), WORKERS, "ranks.debug", read.read_number, "RANK",
           "give it the terminal, make deadlines endless"),
    Option("output", ("--output",), OUTPUT, "output.selection", read.read_output, "WHICH",
           f"show {', '.join(OUTPUT_MODES)}, or ranks 0,3-5", "all"),
    Option("log_dir", ("--log-dir",), OUTPUT, "output.log_dir", read.read_path, "DIR",
           "write one file for each rank and stream"),
    Option("events", ("--events",), OUTPUT, "output.events", read.read_path, "FILE",
           "append what happens to the job as JSON lines"),
    Option("stats", ("--stats",), OUTPUT, "output.stats", read.read_stats, "yes|FILE",
           "totals of all calls at the end, as a table or JSON", spelling="--stats[=FILE]"),
    Option("timestamps", ("--timestamps",), OUTPUT, "output.timestamps", read.read_switch, "",
           "put the local time before each line", default=False),
    Option("color", ("--color",), OUTPUT, "output.color", read.read_text, "WHEN",
           "colour the prefixes", "auto", _COLOR),
    Option("verbose", ("-v", "--verbose"), OUTPUT, "output.verbose", read.read_switch, "",
           "say more about what the launcher does", default=False),
    Option("timeout", ("--timeout",), LIMITS, "limits.timeout_s", read.read_limit, "S",
           "end the whole job after S seconds", math.inf),
    Option("forward_signals", ("--forward-signals",), LIMITS, "limits.forward_signals",
           read.read_signals, "LIST", "to ranks that handle them", forwarded_signals.DEFAULT),
    Option("max_restarts", ("--max-restarts",), LIMITS, "limits.max_restarts", read.read_number,
           "K", "start all again when one fails", 0),
    Option("start_timeout", ("--start-timeout",), LIMITS, "runtime.rendezvous_timeout_s",
           read.read_seconds, "S", "longest wait for all ranks to meet"),
    Option("grace", ("--grace",), LIMITS, "runtime.term_grace_s", read.read_seconds, "S",
           "time between SIGTERM and SIGKILL"),
    Option("preempt_grace", ("--preempt-grace",), LIMITS, "runtime.preempt_grace_s",
           read.read_seconds, "S", "the same for ranks that save first"),
)  # fmt: skip

BY_FLAG = {flag: option for option in OPTIONS for flag in option.flags}
BY_OFF_FLAG = {option.off_flag: option for option in OPTIONS if option.is_switch}
OTHER_FLAGS = ("-m", "--no-python", "-h", "--help", "--help-hosts", "--version")
BY_VARIABLE = {LAUNCH_PREFIX + one.key.upper(): one for one in OPTIONS if not one.setting}
BY_KEY = {one.key: one for one in OPTIONS if one.in_file and not one.setting}


def launch_keys() -> tuple[str, ...]:
    """Return the keys that the table `[launch]` of a file may have."""
    return tuple(BY_KEY)


def host_keys() -> tuple[str, ...]:
    """Return those of `launch_keys` that are about several hosts."""
    return tuple(option.key for option in BY_KEY.values() if option.group == HOSTS)
