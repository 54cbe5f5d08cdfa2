"""Run the commands of a documentation page, and compare their output with the page.

The kinds of blocks that a page may have, by the words after the three backticks:

* `python`: runs on two workers (see test_code_blocks.py).
* `python script`: runs under plain Python, and prints what its last comment says.
* `python file=train.py`, `toml file=job.toml`, ...: becomes a file in the page's folder.
* `console`: lines that begin with `$ ` are commands; the lines after a command are its output. A
  command without output lines may print anything. Each command has to succeed.
* `console fails`: the last command of the block has to fail.
* `console needs=WORD`: needs something that this machine may lack, see `NEEDS`.
* any other word, such as `text`: shown and not run.

A comment `<!-- run: COMMAND -->` is a command that the reader does not see. Times, sizes, process
numbers, ports, job names, hashes and paths may differ from what the page shows. So may the order of
lines, because ranks print at the same time, and which ranks share a line of a failure block. `...` stands for any text in a line, and a line `...`
for any lines.
"""

import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

NEEDS = {
    "torch": "PyTorch",
    "gloo": "PyTorch with gloo, whose processes abort now and then as they end",
    "jax": "JAX",
    "hosts": "other hosts that ssh reaches",
    "slurm": "Slurm",
    "mpi": "an MPI library",
    "ray": "Ray",
    "dask": "Dask",
    "kubernetes": "a Kubernetes cluster",
    "containers": "a container engine",
    "network": "a package index, or a clone of the repository",
    "terminal": "a person at a terminal",
}
LIMIT_S = 288.0

_BLOCK = re.compile(
    r"^(?P<ticks>`{3,})(?P<info>[^\n`]*)\n(?P<text>.*?)^(?P=ticks)$|^<!-- run: (?P<run>.*?) -->$",
    re.MULTILINE | re.DOTALL,
)
# What may differ between two runs, and what stands for it in the comparison.
_VARYING = [
    (r"\x1b\[[0-9;]*m", ""),
    (r"(/[\w.+-]+){2,}", "PATH"),
    (r"\b(\d{4}-\d\d-\d\dT)?\d\d:\d\d:\d\d(\.\d+)?\b", "TIME"),
    (r"\b\d{4}-\d\d-\d\d\b", "DATE"),
    (r"\b(?=[a-f]*\d)[0-9a-f]{8,}\b", "HEX"),
    (r"(\bpids?[ =]|\bprocess |\blauncher )\d+", r"\1NUMBER"),
    (r":\d{4,5}\b", ":PORT"),
    (r"(ranks? [\d, -]+) on [\w.-]+", r"\1 on HOST"),
    (r"(seconds[=: ]+)[\d.]+", r"\1NUMBER"),
    (r"\b\d+(\.\d+)?(e-?\d+)?( ?)(s|ms|us|µs|ns|B|kB|KiB|MiB|GiB|MB|GB|%)(?!\w)", r"NUMBER \4"),
    (r"\s+", " "),
]


class Command(NamedTuple):
    """A command of a page."""

    line: str
    output: list[str]  # the lines that the page shows; none: anything
    may_fail: bool
    needs: str = ""  # a key of NEEDS


class Page(NamedTuple):
    """What a page asks its reader to do."""

    files: dict[int, tuple[str, str]]  # by the number of the command before which it is written
    commands: list[Command]

    @property
    def needs(self):
        """What this machine may lack."""
        return {command.needs for command in self.commands} - {""}


def blocks(text):
    """Yield (words after the backticks, text) for each block of a page."""
    for found in _BLOCK.finditer(text):
        if found["run"] is None:
            yield found["info"].split(), found["text"]
        else:
            yield ["run"], f"$ {found['run']}\n"


def read_page(text):
    """Return the files and commands of a page, in its order."""
    page = Page({}, [])
    files = []
    for words, body in blocks(text):
        options = dict(word.split("=", 1) for word in words if "=" in word)
        if "file" in options:
            files.append((options["file"], body))
            continue
        if not words or words[0] not in ("console", "run"):
            continue
        assert body.startswith("$ "), f"this block begins with no command: {body[:80]!r}"
        found = [one._replace(needs=options.get("needs", "")) for one in _commands(body)]
        if words[0] == "console" and "fails" in words:
            found[-1] = found[-1]._replace(may_fail=True)
        for name, content in files:
            lines = f"mkdir -p {shlex.quote(os.path.dirname(name) or '.')}"
            page.files[len(page.commands)] = (name, content)
            page.commands.append(Command(lines, [], may_fail=False))
        files.clear()
        page.commands.extend(found)
    return page


