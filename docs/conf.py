"""Settings of the documentation site; `python -m docs` builds it."""

import pathlib
import sys

REPOSITORY = pathlib.Path(__file__).parent.parent
sys.path.insert(0, str(REPOSITORY))

import memexplore  # noqa: E402

project, author, copyright = "memexplore", "the authors of memexplore", "the authors of memexplore"
version = release = memexplore.__version__
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_site", "_doctrees", "_pages", "jupyter_execute", "styles"]
html_theme = "furo"
html_title = f"memexplore {version}"
html_extra_path = ["_pages"]
html_static_path = ["styles"]
html_css_files = ["outputs.css"]
html_show_sourcelink = False
# Single backticks in docstrings are code, as in Markdown.
default_role = "code"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
autodoc_member_order = "bysource"
myst_heading_anchors = 3
# The notebooks are executed by `python -m docs` before Sphinx reads them.
nb_execution_mode = "off"
nb_merge_streams = True
nb_code_prompt_show = "Show the solution or the check"
nb_code_prompt_hide = "Hide it"
