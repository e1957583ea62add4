"""The size of a run that can change while it goes on: how many replicas, how many servers.

A plan can be resized where a rank's state is held by another, or by servers. The batch and its
pieces stay what they were, so that what is trained does not depend on it.
"""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from shoal.errors import PlanError, UsageError
from shoal.plan import Plan

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
    """Whether a rank can come or go. In a window of local steps it has learnt what nobody has."""
    return plan.local_steps == plan.hosts == 1 and can_recover(plan)


def of_size(plan: Plan, size: Size) -> Plan:
    """The same plan for so many ranks and servers; PlanError if they do not go with the rest."""
    # Pieces are what `accumulate` stood for when the run began.
    num_servers = size.num_servers - plan.num_host_servers
    servers = {"servers": num_servers} if plan.sync == "server" else {}
    return msgspec.structs.replace(plan, data=size.num_ranks, accumulate=1, **servers)


def resized(plan: Plan, text: str) -> Plan:
    """A resolved plan with other counts, given as `data=3 servers=2`; UsageError says why not."""
    if not can_resize(plan):
        raise UsageError(
            f"A run under {str(plan)!r} cannot be resized: what a rank holds, no other rank does. "
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
    if size.num_ranks > plan.num_pieces:
        raise PlanError(
            f"data={size.num_ranks} is more than the {plan.num_pieces} pieces that a batch was cut "
            "into when the run began. Each replica needs one at least. Use "
            f"data={plan.num_pieces} or fewer, or begin runs that may grow with pieces=N."
        )
    if plan.copies > 1 and size.num_servers != plan.num_servers:
        raise UsageError(
            f"servers={size.num_servers}: the number of servers does not change under "
            f"copies={plan.copies}, whose servers keep one another's shards. Give data=N alone, or "
            "stop the run (Ctrl-C) and go on with --resume and another --plan."
        )
    if size == size_of(plan):
        raise UsageError(f"The run has that size already: {in_words(size, size)}.")
    return of_size(plan, size)


def in_words(before: Size, after: Size) -> str:
    """What changes, for people."""
    told = []
    for name, old, new in zip(("data", "servers"), before, after):
        if old != new:
            told.append(f"{name} {old} -> {new}")
    return ", ".join(told) or f"data {after.num_ranks}, servers {after.num_servers}"
