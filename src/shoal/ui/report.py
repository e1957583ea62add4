"""`report.html`: a run, or several side by side, as one file that needs no network.

The file holds the same scripts that the live page uses, the chart library, and the data as JSON in
which no name can end the script (`<` is escaped). A content security policy with the hashes of the
scripts and styles lets nothing else run, whatever a name holds, and nothing be loaded. A report of
a run takes some tens of milliseconds and about 150 kB.

Read next: `run_reader.py`, which makes the data; `page/report.js`, which draws them.
"""

import base64
import hashlib
import re
import time
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path

import msgspec

from shoal import __version__
from shoal.storage.decoding import encode_json
from shoal.storage.files import write_atomic
from shoal.ui.findings import settings_differences
from shoal.ui.records import RunView, SettingsDifference
from shoal.ui.run_reader import read_view

REPORT = "report.html"
LIBRARY = "uPlot.iife.min.js"
MODULES = ("dom.js", "charts.js", "strips.js", "run.js", "compare.js", "report.js")
STYLES = ("uPlot.min.css", "style.css")
_IMPORT = re.compile(r"^import [^;]*;\n", re.MULTILINE)
_EXPORT = re.compile(r"^export ", re.MULTILINE)


class ReportData(msgspec.Struct, frozen=True, kw_only=True):
    """What the file holds as JSON."""

    made: str
    runs: list[RunView]
    differences: list[SettingsDifference]


def page_file(name: str) -> bytes:
    """A file of the page, or of the chart library; empty if that is not installed."""
    package = files("shoal.ui")
    for folder in ("page", "vendor"):
        found = package / folder / name
        if found.is_file():
            return found.read_bytes()
    return b""


def has_charts() -> bool:
    """Whether the chart library was there when the package was built."""
    return bool(page_file(LIBRARY))


def render_report(runs: Sequence[RunView], made_at: float | None = None) -> bytes:
    """The file. Pure, but for the scripts that it holds."""
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(made_at or time.time()))
    data = ReportData(
        made=f"Shoal {__version__}, {when}",
        runs=list(runs),
        differences=settings_differences(runs) if len(runs) > 1 else [],
    )
    library, script, style, policy = _assets()
    json = encode_json(data).decode().replace("<", "\\u003c").replace("\u2028", "\\u2028")
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>Shoal report</title>
<link rel="icon" href="data:,">
<style>{style}</style>
</head>
<body>
<a class="skip" href="#main">Skip to the content</a>
<main id="main"><p class="quiet">This report draws itself with JavaScript.</p></main>
<script type="application/json" id="data">{json}</script>
<script>{library}</script>
<script type="module">{script}</script>
</body>
</html>
""".encode()


@cache
def _assets() -> tuple[str, str, str, str]:
    """Library, scripts and styles of a report, and the policy that allows just these."""
    script = "\n".join(_bundled(page_file(name).decode()) for name in MODULES)
    style = "\n".join(page_file(name).decode() for name in STYLES)
    library = page_file(LIBRARY).decode().replace("</script", "<\\/script")
    policy = (
        f"default-src 'none'; script-src '{_hash(library)}' '{_hash(script)}'; "
        f"style-src '{_hash(style)}'; img-src data:; base-uri 'none'; form-action 'none'"
    )
    return library, script, style, policy


def write_report(run_dirs: Sequence[Path], out: Path) -> list[RunView]:
    """Write a report of runs; what was read of them."""
    runs = [read_view(path) for path in run_dirs]
    write_atomic(out, render_report(runs))
    return runs


def leave_report(run_dir: Path) -> str:
    """Write the report of a run that has just ended; why it could not be, else empty."""
    try:
        write_atomic(run_dir / REPORT, render_report([read_view(run_dir, is_over=True)]))
    except Exception as error:  # noqa: BLE001 (a report must not fail a run, whatever is wrong)
        return (
            f"{run_dir / REPORT} was not written: {type(error).__name__}: {error}. "
            f"`shoal report {run_dir}` tries again."
        )
    return ""


def _bundled(module: str) -> str:
    """A module as a part of one script: all names are at its top level."""
    return _EXPORT.sub("", _IMPORT.sub("", module))


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
