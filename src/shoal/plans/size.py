"""The size of a run that can change while it goes on: how many replicas, how many servers.

A plan can be resized where a rank's state is held by another, or by servers; under local steps,
at the end of a window, where what a rank has learnt is in what all agreed on. The batch and its
pieces stay what they were, so that what is trained does not depend on it, but for local steps, of
which each replica takes its own.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

import msgspec

from shoal.errors import PlanError, UsageError
from shoal.plans.plan import Plan

_KEYS = ("data", "servers")


class Size(NamedTuple):
    """How many processes of each kind a run has, spares apart."""

    num_ranks: int
    num_servers: int = 0

    def server_of(self, seat: int) -> int | None:
        """The number of the server whose seat this is, after the ranks'; None if it is a rank's."""
        return None if seat < self.num_ranks else seat - self.num_ranks

    def name_of(self, seat: int) -> str:
        """For people."""
        server = self.server_of(seat)
        return f"rank {seat}" if server is None else f"server {server}"


def host_of(seat: int, size: Size, num_hosts: int) -> int:
    """Which host a seat is on: ranks that are neighbours sit together, and servers of the plan are
    dealt round; the last servers are the hosts' own. Pure."""
    server = size.server_of(seat)
    if server is None:
        return seat // (size.num_ranks // num_hosts)
    own = server - (size.num_servers - num_hosts)
    return own if own >= 0 else server % num_hosts


def size_of(plan: Plan) -> Size:
    return Size(plan.num_ranks, plan.num_serving)


def can_recover(plan: Plan, meets_every: Sequence[int] | None = None) -> bool:
    """Whether what a rank holds is held by another, or by servers; or of local steps, what a rank
    has to begin its window again.

    That needs all to meet only where windows end: after every so many steps, if that is known.
    """
    if plan.local_steps > 1 and plan.sync != "server":
        in_windows = meets_every is not None and not any(n % plan.local_steps for n in meets_every)
        return in_windows and plan.fragments == 1 and plan.num_replicas > 1
    return not plan.zero and plan.tensor == plan.pipeline == 1


def can_resize(plan: Plan) -> bool:
    """Whether a rank can come or go. Of local steps all meet where a window ends; in fragments
    there is no such step."""
    if plan.local_steps > 1:
        return plan.fragments == 1
    return plan.hosts == 1 and can_recover(plan)


def served_size(plan: Plan, size: Size) -> Size:
    """What servers are laid out for: so many of them, and under local steps so many replicas, each
    of which has one piece of a window."""
    return size if plan.local_steps > 1 else size._replace(num_ranks=0)


def of_size(plan: Plan, size: Size) -> Plan:
    """The same plan for so many ranks and servers; PlanError if they do not go with the rest."""
    # Pieces are what `accumulate` stood for when the run began.
    num_servers = size.num_servers - plan.num_host_servers
    servers = {"servers": num_servers} if plan.sync == "server" else {}
    return msgspec.structs.replace(plan, data=size.num_ranks, accumulate=1, **servers)


def resized(plan: Plan, text: str) -> Plan:
    """A resolved plan with other counts, given as `data=3 servers=2`; UsageError says why not."""
    if not can_resize(plan):
        why = "what a rank holds, no other rank does"
        if plan.fragments > 1:
            why = "its replicas agree on each fragment at another time, and never on all at once"
        elif plan.hosts > 1:
            why = "its hosts add up the gradients of the ranks that they began with"
        raise UsageError(
            f"A run under {str(plan)!r} cannot be resized: {why}. "
            "Stop it (Ctrl-C) and go on with --resume and another --plan."
        )
    asked = Plan.parse(f"{text} sync=server" if "servers" in text and "sync" not in text else text)
    words = [word.partition("=")[0] for word in text.replace(",", " ").split()]
    strange = [word for word in words if word not in _KEYS]
    if strange or not words:
        raise UsageError(
            f"{text!r} is no size. Give data=N, servers=N or both, as in 'data=3 servers=2'; "
            "another plan is for --resume."
        )
    if "servers" in words and plan.sync != "server":
        raise UsageError(f"servers={asked.servers}: this run has no servers. Give data=N alone.")
    if "data" in words and asked.data is None:
        raise UsageError("data=auto is no size for a run that goes on. Give a number.")
    size = Size(
        plan.num_ranks if asked.data is None else asked.data,
        asked.servers if "servers" in words else plan.num_servers,
    )
    if size == size_of(plan):
        raise UsageError(f"The run has that size already: {in_words(size, size)}.")
    _refuse_pieces(plan, size.num_ranks)
    _refuse_copies(plan, size)
    return of_size(plan, size)


def _refuse_pieces(plan: Plan, num_ranks: int) -> None:
    """If not every replica has pieces of the batch; of local steps, equally many."""
    pieces = plan.num_pieces
    if num_ranks > pieces:
        raise PlanError(
            f"data={num_ranks} is more than the {pieces} pieces that a batch was cut "
            "into when the run began. Each replica needs one at least. Use "
            f"data={pieces} or fewer, or begin runs that may grow with pieces=N."
        )
    if plan.local_steps > 1 and pieces % num_ranks:
        raise PlanError(
            f"data={num_ranks} does not divide the {pieces} pieces that a batch was cut into when "
            f"the run began. With local_steps={plan.local_steps} each replica trains alone and "
            "counts the same in the average, so all need equally many. "
            f"Use {_in_choice(_fitting(plan))}."
        )


def _fitting(plan: Plan) -> Iterator[int]:
    """The numbers of replicas that go with the rest of a plan of local steps."""
    for num_ranks in range(1, plan.num_pieces + 1):
        with suppress(PlanError):
            yield of_size(plan, size_of(plan)._replace(num_ranks=num_ranks)).num_replicas


def _in_choice(counts: Iterable[int]) -> str:
    *others, last = [f"data={count}" for count in counts]
    return f"{', '.join(others)} or {last}" if others else last


def _refuse_copies(plan: Plan, size: Size) -> None:
    if plan.copies > 1 and served_size(plan, size) != served_size(plan, size_of(plan)):
        counted, way_out = "the number of servers does", "Give data=N alone, or stop"
        if plan.local_steps > 1:
            counted, way_out = "numbers of replicas and servers do", "Stop"
        raise UsageError(
            f"{in_words(size_of(plan), size)}: {counted} not change under "
            f"copies={plan.copies}, whose servers keep one another's shards. {way_out} "
            "the run (Ctrl-C) and go on with --resume and another --plan."
        )


def parts_with(before: Plan, after: Plan) -> str:
    """What is lost with the replicas that leave, for people; "" where others hold it."""
    if after.local_steps == 1 or after.num_replicas >= before.num_replicas:
        return ""
    unsent = ", and what its packing had not sent yet" if after.codec != "none" else ""
    return f"The state of the optimizer of each replica that left went with it{unsent}."


def in_words(before: Size, after: Size) -> str:
    """What changes, for people."""
    told = []
    for name, old, new in zip(("data", "servers"), before, after):
        if old != new:
            told.append(f"{name} {old} -> {new}")
    return ", ".join(told) or f"data {after.num_ranks}, servers {after.num_servers}"
