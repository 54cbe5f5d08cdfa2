"""The documents: what commands print stands in them as it is, their links lead somewhere, their commands are understood."""

import ast
import re
import shlex

import import_graph
import pytest
from generated_block import check_block

from syncvar.cli.commands import main
from syncvar.cli.printed_tables import LIBRARIES
from syncvar.core import errors
from syncvar.core.environment import PREFIX
from syncvar_launcher.options.option_table import ASIDE, LAUNCH_PREFIX, OPTIONS, WORKERS
from syncvar_launcher.options.parse_options import parse
from tests.support.page_runner import blocks
from tests.support.paths import REPOSITORY

PAGES = sorted([*REPOSITORY.glob("*.md"), *REPOSITORY.glob("docs/**/*.md")])
ERRORS = REPOSITORY / "syncvar" / "cli" / "errors.md"
MOST_OF_THE_README = 8 * 1024
GENERATED = {
    "rules": ("docs/reference/variable-rules.md", ["rules"]),
    "collectives": ("docs/reference/collectives.md", ["collectives"]),
    "settings": ("docs/reference/settings.md", ["settings"]),
    "coming-from words": ("docs/migration/index.md", ["coming-from", "words"]),
    **{
        f"coming-from {one}": (f"docs/migration/{one.replace('.', '-')}.md", ["coming-from", one])
        for one in LIBRARIES
    },
}
LINK = re.compile(r"\[[^\]]+\]\(([^)#\s]+)(?:#[^)]*)?\)")
# Commands that have to fail may be wrong on purpose.
CONSOLE = re.compile(r"^```console(?! fails)[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("name", GENERATED)
def test_what_a_command_prints_stands_in_its_page(name, capsys):
    page, command = GENERATED[name]
    assert main(command) == 0
    printed = capsys.readouterr().out
    if name == "settings":
        printed = settings_table(printed)
    begin, end = f"<!-- {name}: output of `syncvar {name}` -->\n", f"<!-- end of {name} -->"
    check_block(REPOSITORY / page, begin, end, printed)


def settings_table(printed):
    """Return the output of `syncvar settings` as a table of Markdown."""
    rows = [re.fullmatch(r"(\w+) = (.*?): (.*)", line).groups() for line in printed.splitlines()]
    lines = [f"| `{name}` | {default} | {text} |\n" for name, default, text in rows]
    return "| variable | default | meaning |\n|---|---|---|\n" + "".join(lines)


def options_text():
    """Return the options of syncvar-launch, as tables of Markdown."""
    groups = {}
    for option in OPTIONS:
        group = WORKERS if option.group == ASIDE else option.group
        prefix, name = (PREFIX, option.setting) if option.setting else (LAUNCH_PREFIX, option.key)
        table = "runtime" if option.setting else "launch"
        key = f"`{name}` in [{table}]" if option.setting or option.in_file else "none"
        words = (f"`{option.usage}`", key, f"`{prefix}{name.upper()}`", option.description)
        row = " | ".join(one.replace("|", "\\|") for one in words)
        groups.setdefault(group, []).append(f"| {row} |\n")
    head = "| option | key of a file | variable | meaning |\n|---|---|---|---|\n"
    return "\n".join(f"## {group}\n\n{head}{''.join(rows)}" for group, rows in groups.items())


def test_the_options_of_the_launcher_stand_in_their_page():
    begin, end = "<!-- options: from the table of options -->\n", "<!-- end of options -->"
    check_block(REPOSITORY / "docs/reference/syncvar-launch.md", begin, end, options_text())


def errors_text():
    """Return the tree of the exceptions, the table of their codes, and the section of each code."""
    codes = re.findall(r"^### ((SV-\d+): (.*))$", ERRORS.read_text(), re.MULTILINE)
    links = {}
    rows = ["| code | what happened |\n|---|---|\n"]
    for heading, code, title in codes:
        link = f"[{code}](#{re.sub(r'[^a-z0-9 -]', '', heading.lower()).replace(' ', '-')})"
        links.setdefault(title.partition(",")[0], []).append(link)
        rows.append(f"| {link} | {title} |\n")
    _, _, sections = ERRORS.read_text().partition("\n\n")
    tree = "".join(branch(errors.SyncvarError, links))
    return f"{tree}\n## Codes\n\n{''.join(rows)}\n{sections}"


def branch(kind, links, depth=0):
    """Yield the line of an exception class and those of its subclasses, in the order of the file."""
    builtin = [f"`{base.__name__}`" for base in kind.__bases__ if base.__module__ == "builtins"]
    also = f" (also {' and '.join(builtin)})" if builtin and builtin != ["`Exception`"] else ""
    sentence = kind.__doc__.partition(". ")[0].partition("\n")[0].rstrip(".")
    yield f"{'  ' * depth}- `{kind.__name__}`{also}: {sentence}. {', '.join(links[kind.__name__])}\n"
    for one in kind.__subclasses__():
        if one.__module__ == errors.__name__:
            yield from branch(one, links, depth + 1)


def test_the_errors_stand_in_their_page():
    begin, end = "<!-- errors: from syncvar/cli/errors.md -->\n", "<!-- end of errors -->"
    check_block(REPOSITORY / "docs/reference/errors.md", begin, end, errors_text())


def test_internals_describes_every_room():
    described = re.findall(
        r"^\| `(\w+)` \|", (REPOSITORY / "docs" / "internals.md").read_text(), re.MULTILINE
    )
    rooms = [room for layer in import_graph.layers() for room in layer]
    assert sorted(described) == sorted([*rooms, import_graph.LAUNCHER])


def test_files_and_names_of_the_internals_exist():
    text = " ".join((REPOSITORY / "docs" / "internals.md").read_text().split())
    files = re.findall(r"`((?:[\w-]+/)*\w+\.(?:py|c))`", text)
    pairs = re.findall(r"`((?:[\w-]+/)*\w+\.(?:py|c))` `([\w.]+)`", text)
    assert len(pairs) > 50
    missing = [file for file in files if not _source(file).is_file()]
    assert not missing, "files of docs/internals.md that are not there"
    missing = [pair for pair in pairs if pair[1] not in _names_in(_source(pair[0]))]
    assert not missing, "names of docs/internals.md that their files do not define"


def _source(file):
    return REPOSITORY / (file if file.startswith(("launcher/", "tests/")) else f"syncvar/{file}")


def _names_in(path):
    """Return the functions, classes and methods that a file defines."""
    if path.suffix == ".c":
        return set(re.findall(r"^[\w *]*?\b(\w+)\(", path.read_text(), re.MULTILINE))
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{one.name}" for one in node.body if hasattr(one, "name")}
    return found


def test_the_readme_is_short():
    assert len((REPOSITORY / "README.md").read_bytes()) <= MOST_OF_THE_README


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page):
    for target in LINK.findall(page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), (
                f"{page.name} links to {target}, which is not there"
            )


def commands(text):
    """Return the commands of a page."""
    text = "".join(CONSOLE.findall(text)).replace("\\\n", " ")
    return [line for line in text.splitlines() if line.startswith("$ ")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_are_understood(page, tmp_path, monkeypatch):
    files = {"train.py": "", "program": "", "hosts": "node1 slots=4\nnode2 slots=4\n"}
    for words, text in blocks(page.read_text()):
        files |= {word.removeprefix("file="): text for word in words if word.startswith("file=")}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    for line in commands(page.read_text()):
        for command in line.split("#")[0].split("&&"):
            words = shlex.split(command.replace("…", "x").lstrip("$ "))
            environ = {}
            while words and re.fullmatch(r"\w+=.*", words[0]):
                name, _, value = words.pop(0).partition("=")
                environ[name] = value
            if not words:
                continue
            if words[0].rpartition("/")[2] == "syncvar-launch":
                assert parse(words[1:], environ, tmp_path)
            elif words[0] == "syncvar":
                with pytest.raises(SystemExit) as ended:
                    main([words[1], "--help"])
                assert ended.value.code == 0
