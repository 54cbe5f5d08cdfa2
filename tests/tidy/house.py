"""Measure the house rules: names, sizes and sentences of `syncvar` and `syncvar_launcher`.

    python tests/tidy/house.py             print every figure with its goal
    python tests/tidy/house.py --list M    print what a measure counts

`GOALS` holds what each figure may be at most. `test_house.py` compares them in the default test run.
`REACHED` is the limit of a figure that has not reached its goal; it may only shrink.
"""

import argparse
import ast
import collections
import functools
import io
import re
import sys
import tokenize
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
WIDTH = 100
SENTENCE_LIMIT = 30
PARAMETER_LIMIT = 7
# Words that no identifier may contain, as a whole word between underscores or capitals.
BANNED = frozenset(
    [
        "told",
        "made",
        "said",
        "given",
        "taken",
        "brought",
        "taught",
        "begun",
        "came",
        "kept",
        "gone",
        "spoke",
        "asked",
        "placed",
        "parted",
        "enrolled",
        "lying",
        "how",
        "what",
        "who",
        "whose",
        "why",
        "whatever",
        "whoever",
        "fate",
        "wish",
        "roster",
        "goal",
        "elsewhere",
        "alone",
        "apart",
        "likeness",
        "door",
        "fleet",
        "crowd",
        "outlet",
        "stretch",
        "witness",
        "board",
        "edge",
        "box",
        "errand",
        "doom",
        "poison",
        "knob",
        "say",
        "says",
        "saying",
        "tell",
        "tells",
        "hear",
        "heed",
        "speak",
        "knock",
        "greet",
        "goodbye",
    ]
)
PUBLIC_NAMES = frozenset({"alone"})  # sv.init(alone=True)
SHARED_FILE_NAMES = frozenset({"__init__.py", "__main__.py", "base.py"})
GOALS = {
    "class names defined twice": 0,
    "banned words in identifiers": 0,
    "file names twice": 0,
    "lines over 100 columns": 0,
    "fmt: skip": 15,
    "noqa: SLF001": 20,
    "functions with more than 7 parameters": 25,
    "suppressions of C901, PLR09 and FBT": 60,
    "import circles": 0,
    "files": 350,  # about 10 make jobs elastic; about 40 of them are the tools that look at a job, before and while it runs
    "lines": 64_000,
    "adapter files": 45,
    "adapter lines": 12_000,
    "words in a mean docstring sentence": 18,
    "docstring sentences over 30 words": 0,
}
REACHED = {"lines": 97_500}  # docstrings with an example for each public name count too
# Rooms with the interface of another library: nothing else imports them, so they count apart.
ADAPTERS = ("compat", "torch", "jax")
LINT = ("C901", "PLR09", "FBT")  # the rules about complexity, parameters and positional booleans


def sources():
    """Return the path of every Python file of both packages."""
    found = [
        path for folder in ("syncvar", "launcher") for path in (REPOSITORY / folder).rglob("*.py")
    ]
    return sorted(path for path in found if "__pycache__" not in path.parts)


def is_adapter(path):
    """Return whether a file is in a room of `ADAPTERS`."""
    return path.relative_to(REPOSITORY).parts[:2] in {("syncvar", room) for room in ADAPTERS}


def module_of(path):
    """Return the dotted name under which a file is imported."""
    parts = list(path.relative_to(REPOSITORY).with_suffix("").parts)
    if parts[0] == "launcher":
        parts[0] = "syncvar_launcher"
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


class Sources:
    """The parsed files of both packages.

    Attributes:
        texts: Path -> text.
        trees: Path -> syntax tree.
    """

    def __init__(self):
        self.texts = {path: path.read_text() for path in sources()}
        self.trees = {path: ast.parse(text) for path, text in self.texts.items()}
        self._by_type = collections.defaultdict(list)  # type of a node -> (path, node)
        for path, tree in self.trees.items():
            for node in ast.walk(tree):
                self._by_type[type(node)].append((path, node))

    def nodes(self, *types):
        """Yield (path, node) for all nodes of some types, which have no subtypes."""
        for one in types:
            yield from self._by_type[one]

    @functools.cached_property
    def comments(self):
        """Tuples (path, line, text) of all comments."""
        return [
            (path, token.start[0], token.string)
            for path, source in self.texts.items()
            for token in tokenize.generate_tokens(io.StringIO(source).readline)
            if token.type == tokenize.COMMENT
        ]


