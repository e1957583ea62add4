"""Resize a running run: how many replicas, how many servers.

A plan can be resized if the state of a rank is also held by another rank or by servers; under local
steps, at the end of a window, when all have agreed. The batch and its pieces do not change, so the
training result does not depend on the size, except under local steps, where each replica makes its
own steps. A run on several hosts also changes its size when one is lost or comes (`size_rules`).
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

import msgspec

from shoal.errors import PlanError, UsageError
from shoal.plans.keys import HALF_CODECS
from shoal.plans.plan import Plan

_KEYS = ("data", "servers")


class RunSize(NamedTuple):
    """How many processes of each kind a run has, without spares."""

    num_ranks: int
    num_servers: int = 0

    def server_of(self, seat: int) -> int | None:
        """The server with this seat, after those of the ranks; None for the seat of a rank."""
        return None if seat < self.num_ranks else seat - self.num_ranks

    def name_of(self, seat: int) -> str:
        """The name of a seat in messages."""
        server = self.server_of(seat)
        return f"rank {seat}" if server is None else f"server {server}"


class SizeRules(NamedTuple):
    """To which sizes a plan can go when hosts come and go, and how."""

    counts: tuple[int, ...] = ()  # of ranks, ascending; empty if there is no other
    replica: int = 1  # ranks of one replica, which share a host where they can
    copies: int = 1  # of each server's shard
    # Ranks may come and go while others stay; else all begin again from the newest checkpoint.
    in_place: bool = False
    at_once: bool = False  # ranks may be dropped after any step; else all wait after one first
    repartitions: bool = False  # servers must write their state for another number of ranks

    def largest(self, most: int) -> int | None:
        """The largest number of ranks up to `most`; None if there is none."""
        return max((count for count in self.counts if count <= most), default=None)


def size_rules(plan: Plan) -> SizeRules:
    """The rules of a resolved plan. Pure."""
    counts = tuple(other.num_ranks for other in _other_sizes(plan))
    in_lockstep = plan.local_steps == 1 and (plan.sync != "server" or plan.waits_for_all)
    return SizeRules(
        counts=counts,
        replica=plan.num_ranks_apart if plan.replicas else plan.tensor * plan.pipeline,
        copies=plan.copies,
        in_place=can_resize(plan) and len(counts) > 1,
        at_once=in_lockstep,
        repartitions=plan.sync == "server" and plan.local_steps > 1,
    )


def smaller_plan(plan: Plan, num_slots: int) -> Plan | None:
    """A plan with the most replicas that fit into the slots, up to those it has, and the same
    pieces, so that results stay; None if none is legal. Pure."""
    count = size_rules(plan).largest(min(num_slots, plan.num_ranks))
    return None if count is None else with_size(plan, size_of(plan)._replace(num_ranks=count))


def _other_sizes(plan: Plan) -> Iterator[Plan]:
    """The plan with each number of replicas that its other keys allow."""
    if plan.hosts > 1:  # whose servers add up the gradients of the ranks that they began with
        return
    for data in range(1, plan.num_pieces // plan.num_microbatches + 1):
        size = size_of(plan)._replace(num_ranks=data * plan.tensor * plan.pipeline)
        with suppress(PlanError, UsageError):
            _refuse_copies(plan, size)
            yield with_size(plan, size)


def host_of(seat: int, size: RunSize, num_hosts: int) -> int:
    """The host of a seat: neighbouring ranks share a host, the plan's servers are spread over the
    hosts in turn, and the last servers are the hosts' own. Pure."""
    server = size.server_of(seat)
    if server is None:
        return seat // (size.num_ranks // num_hosts)
    own = server - (size.num_servers - num_hosts)
    return own if own >= 0 else server % num_hosts


def size_of(plan: Plan) -> RunSize:
    return RunSize(plan.num_ranks, plan.num_serving)


def can_recover(plan: Plan, meets_every: Sequence[int] | None = None, shares: bool = False) -> bool:
    """Whether a rank's state is also held by another rank or by servers; under local steps, enough
    of it to repeat the window. `shares`: ranks of one host hold it together where the plan does.

    Local steps need all ranks to meet only at the end of windows: `meets_every` so many steps.
    """
    if plan.is_loose and plan.num_ranks_apart > 1:
        return False  # the ranks of a replica need one another
    if plan.local_steps > 1 and plan.sync != "server":
        in_windows = meets_every is not None and not any(n % plan.local_steps for n in meets_every)
        return in_windows and plan.fragments == 1 and plan.num_replicas > 1
    is_held = not plan.zero or (shares and plan.shares)
    return is_held and plan.tensor == plan.pipeline == 1


