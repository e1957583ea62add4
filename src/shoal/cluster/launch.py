"""From a command to a finished run: the nursery, then the supervisor, and nothing left behind."""

import select
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from shoal.cluster.hosts import Hosts, Listening, gathered
from shoal.cluster.invitation import withdraw
from shoal.cluster.nursery import NotPrepared, Nursery, Prepare, Prepared
from shoal.cluster.post import Farewell
from shoal.comm.reach import LOOPBACK
from shoal.elastic.membership import Membership
from shoal.elastic.resizes import open_resizes
from shoal.elastic.supervise import Outcome, Supervisor, Watch
from shoal.errors import RecipeError, ShoalError, UsageError
from shoal.logs import log
from shoal.plan import Plan

Facts = dict[str, Any]
FIRST_S = 30.0  # after which it is told that a recipe is not ready, and then at doubling times


class NotLoaded(ShoalError):
    """The recipe could not be prepared; `trace` is its traceback, if it was its own doing."""

    def __init__(self, message: str, trace: str, exit_code: int):
        super().__init__(message)
        self.trace = trace
        self.exit_code = exit_code


def launch(
    prepare: Prepare,
    run_dir: Path,
    *,
    watch: Watch,
    members: Callable[[Facts], Membership],
    prepared: Callable[[Facts], None] = lambda facts: None,
    can_resize: bool = False,
    listening: Listening | None = None,
) -> Outcome:
    """Prepare in a warm process, fork the ranks from it and supervise them to the end.

    `prepared` is told what the preparation found, before any rank starts. With `can_resize` the
    run hears requests for another size; with `listening` it waits for other hosts first. Call this
    from a process that has not started a thread.
    """
    nursery = Nursery(prepare, run_dir / "logs" / "recipe.log")
    with ExitStack() as held:
        held.callback(nursery.close)
        withdraw(run_dir)  # what one that was killed left here
        tell_of_wait(nursery)
        facts = await_facts(nursery)
        hosts: Hosts | None = None
        if listening is not None:
            hosts = held.enter_context(gathered(nursery, facts, listening, run_dir, watch))
        prepared(facts)
        resizes = None
        if can_resize:
            resizes = open_resizes(run_dir, Plan.parse(facts["plan"]), facts["alone"])
        reach = LOOPBACK if hosts is None else hosts.reach
        outcome = Supervisor(hosts or nursery, members(facts), run_dir, watch, resizes, reach).run()
        if hosts is not None:
            how = outcome.cause or f"the run ended after step {outcome.step}"
            hosts.farewell = Farewell(outcome.exit_code, how)
        return outcome


def tell_of_wait(nursery: Nursery) -> None:
    """While the recipe is prepared, which may load samples: a source may hang, or be slow."""
    waited_s, pause_s = 0.0, FIRST_S
    while not select.select([nursery], [], [], pause_s)[0]:
        waited_s += pause_s
        pause_s = waited_s
        nursery.say_where()
        log.warning(
            "The recipe is not ready after %.0f s. What it does just now is at the end of "
            "logs/recipe.log in the run directory; Ctrl-C ends it.",
            waited_s,
        )


def await_facts(nursery: Nursery) -> Facts:
    try:
        report = nursery.next_report()
    except EOFError:
        raise RecipeError(
            "The process that loads the recipe was killed (out of memory?). Its output is in "
            "logs/recipe.log of the run directory."
        ) from None
    if isinstance(report, NotPrepared):
        raise NotLoaded(report.message, report.trace, report.exit_code)
    if not isinstance(report, Prepared):
        raise UsageError("The process that loads the recipe answered out of turn.")
    return report.facts