def _commands(body):
    found, is_open = [], False
    for line in body.splitlines():
        if is_open:
            found[-1] = found[-1]._replace(line=f"{found[-1].line}\n{line.removeprefix('> ')}")
        elif line.startswith("$ "):
            found.append(Command(line[2:], [], may_fail=False))
        else:
            found[-1].output.append(line)
        is_open = (is_open or line.startswith("$ ")) and line.endswith("\\")
    return found


def run_page(page, folder, met=()):
    """Run the commands of a page in one shell; return a sentence for each difference.

    Commands that need something that is not in `met` are left out.
    """
    left_out = {at for at, one in enumerate(page.commands) if one.needs not in {"", *met}}
    script = ["exec </dev/null"]
    notes = Path(folder, ".notes")
    notes.mkdir()
    for number, command in enumerate(page.commands):
        if number in left_out:
            continue
        if number in page.files:
            content = notes / f"{number}.file"
            content.write_text(page.files[number][1])
            name = shlex.quote(page.files[number][0])
            script.append(f"{command.line} && cp {shlex.quote(str(content))} {name}")
            continue
        out, status = (shlex.quote(str(notes / f"{number}.{end}")) for end in ("out", "status"))
        script.append(f"{{ {command.line}\n}} >{out} 2>&1; s=$?; echo $s >{status}; (exit $s)")
    environ = {name: value for name, value in os.environ.items() if not name.startswith("SYNCVAR_")}
    environ["PATH"] = f"{Path(sys.executable).parent}:{environ['PATH']}"
    environ |= {"HOME": str(folder), "NO_COLOR": "1", "COLUMNS": "100"}
    for name in ("XDG_STATE_HOME", "PYTEST_ADDOPTS", "PYTHONUNBUFFERED"):
        environ.pop(name, None)
    # `syncvar stacks` looks for jobs here; the path of a socket has to be short.
    with tempfile.TemporaryDirectory() as jobs:
        subprocess.run(
            ["bash", "-c", "\n".join(script)],
            cwd=folder,
            env=environ | {"XDG_RUNTIME_DIR": jobs},
            timeout=LIMIT_S,
            check=False,
        )
    return [
        text
        for number, command in enumerate(page.commands)
        if number not in page.files and number not in left_out
        for text in _differences(command, notes / str(number))
    ]


def _differences(command, at):
    if not at.with_suffix(".status").exists():
        return [f"$ {command.line}\nhas not run"]
    status = int(at.with_suffix(".status").read_text())
    printed = at.with_suffix(".out").read_text(errors="replace")
    if command.may_fail != (status != 0):
        return [f"$ {command.line}\nended with status {status} and printed\n{printed}"]
    found = difference(command.output, printed.splitlines())
    return [f"$ {command.line}\n{found}\nit printed\n{printed}"] if found else []


def difference(shown, printed):
    """Return a sentence on the first line that differs, or an empty text."""
    if not [line for line in shown if line.strip()]:
        return ""
    shown, printed = one_rank_a_line(shown), one_rank_a_line(printed)
    left = [normalize(line) for line in printed if line.strip()]
    may_have_more = False
    # Lines with `...` last: a line that says more chooses first.
    for line in sorted((one for one in shown if one.strip()), key=lambda one: "..." in one):
        if line.strip() == "...":
            may_have_more = True
            continue
        parts = [re.escape(normalize(part)) for part in line.split("...")]
        pattern = re.compile(r"\s*.*\s*".join(part.strip() for part in parts))
        at = next((at for at, one in enumerate(left) if pattern.fullmatch(one)), None)
        if at is None:
            return f"it did not print: {line}"
        del left[at]
    return "" if may_have_more or not left else f"the page does not show: {left[0]}"


def one_rank_a_line(lines):
    """Return lines with one for each rank that lost another one, without the place of its call.

    How ranks share lines varies, and so does the place: a rank that waits in the C extension has no
    frame of syncvar, and one that has waited for long is shown with its call.
    """
    found = []
    for line in lines:
        ranks = re.fullmatch(r"(\s*)ranks? ([\d, -]+): .*; then PeerLost", line)
        for part in ranks[2].split(", ") if ranks else ():
            first, _, last = part.partition("-")
            numbers = range(int(first), int(last or first) + 1)
            found += [f"{ranks[1]}rank {number}: then PeerLost" for number in numbers]
        if not ranks:
            found.append(line)
    return found


def normalize(line):
    """Return a line of output without what differs between two runs."""
    for pattern, word in _VARYING:
        line = re.sub(pattern, word, line)
    return line.strip()
