"""Build the documentation site: `sphinx-build -W --keep-going -b html docs build/site`."""

import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx
from sphinx.util import inspect
from sphinx.util.inspect import stringify_signature

import syncvar
from syncvar.cli.printed_tables import with_collectives

HERE = Path(__file__).parent

project = "syncvar"
author = "the syncvar developers"
copyright = "2026, the syncvar developers"  # noqa: A001  (Sphinx's own name)
release = version = syncvar.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
root_doc = "index"
exclude_patterns = ["_build", "pictures/*.py"]
nitpicky = False

# The pages are Markdown that also reads well in the repository.
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 4
nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_timeout = 120
nb_merge_streams = True
# The kernel of a notebook reads no settings of yours, and logs errors only.
os.environ["IPYTHONDIR"] = tempfile.mkdtemp(prefix="ipython-")
_profile = Path(os.environ["IPYTHONDIR"], "profile_default")
_profile.mkdir()
(_profile / "ipython_kernel_config.py").write_text("get_config().IPKernelApp.log_level = 40\n")
highlight_language = "text"
copybutton_prompt_text = r"\$ |>>> |\.\.\. "
copybutton_prompt_is_regexp = True

# The reference comes from docstrings in Google's style.
default_role = "py:obj"
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 90
smartquotes = False  # an option is --workers, a string is "sum"
autosummary_generate = False
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True

html_theme = "pydata_sphinx_theme"
html_title = "syncvar"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_show_sourcelink = False
html_theme_options = {
    "show_prev_next": True,
    "navigation_with_keys": False,
    "show_toc_level": 2,
    "navbar_align": "left",
    "secondary_sidebar_items": ["page-toc"],
    "header_links_before_dropdown": 6,
    "show_nav_level": 1,
}


_HEADER = re.compile(r"^(Args|Attributes|Returns|Yields|Raises|Cost|Order|Source|Example)s?:$")
_ONE_LINE = re.compile(r"^(Cost|Order|Source): (.+)$")
_PRIVATE = re.compile(r"= (_[A-Z_]+)")
_OF_SV = re.compile(r"(?<!`)`sv\.([A-Za-z_][\w.]*)(\([^`]*\))?`(?!`)")
# The program gets these from functions, or uses their members: it never calls the class.
MADE_ELSEWHERE = {
    *("Dataset", "DatasetIterator", "DistributedDataset", "DistributedIterator", "Engine"),
    *("Group", "Mesh"),
    *("PendingSave", "ReduceOp", "RemoteValue", "ReplicaContext", "ShardedVariable"),
    *("VariableAggregation", "VariableSynchronization", "Work"),
}


def lay_out_docstring(
    _app: Sphinx, _what: str, _name: str, _value: object, _options: object, lines: list[str]
) -> None:
    """Turn what our docstrings allow and napoleon does not know into reStructuredText."""
    found, in_section = [], False
    for index, line in enumerate(lines):
        text = _OF_SV.sub(r"`sv.\1\2 <syncvar.\1>`", line)
        section = _ONE_LINE.match(text)
        if section:
            text = f":{section[1]}: {section[2][0].upper()}{section[2][1:]}"
        elif text in ("Returns:", "Yields:"):
            text = f":{text.lower()}"
        if section or _HEADER.match(line):
            in_section = True
        elif line and not line.startswith(" "):
            in_section = False
        if not in_section and line.startswith("    ") and not lines[index - 1]:
            found += ["::", ""]  # a program between two paragraphs
        found.append(text)
    lines[:] = found


def shorten_signature(  # noqa: PLR0913  (Sphinx passes these)
    _app: Sphinx,
    what: str,
    name: str,
    value: Any,
    _options: object,
    signature: str | None,
    returns: str | None,
) -> tuple[str | None, str | None]:
    """Hide what is no argument: constructors of other modules, and the catch-all of hints."""
    short = name.rpartition(".")[2]
    if what == "class" and short in MADE_ELSEWHERE:
        return "", None
    if what == "class" and short == "Variable":
        signature = stringify_signature(inspect.signature(value.__init__, bound_method=True))
        signature, returns = signature.removesuffix(" -> None"), None
    if signature:
        signature = re.sub(r"(, )?\*\*_foreign: [^,)]*", "", signature)
        constants = vars(sys.modules[value.__module__]) if hasattr(value, "__module__") else {}
        signature = _PRIVATE.sub(lambda found: f"= {constants[found[1]]!r}", signature)
    return signature, returns


def leave_out_internals(
    _app: Sphinx, _what: str, _name: str, value: object, _skip: object, _options: object
) -> bool | None:
    """Leave out the public members of which the docstring says that they are not for users."""
    return "for this package only" in (inspect.getdoc(value) or "").lower() or None


def list_collectives(_app: Sphinx, _page: str, source: list[str]) -> None:
    """List the functions where a page names a kind of collectives only."""
    source[0] = with_collectives(source[0])


def setup(app: Sphinx) -> None:
    """Connect the functions above with autodoc."""
    app.connect("source-read", list_collectives)
    app.connect("autodoc-process-docstring", lay_out_docstring, priority=100)
    app.connect("autodoc-process-signature", shorten_signature)
    app.connect("autodoc-skip-member", leave_out_internals)
