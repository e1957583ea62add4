"""All legal plans for a run and a number of ranks, ranked by the time that is predicted for them.

Whether a plan is legal is asked of those who refuse it in a run: `Plan` with the rules between its
keys (`plans/rules.py`), `admit` (`training/run.py:resolve`, which fits it to ranks and batch) and
`estimate` (`predict.py`, which says whether the model can be cut so). What is not tried, because it
cannot win or because there would be no end, is left out by a named rule of `RULES`.

Plans that train the same as one process come first. Those that train something else (stale
gradients, local steps, lossy codecs, another precision) come after them and are never chosen
unasked. Nothing here depends on a limit of memory but the last question, who fits: so a larger
limit never removes a plan. Cost: an estimate for each plan, some hundreds for 64 ranks.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from shoal.cost.prediction import Prediction
from shoal.errors import PlanError, UsageError
from shoal.formatting import in_seconds, in_units
from shoal.plans.keys import ROUNDING_CODECS
from shoal.plans.plan import Plan

ALIKE = 0.005  # of a step: plans that differ by less are as fast
MOST_OPEN = 16  # devices of which fewer may be used
MOST_RANKS = 10_000  # where each is, and on which host, is asked for every plan
RULES = {
    "ranks": f"more than {MOST_OPEN} devices are all used unless --ranks says otherwise; of fewer, "
    "1, 2, 4, ... and all are tried.",
    "axes": "tensor, pipeline and data are divisors of the ranks.",
    "tensor-inside": "tensor stays inside a host that has several devices: each layer waits for "
    "its messages.",
    "gpipe": "gpipe is left out: it waits as long as 1f1b and holds more activations.",
    "microbatches": "a pipeline takes 1, 2 or 4 microbatches for each of its ranks.",
    "rounds": "accumulate is left out with a pipeline, whose microbatches do the same with less "
    "waiting; else it is 1, 2, 4 or 8.",
    "schedule-first": "schedules are compared with 2 microbatches a rank; the fastest is tried "
    "with 1 and 4, and it and the one that holds least meet zero, recompute and offload.",
    "hopeless": "axes whose first plan takes more than twice as long as one that holds no more, "
    "give or take a tenth, are not tried further.",
    "savers": "recompute and offload are tried alone and together; with zero, whose state offload "
    "finds smaller, and with sums=ring, together or not at all.",
    "ring": "sums=ring is tried where exact sums are not an all-reduce already: for more than two "
    "pieces.",
    "servers": "servers are as many as 1, 4, 16, ... up to the replicas, in lockstep and with "
    "staleness 1 and any.",
    "local-steps": "local_steps is 8 or 64, averaged or with outer=nesterov, which codecs pack "
    "where a replica is one rank; replicas are as many as data, or as hosts with zero from 0 to 3.",
    "codecs": "topk keeps a hundredth, powersgd has rank 4.",
    "memory": "memory=apart is tried with one piece a rank; it never takes less than shared.",
    "measured": "bucket, and what auto stands for, are measured in the first steps of a run.",
    "precision": "another precision is tried on plans that no other beats in both time and memory.",
    "against-faults": "copies, combine, damping, rates, deadline and fragments are left out: they "
    "answer faults and stragglers, which a prediction does not know.",
}
CODECS = (*ROUNDING_CODECS, "onebit", "topk:0.01", "powersgd:4")
PRECISIONS = ("fp32", "bf16", "fp16")
LOCAL_STEPS = (8, 64)
# What of a plan decides what is trained; other keys change the last bits at most.
DECIDES = (
    *("staleness", "combine", "damping", "rates", "deadline"),
    *("replicas", "local_steps", "outer", "fragments", "codec", "precision"),
)
_SAVERS: tuple[dict[str, str], ...] = (
    {},
    {"recompute": "blocks"},
    {"offload": "optimizer"},
    {"recompute": "blocks", "offload": "optimizer"},
)
_SCHEDULES = (
    ("1f1b", None),
    ("interleaved", None),
    ("interleaved", 4),
    ("zero-bubble", None),
    ("zbv", None),
)

Keys = Mapping[str, Any]
Admit = Callable[[Plan, int], Plan]  # the plan on so many ranks with all counts fixed
Estimate = Callable[[Plan], Prediction]


class SearchSpace(NamedTuple):
    """What is searched: `ranks` are the counts to try, `base` is the recipe's own plan, whose keys
    that decide what is trained are kept."""

    ranks: Sequence[int]
    base: Plan
    host_devices: int = 1
    num_hosts: int = 1


class RankedPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A plan with what is predicted of it; `reason` is why it is first, or why it loses."""

    plan: str
    num_ranks: int
    step_s: float
    total_s: float  # to the sample count
    memory_bytes: int  # of the rank that holds most
    bytes_sent: int  # in a step, by the rank that sends most
    changes_result: bool
    reason: str
    prediction: Prediction


