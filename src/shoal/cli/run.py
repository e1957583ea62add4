"""`shoal run`: a script of one's own, on several ranks of this machine."""

import sys
from pathlib import Path
from typing import Any

import click

from shoal.cli import options
from shoal.cli.output import say, tell
from shoal.errors import UsageError
from shoal.events.events import Event, SeatEvent, TickEvent, WarningEvent
from shoal.system.streams import steady


class Echo:
    """Shows what was added to the log of rank 0 since the last time."""

    def __init__(self, logs: Path):
        self._logs = logs
        self._log: Path | None = None
        self._shown = 0
        # What an earlier life of the run left there was shown then.
        self._before = {log: log.stat().st_size for log in logs.glob("*.log")}

    def __call__(self, event: Event) -> None:
        first = self._logs / "rank-000.log"
        if self._log is None and first.exists():
            self._log, self._shown = first, self._before.get(first, 0)
        if self._log is not None:
            self._show(self._log)
        if isinstance(event, SeatEvent) and event.rank == 0:
            log = self._logs / event.log
            self._shown = self._shown if log == self._log else self._before.get(log, 0)
            self._log = log

    def _show(self, log: Path) -> None:
        try:
            with log.open("rb") as file:
                file.seek(self._shown)
                new = file.read()
        except OSError:  # it was moved away, which is reported elsewhere
            return
        self._shown += len(new)
        if new:
            with steady(1):  # all of it is in the log
                sys.stdout.buffer.write(new)
                sys.stdout.buffer.flush()


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@options.ranks
@options.run_dir
@options.spares
@options.form_timeout
@options.heartbeat_timeout
@options.stop_timeout
@click.option(
    "--resume",
    is_flag=True,
    help="Run in --run-dir, or in the script's last directory, whatever became of it there before. "
    "What to go on from is the script's: shoal.trainer(..., checkpoints=DIR, resume=True).",
)
@click.argument("script", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def run(script: Path, arguments: tuple[str, ...], **given: Any) -> None:
    """Run SCRIPT with ARGUMENTS on every rank.

    Inside, `shoal.trainer(run)` finds its place, and a lost rank is replaced by a spare that runs
    the script up to its trainer. A script that uses torch.distributed without Shoal works as under
    torchrun. What rank 0 prints is shown; each rank's output is in its log.

    \b
    shoal run --ranks 2 examples/own_loop.py
    """
    options.refuse_unusable_process()
    from shoal.storage.run_dir import RunDir
    from shoal.world import launched_world

    if (world := launched_world()) is not None:
        if given["ranks"] not in (None, world.num_ranks):
            raise UsageError(
                f"--ranks {given['ranks']}: {world.launcher} started {world.num_ranks} processes, "
                "and each of them is a rank. Leave --ranks out."
            )
        from shoal.elastic.worker import run_script

        run_script(script, arguments)
        return
    with RunDir(given["run_dir"], script.name, resume=given["resume"]) as run_dir:
        if run_dir.is_resumed and (began := run_dir.record().get("script")) != str(script):
            what = "a recipe" if began is None else f"the script {began}"
            raise UsageError(f"The run in {run_dir.path} was begun with {what}, not {script}.")
        sys.exit(_run(script, arguments, given, run_dir))


def _run(script: Path, arguments: tuple[str, ...], given: dict[str, Any], run_dir: Any) -> int:
    from shoal.cluster.local import LocalBackend
    from shoal.elastic.membership import Membership, MembershipOptions
    from shoal.elastic.worker import prepare_script
    from shoal.events.screen import Display
    from shoal.launch.supervised import run_supervised
    from shoal.world import cores

    num_ranks = given["ranks"] or cores()
    run_dir.describe(script=str(script), arguments=list(arguments), num_ranks=num_ranks)
    display = Display()
    echo = Echo(run_dir.path / "logs")

    def watch(event: Event) -> None:
        display(event)
        echo(event)
        if isinstance(event, TickEvent) and (moved := run_dir.moved()):
            display(WarningEvent(text=moved))

    outcome = run_supervised(
        lambda: prepare_script(script, arguments),
        run_dir.path,
        backend=LocalBackend(),
        watch=watch,
        members=lambda _: Membership(
            num_ranks,
            options=MembershipOptions(
                num_spares=given["spares"],
                heartbeat_timeout_s=given["heartbeat_timeout_s"],
                form_timeout_s=given["form_timeout_s"],
                scripts=True,
            ),
        ),
        stop_timeout_s=given["stop_timeout_s"],
    )
    display.close()
    echo(TickEvent())
    if outcome.exit_code:
        if outcome.trace:
            tell(outcome.trace)
        cause = outcome.cause.rstrip(".") or "the script was stopped, as asked"
        say(f"shoal: {cause}. Logs are in {run_dir.path / 'logs'}.", is_error=True)
    elif moved := run_dir.moved():
        say(f"shoal: {moved}", is_error=True)
    return int(outcome.exit_code) or int(bool(run_dir.moved()))
