"""The documents: what commands print stands in them as it is, their links lead somewhere, their commands are understood."""

import os
import re
import shlex

import pytest

from syncvar.cli.commands import main
from syncvar.cli.migration_table import LIBRARIES
from syncvar_launcher.options.parse_options import parse
from tests.support.paths import REPOSITORY

PAGES = sorted([*REPOSITORY.glob("*.md"), *REPOSITORY.glob("docs/*.md")])
MOST_OF_THE_README = 12 * 1024
GENERATED = {
    "rules": ("docs/rules.md", ["rules"]),
    "collectives": ("docs/collectives.md", ["collectives"]),
    "coming-from": ("docs/migrating.md", ["coming-from"]),
    "settings": ("docs/settings.md", ["settings"]),
    "coming-from words": ("docs/migrating.md", ["coming-from", "words"]),
    **{f"coming-from {one}": ("docs/migrating.md", ["coming-from", one]) for one in LIBRARIES},
}
LINK = re.compile(r"\[[^\]]+\]\(([^)#\s]+)(?:#[^)]*)?\)")
CONSOLE = re.compile(r"^```console\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("name", GENERATED)
def test_what_a_command_prints_stands_in_its_page(name, capsys):
    page, command = GENERATED[name]
    marked = re.compile(
        rf"(<!-- {name}: output of `syncvar {name}` -->\n)(.*?)(<!-- end of {name} -->)", re.DOTALL
    )
    assert main(command) == 0
    printed = capsys.readouterr().out
    if name == "settings":
        printed = f"```text\n{printed}```\n"
    if command[-1] in LIBRARIES:  # the rows of one library are those of the table of all
        printed = printed[printed.index("What is different") :]
    path = REPOSITORY / page
    text = path.read_text()
    assert marked.search(text), f"{page} has no place for the output of `syncvar {name}`"
    if os.environ.get("SYNCVAR_REGENERATE_GOLDEN"):
        path.write_text(marked.sub(lambda found: found[1] + printed + found[3], text))
        text = path.read_text()
    assert marked.search(text)[2] == printed, (
        "run this test with SYNCVAR_REGENERATE_GOLDEN=1, and read the difference"
    )


def test_the_readme_is_short():
    assert len((REPOSITORY / "README.md").read_bytes()) <= MOST_OF_THE_README


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page):
    for target in LINK.findall(page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), (
                f"{page.name} links to {target}, which is not there"
            )


def test_every_page_is_in_the_list_of_pages():
    listed = LINK.findall((REPOSITORY / "docs" / "README.md").read_text())
    assert {page.name for page in REPOSITORY.glob("docs/*.md")} - {"README.md"} == {
        one for one in listed if "/" not in one
    }


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_are_understood(page, tmp_path, monkeypatch):
    for name in ("train.py", "program"):
        (tmp_path / name).write_text("")
    (tmp_path / "hosts").write_text("node1 slots=4\nnode2 slots=4\n")
    for line in "\n".join(CONSOLE.findall(page.read_text())).splitlines():
        for command in line.split("#")[0].split("&&"):
            words = shlex.split(command.replace("…", "x").lstrip("$ "))
            while words and re.fullmatch(r"\w+=.*", words[0]):
                del words[0]
            if not words:
                continue
            if words[0].rpartition("/")[2] == "syncvar-launch":
                assert parse(words[1:], {}, tmp_path)
            elif words[0] == "syncvar":
                with pytest.raises(SystemExit) as ended:
                    main([words[1], "--help"])
                assert ended.value.code == 0
