"""How Sphinx builds this documentation: `python3 -m nox -s docs`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

project = "Ascend Suite"
author = "The Ascend Suite authors"
copyright = author

extensions = [
    "command_line",
    "compatibility_rules",
    "config_options",
    "feature_matrix",
    "markdown_blocks",
    "plan_tables",
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
exclude_patterns = ["_build"]

# Docstrings mark code with single backticks.
default_role = "code"
autodoc_default_options = {"members": True, "show-inheritance": True}
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True  # attributes as fields: a NamedTuple describes each a second time

smartquotes_action = "qe"  # two dashes begin an option, and are no dash

html_theme = "furo"
html_title = "Ascend Suite"
html_static_path = ["_static"]
html_css_files = ["custom.css"]
html_copy_source = False
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#2f6fb3", "color-brand-content": "#2a63a0"},
    "dark_css_variables": {"color-brand-primary": "#7fb2e6", "color-brand-content": "#7fb2e6"},
}
