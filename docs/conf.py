"""Build the documentation site: `sphinx-build -W --keep-going -b html docs build/site`."""

import os
import tempfile
from pathlib import Path

import syncvar

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
suppress_warnings = ["misc.highlighting_failure"]  # until the picture of the rooms is an SVG

# The pages are Markdown that also reads well in the repository.
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 4
nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_timeout = 120
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
autosummary_generate = False
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_custom_sections = [
    ("Cost", "notes_style"),
    ("Order", "notes_style"),
    ("Source", "notes_style"),
]

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
