"""One step of a plan, action by action: who computes when, who waits for whom.

Every replica runs its rounds through the stages in production's own order
(`parallel/pipeline/schedules.py`); an action begins when its rank is free and what it works on has
come. All replicas, and all draws of how slow each rank is, run at once as arrays, so ten thousand
ranks cost as many operations as one replica has actions. Replicas in lockstep then wait for the
slowest, exchange and update; those on servers with a bound run against production's clock
(`sync/server/clock.py`), each at its own speed.

Pure. A send keeps no rank busy, and messages do not disturb each other. Read next: `simulate.py`,
which makes many steps of it.
"""

from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shoal.cost.prediction import StageTimes, StepTimes
from shoal.cost.round_times import action_seconds, order_of
from shoal.data.balance import LoadBalancer, can_balance
from shoal.data.split import shares
from shoal.parallel.pipeline.schedules import Action, ActionKind, in_turn
from shoal.plans.plan import Plan
from shoal.sync.server.clock import Clock, Staleness

Array = NDArray[np.float64]

_MOST_PUSHES = 200_000  # of workers out of lockstep, in one simulation
_MOST_BATCHES = 64  # of the same
_STEADY = 6  # steps without a move after which work stays where it is


class Span(NamedTuple):
    """A rank is busy with something, from and to, in seconds of the step."""

    rank: int
    what: str  # forward, backward, weight, load, wait, exchange, update
    start_s: float
    stop_s: float
    microbatch: int = -1


class Slowness(NamedTuple):
    """How many times as long as predicted each rank takes: by draw, replica and pipeline rank, and
    the same of its messages."""

    compute: Array
    links: Array


class Pace(NamedTuple):
    """What a step takes while nothing changes, at the mean over the draws."""

    step_s: float
    bubble: float  # of the time of rounds, in which a pipeline rank waits for its neighbours
    waiting: float  # of the time of steps, in which ranks wait for slower replicas
    counts: tuple[int, ...]  # rounds of each replica
    settling_s: tuple[float, ...] = ()  # the first steps, before work had moved to fast replicas
    staleness: Staleness | None = None


class _Rounds(NamedTuple):
    """One round of every replica: when each pipeline rank is done, and how long it was busy."""

    span_s: Array  # by draw and replica
    busy_s: Array
    spans: list[Span]


def pace_of(plan: Plan, times: StepTimes, slow: Slowness) -> Pace:
    """The steady pace of a plan whose ranks are so slow; what moves work moves it first."""
    rounds = _run_rounds(plan, times, slow)
    bubble = 1 - float(rounds.busy_s.sum() / (rounds.span_s.sum() * plan.pipeline))
    extra_s = _after_rounds_s(times, slow)
    if not plan.waits_for_all and plan.local_steps == 1:
        return _out_of_lockstep(plan, times, rounds.span_s + 0.0, extra_s, bubble)
    num_rounds = plan.num_pieces // plan.num_microbatches
    counts = [len(own) for own in shares(num_rounds, plan.num_replicas)]
    settling: list[float] = []
    if can_balance(plan):
        counts, settling = _balance(rounds.span_s, counts, times.data_s + extra_s)
    own_s = rounds.span_s * np.array(counts)
    longest_s = _closing_s(plan, own_s)
    step_s = float(longest_s.mean()) + times.data_s + extra_s
    waited_s = float(np.maximum(0.0, longest_s[:, None] - own_s).mean())
    return Pace(step_s, bubble, waited_s / step_s, tuple(counts), tuple(settling))


def gantt(plan: Plan, times: StepTimes, slow: Slowness, pace: Pace) -> list[Span]:
    """The spans of one step, of the first draw: every rank of its first and its slowest replica."""
    first = Slowness(slow.compute[:1], slow.links[:1])
    spans_s = _run_rounds(plan, times, first).span_s[0] * np.array(pace.counts)
    slowest, fastest = int(spans_s.argmax()), int(spans_s.argmin())
    drawn: list[Span] = []
    for replica in dict.fromkeys((fastest, slowest)):
        drawn += _replica_spans(plan, times, first, replica, pace.counts, float(spans_s.max()))
    return drawn


def _replica_spans(
    plan: Plan,
    times: StepTimes,
    slow: Slowness,
    replica: int,
    counts: Sequence[int],
    longest_s: float,
) -> list[Span]:
    own = Slowness(slow.compute[:, [replica]], slow.links[:, [replica]])
    found = _run_rounds(plan, times, own)
    span_s, ranks = float(found.span_s[0, 0]), range(plan.pipeline)
    number = [(p * plan.num_replicas + replica) * plan.tensor for p in ranks]  # the mesh's order
    spans = [Span(rank, "load", 0.0, times.data_s) for rank in number if times.data_s]
    for turn in range(counts[replica]):
        begun = times.data_s + turn * span_s
        spans += [
            Span(number[s.rank], s.what, begun + s.start_s, begun + s.stop_s, s.microbatch)
            for s in found.spans
        ]
    done, all_done = times.data_s + counts[replica] * span_s, times.data_s + longest_s
    sent = all_done + _after_rounds_s(times, slow) - times.update_s
    for rank in number:
        spans.append(Span(rank, "wait", done, all_done))
        spans.append(Span(rank, "exchange", all_done, sent))
        spans.append(Span(rank, "update", sent, sent + times.update_s))
    return [span for span in spans if span.stop_s > span.start_s]


def _after_rounds_s(times: StepTimes, slow: Slowness) -> float:
    """What follows the rounds: the exchange that backward did not hide, agreement, update."""
    link = float(slow.links.max())
    return max(0.0, times.exchange_s * link - times.hidden_s) + times.agreement_s + times.update_s


