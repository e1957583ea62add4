"""The back end of one machine: a fork server that has loaded the recipe, and its children."""

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from shoal.cluster.backend import Facts, StartedRun
from shoal.comm.endpoint import Endpoint
from shoal.comm.unix import socket_directory
from shoal.errors import ShoalError, UsageError
from shoal.events.events import OnEvent
from shoal.logs import log
from shoal.system.fork_server import (
    ForkServer,
    ForkServerReady,
    PreparationFailed,
    Prepare,
    Start,
    WorkerMain,
)
from shoal.system.processes import WAIT_PAGE, SampleWait, describe_exit, readable

FIRST_S = 30.0  # after which the user hears that a recipe is not ready; then at doubling times
LOOK_S = 1.0
TURN_S = 0.02
TAIL_BYTES = 4096  # of its output, if the process that loads a recipe dies


class NotLoaded(ShoalError):
    """The recipe could not be prepared; `trace` is its traceback, if it was its own doing."""

    def __init__(self, message: str, trace: str, exit_code: int):
        super().__init__(message)
        self.trace = trace
        self.exit_code = exit_code
        if trace:
            self.add_note(trace)


class LocalBackend:
    """Starts the processes of a run on this machine."""

    @contextmanager
    def start(self, prepare: Prepare, run_dir: Path, watch: OnEvent) -> Iterator[StartedRun]:
        with ExitStack() as held:
            sockets = held.enter_context(socket_directory(run_dir))
            output = run_dir / "logs" / "recipe.log"
            server, facts = held.enter_context(prepared_fork_server(prepare, output))
            yield StartedRun(server, facts, Endpoint(str(sockets)))


@contextmanager
def prepared_fork_server(
    prepare: Prepare,
    output: Path,
    start: Start | None = None,
    meanwhile: Callable[[], object] = lambda: None,
    turn: Callable[[], object] | None = None,
) -> Iterator[tuple[ForkServer, Facts]]:
    """A fork server that has prepared, and what it found; it ends with the block.

    `meanwhile` is done here while it prepares; then `turn`, several times a second until it has.
    """
    WAIT_PAGE.open()
    fork_server = ForkServer(partial(_prepare, prepare), output, start)
    try:
        meanwhile()
        _tell_of_wait(fork_server, turn)
        yield fork_server, await_facts(fork_server)
    finally:
        fork_server.close()
        WAIT_PAGE.close()


def _prepare(prepare: Prepare) -> tuple[Facts, WorkerMain]:
    """In the fork server; ranks, which are forked from it later, have heartbeats."""
    WAIT_PAGE.begin()
    try:
        return prepare()
    finally:
        WAIT_PAGE.end()


def _tell_of_wait(fork_server: ForkServer, turn: Callable[[], object] | None = None) -> None:
    """While the recipe is prepared, which may load samples: a source may hang, or be slow.

    A sample has its limit, as in training. What else a recipe does may take as long as it likes.
    """
    began = time.monotonic()
    next_s = FIRST_S
    while not readable([fork_server.fileno()], min(next_s, LOOK_S if turn is None else TURN_S)):
        if turn is not None:
            turn()
        now, wait = time.monotonic(), WAIT_PAGE.read()
        is_lost = wait is not None and now - wait.since_s >= wait.limit_s
        if now - began < next_s and not is_lost:
            continue
        next_s *= 2
        fork_server.dump_stack()
        if wait is not None and is_lost:
            readable([fork_server.fileno()], 0.5)  # while it writes that
            trace = _end_of(fork_server, 4 * TAIL_BYTES)  # with all of its stack
            raise NotLoaded(_lost(wait, now - wait.since_s), trace, 1)
        log.warning(
            "The recipe is not ready after %.0f s. What it does just now is at the end of "
            "logs/recipe.log in the run directory; Ctrl-C ends it.",
            now - began,
        )


def _lost(wait: SampleWait, seconds: float) -> str:
    last = wait.first + wait.num_samples - 1
    named = f"sample {last}" if wait.num_samples == 1 else f"samples {wait.first} to {last}"
    return (
        f"{named}: nothing came for {seconds:.0f} s while the recipe was prepared, which is the "
        "limit. The source, or the disk or server behind it, hangs; where it stands is above. "
        "Try such a sample by itself, and start again."
    )


def await_facts(fork_server: ForkServer) -> Facts:
    """What the preparation found."""
    try:
        report = fork_server.next_report()
    except EOFError:
        status = fork_server.close()
        hints = {
            -signal.SIGKILL: " (for want of memory, perhaps: the system's log says so then)",
            -signal.SIGILL: " (an instruction that this CPU does not have: so ends bf16 where it "
            "only says it has AMX, unless ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 is set)",
        }
        died = f"The process that loads the recipe {describe_exit(status)}{hints.get(status, '')}."
        raise NotLoaded(died, _end_of(fork_server), 1) from None
    if isinstance(report, PreparationFailed):
        raise NotLoaded(report.message, report.trace, report.exit_code)
    if not isinstance(report, ForkServerReady):
        raise UsageError("The process that loads the recipe answered out of turn.")
    return report.facts


def _end_of(fork_server: ForkServer, num_bytes: int = TAIL_BYTES) -> str:
    """The last that it wrote: its log is removed with the directory of a run that never began."""
    text = fork_server.end_of_log(num_bytes).strip()
    return f"The end of what it wrote:\n{text}\n" if text else ""
