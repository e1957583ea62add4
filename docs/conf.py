"""The documentation as a site: `make docs`."""

from shoal import __version__

project = "Shoal"
release = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"Shoal {release}"
html_static_path: list[str] = []
default_role = "code"  # what docstrings put in backticks
autodoc_typehints = "description"
autodoc_member_order = "bysource"
myst_heading_anchors = 3
suppress_warnings = ["myst.xref_missing"]  # links to files of the repository that are no pages