def can_resize(plan: Plan) -> bool:
    """Whether a rank can join or leave. Under local steps all meet at the end of a window; with
    fragments there is no such step. A replica of several ranks cannot."""
    if plan.local_steps > 1:
        return plan.fragments == 1 and plan.num_ranks_apart == 1
    return plan.hosts == 1 and can_recover(plan)


def served_size(plan: Plan, size: RunSize) -> RunSize:
    """The size that the servers' layout depends on: servers, and under local steps replicas, which
    push one piece of a window each."""
    return size if plan.local_steps > 1 else size._replace(num_ranks=0)


def with_size(plan: Plan, size: RunSize) -> Plan:
    """The same plan with another size; PlanError if it does not fit the rest of the plan."""
    # Pieces are what `accumulate` stood for when the run began.
    num_servers = size.num_servers - plan.num_host_servers
    servers = {"servers": num_servers} if plan.sync == "server" else {}
    data = size.num_ranks // (plan.tensor * plan.pipeline)
    # A replica keeps its ranks.
    replicas = None if plan.replicas is None else max(1, data // plan.num_within)
    return msgspec.structs.replace(plan, data=data, replicas=replicas, accumulate=1, **servers)


def resize_plan(plan: Plan, text: str) -> Plan:
    """A resolved plan with other counts, given as `data=3 servers=2`; UsageError says why not."""
    if not can_resize(plan):
        why = "what a rank holds, no other rank does"
        if plan.is_loose and plan.num_ranks_apart > 1:
            why = "the ranks of a replica need one another in every step"
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
        raise UsageError("data=auto is no size for a run under way. Give a number.")
    size = RunSize(
        plan.num_ranks if asked.data is None else asked.data,
        asked.servers if "servers" in words else plan.num_servers,
    )
    if size == size_of(plan):
        raise UsageError(f"The run has that size already: {describe_change(size, size)}.")
    _refuse_pieces(plan, size.num_ranks)
    _refuse_copies(plan, size)
    return with_size(plan, size)


def _refuse_pieces(plan: Plan, num_ranks: int) -> None:
    """Refuse a size under which a replica has no piece; under local steps, uneven pieces."""
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
    """The numbers of replicas that fit the rest of a plan with local steps."""
    for num_ranks in range(1, plan.num_pieces + 1):
        with suppress(PlanError):
            yield with_size(plan, size_of(plan)._replace(num_ranks=num_ranks)).num_replicas


def _in_choice(counts: Iterable[int]) -> str:
    *others, last = [f"data={count}" for count in counts]
    return f"{', '.join(others)} or {last}" if others else last


def _refuse_copies(plan: Plan, size: RunSize) -> None:
    if plan.copies > 1 and served_size(plan, size) != served_size(plan, size_of(plan)):
        counted, way_out = "the number of servers does", "Give data=N alone, or stop"
        if plan.local_steps > 1:
            counted, way_out = "numbers of replicas and servers do", "Stop"
        raise UsageError(
            f"{describe_change(size_of(plan), size)}: {counted} not change under "
            f"copies={plan.copies}, whose servers keep one another's shards. {way_out} "
            "the run (Ctrl-C) and go on with --resume and another --plan."
        )


def describe_lost_state(before: Plan, after: Plan) -> str:
    """What is lost with replicas that leave, as a message; empty if others hold it."""
    if after.num_replicas >= before.num_replicas:
        return ""
    if after.local_steps == 1:
        keeps = after.codec not in ("none", *HALF_CODECS)
        what = f"What codec={after.codec} had not sent of the gradients of each replica that left"
        return f"{what} went with it." if keeps else ""
    unsent = ", and what its packing had not sent yet" if after.codec != "none" else ""
    return f"The state of the optimizer of each replica that left went with it{unsent}."


def describe_change(before: RunSize, after: RunSize, replica: int = 1) -> str:
    """The change of size, as a message; `replica` is the number of ranks of one."""
    pairs = zip(("data", "servers"), before, after, (replica, 1))
    changes = [f"{name} {old // u} -> {new // u}" for name, old, new, u in pairs if old != new]
    return ", ".join(changes) or f"data {after.num_ranks // replica}, servers {after.num_servers}"