def _closing_s(plan: Plan, own_s: Array) -> Array:
    """When the replicas of a step stop waiting: the last has come, or the deadline has."""
    last: Array = own_s.max(axis=1)
    if plan.deadline_s is None:
        return last
    per_step = plan.deadline_s / plan.local_steps
    closed: Array = np.minimum(last, own_s.min(axis=1) + per_step)
    return closed


def _run_rounds(plan: Plan, times: StepTimes, slow: Slowness) -> _Rounds:
    """One round of the pipeline of every replica, in production's order of actions."""
    zero = np.zeros(slow.compute.shape[:2])
    free, busy = [zero] * plan.pipeline, [zero] * plan.pipeline
    done: dict[tuple[bool, int, int], Array] = {}
    spans: list[Span] = []
    for rank, action in in_turn(order_of(plan)):
        lasts = action_seconds(action, times.stages) * slow.compute[:, :, rank]
        start = np.maximum(free[rank], _input_at(times.stages, action, rank, slow.links, done))
        free[rank], busy[rank] = start + lasts, busy[rank] + lasts
        if action.kind != ActionKind.WEIGHT:
            is_forward = action.kind == ActionKind.FORWARD
            done[is_forward, action.stage, action.microbatch] = free[rank]
        begun, ended = float(start.flat[0]), float(free[rank].flat[0])
        spans.append(Span(rank, _WHAT[action.kind], begun, ended, action.microbatch))
    return _Rounds(np.maximum.reduce(free), sum(busy, zero), spans)


_WHAT = {
    ActionKind.FORWARD: "forward",
    ActionKind.BACKWARD: "backward",
    ActionKind.INPUT: "backward",
    ActionKind.WEIGHT: "weight",
}


def _input_at(
    stages: Sequence[StageTimes],
    action: Action,
    rank: int,
    links: Array,
    done: dict[tuple[bool, int, int], Array],
) -> Array | float:
    """When what an action works on is on its rank; what it made itself, it has."""
    is_forward = action.kind == ActionKind.FORWARD
    sender = action.stage - 1 if is_forward else action.stage + 1
    if action.kind == ActionKind.WEIGHT or not 0 <= sender < len(stages):
        return 0.0
    made = done[is_forward, sender, action.microbatch]
    other = stages[sender].rank
    if other == rank:
        return made
    takes_s = stages[sender].send_s if is_forward else stages[sender].send_back_s
    return made + takes_s * np.maximum(links[:, :, other], links[:, :, rank])


def _balance(span_s: Array, counts: list[int], extra_s: float) -> tuple[list[int], list[float]]:
    """Steps one by one, until production's balancer has moved what it will."""
    balancer = LoadBalancer(sum(counts), len(counts))
    taken: list[float] = []
    quiet = step = 0
    while quiet < _STEADY:
        busy_s = span_s[step % len(span_s)] * np.array(balancer.counts)
        taken.append(float(busy_s.max()) + extra_s)
        quiet = quiet + 1 if balancer.observe(busy_s.tolist()) is None else 0
        step += 1
    return balancer.counts, taken[:-quiet]


def _out_of_lockstep(
    plan: Plan, times: StepTimes, span_s: Array, extra_s: float, bubble: float
) -> Pace:
    """Workers that push to servers and begin what the clock allows them, until a horizon."""
    own, within = shares(plan.num_pieces, plan.num_apart), plan.num_within
    counts = [len(pieces) // (plan.num_microbatches * within) for pieces in own]
    span_s = span_s.reshape(len(span_s), plan.num_apart, within).max(axis=2)  # who is slowest
    batch_s = span_s * np.array(counts) + times.data_s + extra_s
    num_batches = max(4, min(_MOST_BATCHES, _MOST_PUSHES // plan.num_apart))
    horizon = max(num_batches * float(np.median(batch_s)), 8 * float(batch_s.max()))
    clock, stale = Clock(plan.num_pieces, plan.staleness_bound), Staleness()
    begun = [0] * len(own)  # the batch that each worker is at
    due = [(float(batch_s[0, worker]), worker) for worker in range(len(own))]
    heapify(due)
    held: list[tuple[int, int]] = []  # workers that the clock holds, by their batch
    pushes: list[list[float]] = [[] for _ in own]
    while due and due[0][0] < horizon:
        now, worker = heappop(due)
        clock.apply(begun[worker], own[worker])
        pushes[worker].append(now)
        begun[worker] += 1
        heappush(held, (begun[worker], worker))
        while held and clock.may_begin(held[0][0]):
            batch, free = heappop(held)
            stale.add(batch - clock.committed)
            heappush(due, (now + float(batch_s[batch % len(batch_s), free]), free))
    speeds = [_speed(times_s) for times_s in pushes]
    if clock.bound is not None:  # a head start is used up some time
        speeds = [min(speeds)] * len(speeds)
    step_s = plan.num_pieces / sum(v * len(pieces) for v, pieces in zip(speeds, own, strict=True))
    busy = batch_s.mean(axis=0) * np.array(speeds)
    waiting = max(0.0, 1 - float(busy.mean()))
    of_ranks = tuple(count for count in counts for _ in range(within))
    return Pace(step_s, bubble, waiting, of_ranks, (), stale)


def _speed(pushes: Sequence[float]) -> float:
    """Pushes a second, without the head start that the first ones have."""
    half = pushes[len(pushes) // 2 - 1 :] if len(pushes) > 3 else pushes
    return (len(half) - 1) / (half[-1] - half[0])
