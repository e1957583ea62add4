"""`shoal ui`: runs in a browser, live."""

import os
import secrets
from contextlib import suppress
from pathlib import Path

import click

from shoal.cli.output import print_json, say
from shoal.errors import UsageError, require


@click.command()
@click.argument("directory", required=False, type=click.Path(path_type=Path))
@click.option("--port", type=click.IntRange(0, 65535), help="Default: 8765, or one that is free.")
@click.option("--no-browser", is_flag=True, help="Print the address, and open no browser.")
@click.option("--control", is_flag=True, help="Runs may be stopped, saved and resized there.")
@click.option("--json", "as_json", is_flag=True, help="Print the address as one JSON object.")
def ui(
    directory: Path | None, port: int | None, no_browser: bool, control: bool, as_json: bool
) -> None:
    """Show the runs below DIRECTORY in a browser, while they go on and afterwards.

    \b
    shoal ui
    shoal ui runs/charlm-small-1 --no-browser
    shoal ui runs --port 8800 --control

    DIRECTORY is runs/ by default: a run, or a directory with runs and tuning studies in it. The
    local queue is shown as well. It listens on this machine alone, and the address has a token
    without which nothing is shown; from elsewhere, use `ssh -L`. Ctrl-C ends it. It needs the extra
    dash: pip install 'shoal-ml[dash]'. Exit codes: 0 ended, 2 no such directory, or a port that is
    taken.
    """
    for module in ("starlette", "uvicorn"):
        require(module, extra="dash")
    from shoal.ui.report import has_charts
    from shoal.ui.server import open_socket, serve

    chosen = directory or (Path("runs") if Path("runs").is_dir() else Path("."))
    if not chosen.is_dir():
        raise UsageError(f"{chosen} is no directory. Give a run's, or one that holds runs.")
    if not os.access(chosen, os.R_OK | os.X_OK):
        raise UsageError(f"{chosen} cannot be read: its mode does not let you.")
    listener = open_socket(port)
    token = secrets.token_urlsafe(24)
    found = listener.getsockname()[1]
    url = f"http://127.0.0.1:{found}/?token={token}"
    if not has_charts():
        say("shoal: the chart library is not installed: `make setup` fetches it.", is_error=True)
    if as_json:
        print_json({"url": url, "port": found, "token": token, "directory": str(chosen)})
    say(f"shoal ui: {url}", is_error=as_json)
    if not no_browser and not _open_browser(url):
        say("shoal: no browser can be opened from here; open that address.", is_error=True)
    with suppress(KeyboardInterrupt):
        serve(chosen, listener, token, can_control=control)


def _open_browser(url: str) -> bool:
    """Open a window, where there are any: a browser in this terminal would take it over."""
    import webbrowser

    has_screen = any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER"))
    return has_screen and webbrowser.open(url)
