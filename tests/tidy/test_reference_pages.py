"""The pages of docs/reference: each public name and each command stands on one of them."""

import ast
import inspect
import re

import pytest
from generated_block import check_block

import syncvar as sv
import syncvar.testing
from syncvar.cli.commands import main
from syncvar.cli.printed_tables import with_collectives
from tests.support.paths import REPOSITORY

FOLDER = REPOSITORY / "docs" / "reference" / "api"
INDEX = FOLDER / "index.md"
MODULES = {
    "compressors": sv.compressors,
    "data": sv.data,
    "engines": sv.engines,
    "optimizers": sv.optimizers,
    "partitioners": sv.partitioners,
    "testing": syncvar.testing,
}
PUBLIC = {
    *(f"syncvar.{name}" for name in sv.__all__),
    *(f"syncvar.{short}.{name}" for short, one in MODULES.items() for name in one.__all__),
}
PROPER = {"Adam", "Adam's", "Dask", "RMSProp", "Ray"}
# Adapters need libraries that the default tests do not have: their source is read, not imported.
ADAPTERS = {"syncvar.jax": ("syncvar/jax/__init__.py", "syncvar/jax/jax_collectives.py")}
WITHOUT_DOCSTRING = {"syncvar.testing.TRANSPORT_CHECKS"}
DIRECTIVE = re.compile(
    r"^\.\. (?:autoclass|autofunction|py:data|py:function|py:module):: ([\w.]+)", re.MULTILINE
)


def names_on(page):
    """Return the names that a page documents, in its order."""
    return DIRECTIVE.findall(with_collectives(page.read_text()))


def pages():
    """Return the pages in the order of the table of contents."""
    listed = re.search(r"```{toctree}\n.*?\n\n(.*?)```", INDEX.read_text(), re.DOTALL)[1]
    return [FOLDER / f"{name}.md" for name in listed.split()]


def test_every_page_is_in_the_table_of_contents():
    assert sorted([*pages(), INDEX]) == sorted(FOLDER.glob("*.md"))


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_a_public_name_stands_on_one_page(name):
    homes = [page.name for page in pages() for one in names_on(page) if one == name]
    assert len(homes) == 1, f"{name} has to stand on one page of docs/reference/api: {homes}"


def functions_of(adapter):
    """Return name -> function, a node of the syntax tree, of an adapter."""
    path = REPOSITORY / ADAPTERS[adapter][1]
    return {
        node.name: node
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef)
    }


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_every_function_of_an_adapter_stands_on_its_page_with_its_parameters(adapter):
    tree = ast.parse((REPOSITORY / ADAPTERS[adapter][0]).read_text())
    (public,) = (
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and node.targets[0].id == "__all__"
    )
    functions = functions_of(adapter)
    wanted = set()
    for name in public:
        parameters = functions[name].args
        for one in (*parameters.args, *parameters.kwonlyargs):
            one.annotation = None
        text = ast.unparse(parameters).replace("'", '"')
        wanted.add(f"{adapter}.{name}({text})")
    text = (FOLDER / f"{adapter.rpartition('.')[2]}.md").read_text()
    assert set(re.findall(r"py:function:: (.*)", text)) == wanted


def docstring_of(name):
    """Return the docstring of a public name."""
    adapter, _, function = name.rpartition(".")
    if adapter in ADAPTERS:
        return ast.get_docstring(functions_of(adapter)[function])
    return inspect.getdoc(value_of(name))


def value_of(name):
    """Return what a public name is."""
    value = sv
    for part in name.removeprefix("syncvar.").split("."):
        value = MODULES["testing"] if part == "testing" else getattr(value, part)
    return value


def summary(name):
    """Return the first sentence of a name's docstring, as half a sentence of Markdown."""
    if name in WITHOUT_DOCSTRING:
        return "the checks that `check_transport` makes, by name"
    first = docstring_of(name).partition("\n\n")[0].replace("\n", " ")
    sentence = re.match(r".*?[.](?= |$)", first)[0].rstrip(".")
    head, _, tail = sentence.partition(": ")
    if tail:  # a title and an explanation
        sentence = tail if len(head.split()) <= 1 + inspect.ismodule(value_of(name)) else head
    if " -= " in sentence:
        return f"`{sentence}`"
    begin = sentence.partition(" ")[0]
    if begin == "A" or (not begin.isupper() and begin not in PROPER):
        sentence = sentence[0].lower() + sentence[1:]
    return sentence.replace("|", "\\|")


def table():
    """Return the table of all public names, by page."""
    parts = []
    for page in pages():
        title = re.match(r"# (.*)", page.read_text())[1]
        rows = [
            f"| [`{name.removeprefix('syncvar.')}`](#{name}) | {summary(name)} |\n"
            for name in names_on(page)
            if not name.startswith(("syncvar.collectives", "syncvar.testing")) or name in PUBLIC
        ]
        parts.append(
            f"## [{title}]({page.name})\n\n| name | in short |\n|---|---|\n{''.join(rows)}"
        )
    return "\n".join(parts)


def test_the_table_lists_all_names():
    begin, end = "<!-- names: from the docstrings -->\n", "<!-- end of names -->"
    check_block(INDEX, begin, end, table())


def test_the_commands_have_a_section_each(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    commands = set(re.findall(r"^    ([a-z-]+)(?: |$)", capsys.readouterr().out, re.MULTILINE))
    text = (FOLDER.parent / "command-line.md").read_text()
    assert commands == set(re.findall(r"^## `syncvar ([a-z-]+)", text, re.MULTILINE))


def test_the_glossary_is_sorted_and_marks_own_words():
    text = (FOLDER.parent / "glossary.md").read_text()
    sections = re.split(r"^## .*$", text, flags=re.MULTILINE)[1:]
    words = [re.findall(r"^### (.*)$", section, re.MULTILINE) for section in sections]
    assert len(words) == 3
    assert all(one == sorted(one, key=str.lower) for one in words)
    own = " ".join(re.search(r"<!-- own words: (.*?) -->", text, re.DOTALL)[1].split())
    assert set(own.split(", ")) <= {one for section in words for one in section}