def location(path, node=None):
    """Return a text such as "syncvar/core/errors.py:12"."""
    name = str(path.relative_to(REPOSITORY))
    return f"{name}:{node.lineno}" if node is not None else name


def class_names_defined_twice(found):
    where = collections.defaultdict(list)
    for path, node in found.nodes(ast.ClassDef):
        where[node.name].append(location(path, node))
    return [
        f"{name}: {', '.join(places)}" for name, places in sorted(where.items()) if len(places) > 1
    ]


def words_of(identifier):
    """Return the words of an identifier, in lower case.

    >>> sorted(words_of("_why_notShared"))
    ['not', 'shared', 'why']
    """
    return {word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", identifier)}


def defined_names(node):
    """Return the identifiers that a node gives a meaning to."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.arg):
        return [node.arg]
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        return [node.id]
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
        return [node.attr]
    if isinstance(node, ast.alias) and node.asname:
        return [node.asname]
    return []


NAMING = (
    ast.FunctionDef,
    ast.AsyncFunctionDef,
    ast.ClassDef,
    ast.arg,
    ast.Name,
    ast.Attribute,
    ast.alias,
)


def banned_words_in_identifiers(found):
    where = {}
    for path, node in found.nodes(*NAMING):
        for name in defined_names(node):
            if words_of(name) & BANNED and name not in PUBLIC_NAMES:
                where.setdefault(name, location(path, node))
    return [f"{name}: {at}" for name, at in sorted(where.items())]


def file_names_twice(found):
    where = collections.defaultdict(list)
    for path in found.texts:
        if path.name not in SHARED_FILE_NAMES:
            where[path.name].append(location(path))
    return [
        f"{name}: {', '.join(places)}" for name, places in sorted(where.items()) if len(places) > 1
    ]


def without_suppression(line):
    """Return a line without a trailing suppression for tools, as E501 of ruff counts it."""
    return re.sub(r"  # (noqa|type: ignore).*$", "", line)


def long_lines(found):
    return [
        f"{location(path)}:{number}"
        for path, text in found.texts.items()
        for number, line in enumerate(text.split("\n"), 1)
        if len(without_suppression(line)) > WIDTH
    ]


def comments(found, pattern):
    return [
        f"{location(path)}:{line}"
        for path, line, text in found.comments
        if re.search(pattern, text)
    ]


def long_signatures(found):
    result = []
    for path, node in found.nodes(ast.FunctionDef, ast.AsyncFunctionDef):
        arguments = node.args
        every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        count = len([one for one in every if one.arg not in ("self", "cls")])
        if count > PARAMETER_LIMIT:
            result.append(f"{location(path, node)} {node.name}: {count}")
    return result


def imports(found):
    """Return module -> the modules that it imports, also inside functions and for type checkers."""
    names = {module_of(path): path for path in found.texts}
    graph = {name: set() for name in names}
    for path, node in found.nodes(ast.Import, ast.ImportFrom):
        module = module_of(path)
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        else:
            targets = [
                full if (full := f"{node.module}.{alias.name}") in names else node.module
                for alias in node.names
            ]
        graph[module] |= {target for target in targets if target in names and target != module}
    return graph


def circles(graph):
    """Return the strongly connected sets of more than one module (Tarjan's algorithm)."""
    order, low, stack, result = {}, {}, [], []

    def visit(node):
        order[node] = low[node] = len(order)
        stack.append(node)
        for target in sorted(graph[node]):
            if target not in order:
                visit(target)
                low[node] = min(low[node], low[target])
            elif target in stack:
                low[node] = min(low[node], order[target])
        if low[node] == order[node]:
            members = [stack.pop()]
            while members[-1] != node:
                members.append(stack.pop())
            if len(members) > 1:
                result.append(" ".join(sorted(members)))

    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(max(limit, 4 * len(graph)))
    for node in sorted(graph):
        if node not in order:
            visit(node)
    sys.setrecursionlimit(limit)
    return result


def sentences(found):
    """Yield (place, sentence) for every sentence of every docstring; examples and code are left out."""
    types = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for path, node in found.nodes(*types):
        text = ast.get_docstring(node) or ""
        at = location(path, node if hasattr(node, "lineno") else None)
        for paragraph in re.split(r"\n\s*\n", text):
            lines = [
                line
                for line in paragraph.split("\n")
                if not line.lstrip().startswith((">>>", "...", "|", "```"))
            ]
            if ">>>" in paragraph or paragraph.startswith("    ") or not lines:
                continue
            prose = " ".join(line.strip() for line in lines)
            prose = re.sub(r"``?[^`]*``?", "CODE", prose)
            prose = re.sub(
                r"\b(Args|Returns|Raises|Yields|Attributes|Cost|Order|Source|Example|Examples):",
                ".",
                prose,
            )
            for sentence in re.split(r"(?<=[.!?;])\s+|(?<=\.)$", prose):
                if len(re.findall(r"[A-Za-z0-9][\w'’-]*", sentence)) > 1:
                    yield at, sentence


def length_of(sentence):
    """Return the number of words of a sentence."""
    return len(re.findall(r"[A-Za-z0-9][\w'’-]*", sentence))


def long_sentences(found):
    return [
        f"{at} ({length_of(text)}): {text}"
        for at, text in sentences(found)
        if length_of(text) > SENTENCE_LIMIT
    ]


def mean_sentence(found):
    lengths = [length_of(text) for _, text in sentences(found)]
    return round(sum(lengths) / len(lengths), 1)


def lint_suppressions(found):
    return comments(found, rf"noqa: [A-Z0-9, ]*({'|'.join(LINT)})")


LISTS = {
    "class names defined twice": class_names_defined_twice,
    "banned words in identifiers": banned_words_in_identifiers,
    "file names twice": file_names_twice,
    "lines over 100 columns": long_lines,
    "fmt: skip": lambda found: comments(found, "fmt: skip"),
    "noqa: SLF001": lambda found: comments(found, "SLF001"),
    "functions with more than 7 parameters": long_signatures,
    "suppressions of C901, PLR09 and FBT": lint_suppressions,
    "import circles": lambda found: circles(imports(found)),
    "files": lambda found: [location(path) for path in found.texts if not is_adapter(path)],
    "adapter files": lambda found: [location(path) for path in found.texts if is_adapter(path)],
    "docstring sentences over 30 words": long_sentences,
}


def figures():
    """Return measure -> figure, of the whole of both packages."""
    found = Sources()
    result = {name: len(function(found)) for name, function in LISTS.items()}
    lines = {path: text.count("\n") for path, text in found.texts.items()}
    result["lines"] = sum(count for path, count in lines.items() if not is_adapter(path))
    result["adapter lines"] = sum(lines.values()) - result["lines"]
    result["words in a mean docstring sentence"] = mean_sentence(found)
    return result


def above_limit(measured):
    """Return the figures that are above their goal and above what was reached."""
    return {
        name: figure
        for name, figure in measured.items()
        if figure > max(GOALS[name], REACHED.get(name, 0))
    }


def main():
    """Print the figures, or what one of them counts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--list", choices=LISTS, metavar="MEASURE")
    options = parser.parse_args()
    if options.list:
        print("\n".join(LISTS[options.list](Sources())))
        return 0
    measured = figures()
    for name, figure in measured.items():
        print(
            f"{name:40} {figure:>8} (goal {GOALS[name]}){'' if figure <= GOALS[name] else '  MISSED'}"
        )
    return 1 if above_limit(measured) else 0


if __name__ == "__main__":
    sys.exit(main())