class SearchResult(msgspec.Struct, frozen=True, kw_only=True):
    """`plans` fit and are in order: those that change nothing about the result, then the others,
    each by time. `too_large` do not fit, the nearest first."""

    plans: list[RankedPlan]
    too_large: list[RankedPlan]
    num_tried: int
    num_illegal: int
    first_refusal: str  # of those that are not legal; empty if all are

    @property
    def best(self) -> RankedPlan | None:
        """The fastest plan that trains what one process would."""
        return next((plan for plan in self.plans if not plan.changes_result), None)


class _Tried(NamedTuple):
    text: str
    plan: Plan
    found: Prediction


class _Search:
    """Plans that were tried, each once, and how many were not legal."""

    def __init__(self, space: SearchSpace, admit: Admit, estimate: Estimate):
        self.space = space
        self.tried: dict[str, _Tried] = {}
        self.num_illegal = 0
        self.first_refusal = ""
        self._admit, self._estimate = admit, estimate

    def attempt(self, ranks: int, *keys: Keys) -> _Tried | None:
        """Judge a plan; None if it is not legal."""
        base = {key: getattr(self.space.base, key) for key in DECIDES}
        merged = {k: v for part in (base, *keys) for k, v in part.items()}
        try:
            plan = Plan(**merged)
            text = str(plan) or "data=1"
            if text not in self.tried:
                resolved = self._admit(plan, ranks)
                self.tried[text] = _Tried(text, resolved, self._estimate(resolved))
        except PlanError as error:
            self.num_illegal += 1
            self.first_refusal = self.first_refusal or str(error)
            return None
        return self.tried[text]

    def is_hopeless(self, one: _Tried) -> bool:
        """Whether a plan holds about as much as one that takes less than half of its time."""
        step_s, peak = one.found.step_s, one.found.memory.peak
        return any(
            2 * t.found.step_s < step_s and t.found.memory.peak <= 1.1 * peak
            for t in self.tried.values()
        )


def search(
    space: SearchSpace,
    admit: Admit,
    estimate: Estimate,
    *,
    num_steps: int = 1,
    memory_bytes: int | None = None,
) -> SearchResult:
    """Try the plans of a space and rank them. `memory_bytes` is the most that a rank may hold."""
    every = _Search(space, admit, estimate)
    for ranks in space.ranks:
        cuts = sorted(axes(ranks, space.host_devices), key=lambda axis: -axis[0])
        for data, tensor, pipeline in cuts:
            keys = {"data": data, "tensor": tensor, "pipeline": pipeline}
            (_cut if pipeline > 1 else _whole)(every, ranks, keys)
            if tensor * pipeline == 1:
                _through_servers(every, ranks, keys)
                for codec in CODECS:
                    every.attempt(ranks, keys, {"codec": codec})
            _apart(every, ranks, keys)
    _in_other_precisions(every)
    return _ranked(every, num_steps, memory_bytes)


# ---- what is tried


def divisors(number: int) -> list[int]:
    return [count for count in range(1, number + 1) if number % count == 0]


def rank_counts(asked: int | None, most: int) -> list[int]:
    """Those asked for; where that is open the powers of two and all devices, of many devices all.
    UsageError if they are more than a search takes."""
    count = most if asked is None else asked
    if count > MOST_RANKS:
        raise UsageError(
            f"Plans are searched for up to {MOST_RANKS:,} ranks, and there would be {count:,}. Say "
            f"with --ranks how many, {MOST_RANKS} or fewer."
        )
    if asked is not None:
        return [asked]
    if most > MOST_OPEN:
        return [most]
    return sorted({1 << n for n in range(most.bit_length())} | {most})


def axes(ranks: int, host_devices: int) -> Iterator[tuple[int, int, int]]:
    """data, tensor and pipeline; their product is the ranks."""
    most_tensor = host_devices if host_devices > 1 else ranks
    for tensor in divisors(ranks):
        if tensor <= most_tensor:
            for pipeline in divisors(ranks // tensor):
                yield ranks // tensor // pipeline, tensor, pipeline


def _whole(every: _Search, ranks: int, keys: Keys) -> None:
    """A replica is not cut into stages."""
    if keys["data"] > 1 and keys["tensor"] == 1:
        every.attempt(ranks, keys, {"memory": "apart"})
    for accumulate in (1, 2, 4, 8):
        counted = {**keys, "accumulate": accumulate}
        first = every.attempt(ranks, counted)
        if first is None or every.is_hopeless(first):
            break  # more pieces do not divide the batch either, or the model cannot be cut so
        _vary(every, ranks, counted)
        if keys["data"] * accumulate > 2:
            for saver in (_SAVERS[0], _SAVERS[-1]):
                every.attempt(ranks, counted, saver, {"sums": "ring"})


def _cut(every: _Search, ranks: int, keys: Keys) -> None:
    """A replica is a pipeline."""
    found: list[tuple[_Tried, Keys]] = []

    def order(schedule: str, stages: int | None, microbatches: int | None) -> None:
        own = {"schedule": schedule, "stages": stages, "microbatches": microbatches}
        if (tried := every.attempt(ranks, keys, own)) is not None:
            found.append((tried, own))

    for schedule, stages in _SCHEDULES:
        order(schedule, stages, None)
        if found and every.is_hopeless(found[0][0]):
            return
    if not found:
        order("1f1b", None, keys["pipeline"])  # where twice as many do not divide the batch
    if not found:
        return
    _, fastest = min(found, key=lambda pair: pair[0].found.step_s)
    for each in (1, 4):
        order(fastest["schedule"], fastest["stages"], each * keys["pipeline"])
    by_time = min(found, key=lambda pair: pair[0].found.step_s)
    by_memory = min(found, key=lambda pair: pair[0].found.memory.peak)
    for tried, own in {by_time[0].text: by_time, by_memory[0].text: by_memory}.values():
        if not every.is_hopeless(tried):
            _vary(every, ranks, {**keys, **own})


def _vary(every: _Search, ranks: int, keys: Keys) -> None:
    """With what saves memory."""
    for saver in _SAVERS:
        every.attempt(ranks, keys, saver)
    for saver in (_SAVERS[0], _SAVERS[-1]):
        for zero in (1, 2, 3) if keys["data"] > 1 else ():
            every.attempt(ranks, keys, saver, {"zero": zero})


def _through_servers(every: _Search, ranks: int, keys: Keys) -> None:
    hosts = every.space.num_hosts
    for servers in (4**n for n in range(4) if 4**n <= ranks):
        own = {**keys, "sync": "server", "servers": servers}
        if every.attempt(ranks, own) is None:
            return
        if hosts > 1:
            every.attempt(ranks, own, {"hosts": hosts})
        for staleness in (0, 1, "any"):
            for codec in ("none", *CODECS):
                every.attempt(ranks, own, {"staleness": staleness, "codec": codec})


def _apart(every: _Search, ranks: int, keys: Keys) -> None:
    """Replicas that make local steps: one for each of data, or one for each host."""
    codecs = ("none", *CODECS) if keys["tensor"] * keys["pipeline"] == 1 else ("none",)
    for local_steps in LOCAL_STEPS:
        own = {**keys, "local_steps": local_steps}
        if every.attempt(ranks, own) is None:
            return
        for codec in codecs:
            every.attempt(ranks, own, {"outer": "nesterov", "codec": codec})
        if 1 < every.space.num_hosts < keys["data"]:
            for zero in range(4):
                every.attempt(ranks, own, {"replicas": every.space.num_hosts, "zero": zero})


def _in_other_precisions(every: _Search) -> None:
    same = [tried for tried in every.tried.values() if not changed_keys(tried.plan, every.space)]
    for tried in front(same):
        keys = msgspec.structs.asdict(Plan.parse(tried.text))
        for precision in PRECISIONS:
            every.attempt(tried.plan.num_ranks, keys, {"precision": precision})


def front(plans: Iterable[_Tried]) -> list[_Tried]:
    """Those that no other beats in both time and memory."""
    kept: list[_Tried] = []
    for one in sorted(plans, key=lambda t: (t.found.step_s, t.found.memory.peak)):
        if not kept or one.found.memory.peak < kept[-1].found.memory.peak:
            kept.append(one)
    return kept


# ---- who wins, and why the others lose


def changed_keys(plan: Plan, space: SearchSpace) -> list[str]:
    """What of a plan trains something else than the recipe's own plan does."""
    return [k for k in DECIDES if getattr(plan, k) != getattr(space.base, k)]


def _ranked(every: _Search, num_steps: int, memory_bytes: int | None) -> SearchResult:
    by_time = sorted(every.tried.values(), key=lambda t: (t.found.step_s, len(t.text), t.text))
    over = {tried.text: excess(tried.found, memory_bytes) for tried in by_time}
    fitting = [tried for tried in by_time if over[tried.text] <= 0]
    same = [tried for tried in fitting if not changed_keys(tried.plan, every.space)]
    other = [tried for tried in fitting if changed_keys(tried.plan, every.space)]

    def row(tried: _Tried, reason: str) -> RankedPlan:
        return RankedPlan(
            plan=tried.text,
            num_ranks=tried.plan.num_ranks,
            step_s=tried.found.step_s,
            total_s=tried.found.step_s * num_steps,
            memory_bytes=tried.found.memory.peak,
            bytes_sent=tried.found.bytes_sent,
            changes_result=bool(changed_keys(tried.plan, every.space)),
            reason=reason,
            prediction=tried.found,
        )

    first = f"the fastest of {len(same)} that train the same"
    plans = [row(t, first if t is same[0] else why_it_loses(t.found, same[0].found)) for t in same]
    for tried in other:
        told = ", ".join(
            f"{k}={getattr(tried.plan, k)}" for k in changed_keys(tried.plan, every.space)
        )
        against = (
            why_it_loses(tried.found, same[0].found)
            if same
            else "no plan that trains the same fits"
        )
        plans.append(row(tried, f"trains something else ({told}); {against}"))
    too_large = [row(t, _too_large(t.found, memory_bytes)) for t in by_time if over[t.text] > 0]
    too_large.sort(key=lambda one: over[one.plan])
    return SearchResult(
        plans=plans,
        too_large=too_large,
        num_tried=len(every.tried),
        num_illegal=every.num_illegal,
        first_refusal=every.first_refusal,
    )


def excess(found: Prediction, memory_bytes: int | None) -> int:
    """By how many bytes a plan does not fit; 0 or less if it does."""
    over = found.host_bytes - found.host_limit_bytes
    if memory_bytes is not None:
        over = max(over, found.memory.peak - memory_bytes, found.server_bytes - memory_bytes)
    return over


def _too_large(found: Prediction, memory_bytes: int | None) -> str:
    largest = max(found.memory.peak, found.server_bytes)
    if memory_bytes is not None and largest > memory_bytes:
        who = "a rank" if largest == found.memory.peak else "a server"
        return (
            f"does not fit: {who} holds {in_units(largest)}, {in_units(largest - memory_bytes)} "
            f"more than {in_units(memory_bytes)}"
        )
    over = found.host_bytes - found.host_limit_bytes
    return (
        f"does not fit: the processes of a host hold {in_units(found.host_bytes)}, "
        f"{in_units(over)} more than it has"
    )


def why_it_loses(found: Prediction, best: Prediction) -> str:
    """In a few words: how much slower than the best, and in which parts of a step."""
    share = found.step_s / best.step_s - 1
    parts = {
        "computes": found.time.compute - best.time.compute,
        "exchanges": found.time.exchange - best.time.exchange,
        "waits for stages": found.time.waiting - best.time.waiting,
        "updates": found.time.update - best.time.update,
        "loads": found.time.data - best.time.data,
    }
    if share < -ALIKE:
        gained = min(parts, key=lambda name: parts[name])
        return f"{-share:.0%} faster: {gained} {in_seconds(-parts[gained])} less"
    if share < ALIKE:
        more = found.memory.peak - best.memory.peak
        held = f"holds {in_units(abs(more))} {'more' if more > 0 else 'less'}"
        return f"as fast within {ALIKE:.1%}, {held if more else 'and holds as much'}"
    worst = sorted(
        (n for n in parts if parts[n] > 0.1 * (found.step_s - best.step_s)),
        key=lambda name: -parts[name],
    )[:2]
    told = ", ".join(f"{name} {in_seconds(parts[name])} longer" for name in worst)
    return f"{share:.0%} slower: {told}"
