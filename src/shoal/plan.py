"""How a run is spread: one line of text, known to be sound before a process starts.

A `Plan` is a frozen record that parses from `key=value` words and prints as them, defaults left
out. `Plan(...)` and `Plan.parse` refuse values out of range and keys that contradict each other or
would do nothing; `resolve` then fixes what depends on the machine and the batch. All of it is
arithmetic on small numbers, without torch, so a command line can refuse a plan in milliseconds.

Not the place for rules that need the model (heads that a tensor axis must divide): those belong to
the module that cuts the model. Read `mesh` next, which turns a resolved plan into axes.
"""

import math
from collections.abc import Callable, Iterable
from typing import Literal, NamedTuple, Self

import msgspec

from shoal.errors import PlanError, nearest
from shoal.plan_fit import Counts, fit, refuse_pieces
from shoal.plan_keys import KEYS, NOT_YET, Value


class Need(NamedTuple):
    """When a key does something. `without` completes the sentence "... has no effect ..."."""

    met: Callable[["Plan"], bool]
    without: str
    way_out: str


class Plan(msgspec.Struct, frozen=True):
    """How a run is spread. Its fields are the keys of its text; `KEYS` says what each one means."""

    data: int | None = None  # None is `auto`, which `resolve` replaces
    tensor: int = 1
    pipeline: int = 1
    zero: int = 0
    schedule: str = "1f1b"
    microbatches: int | None = None  # None: `num_microbatches`
    stages: int | None = None  # None: `num_stages`
    sync: str = "allreduce"
    servers: int = 1
    staleness: int | Literal["any"] = 0
    copies: int = 1
    local_steps: int = 1
    outer: str = "average"
    sums: str = "exact"
    codec: str = "none"
    precision: str = "fp32"
    accumulate: int = 1
    pieces: int | None = None  # None until `resolve` fixes it
    recompute: str = "none"
    offload: str = "none"

    def __post_init__(self) -> None:
        changed = _changed(self)
        for key in changed:
            canonical = _read(key, str(getattr(self, key)))
            msgspec.structs.force_setattr(self, key, canonical)
        _refuse_without_effect(self, changed)
        _refuse_contradictions(self)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `key=value` words, separated by spaces or commas."""
        written: dict[str, Value] = {}
        for word in text.replace(",", " ").split():
            key, equals, value = word.partition("=")
            if not equals or not key or not value:
                raise PlanError(
                    f"{word!r} in the plan {text!r} is not key=value. A plan is words such as "
                    "data=2, separated by spaces or commas, with no space around the '='."
                )
            if key not in KEYS:
                raise PlanError(f"The plan has no key {key!r}. {nearest(key, KEYS)}")
            if key in written:
                raise PlanError(
                    f"{key} is given twice in the plan {text!r}. Each key may be given once; "
                    f"leave one {key} out."
                )
            written[key] = _read(key, value)
        plan: Self = msgspec.convert(written, cls)
        _refuse_without_effect(plan, written)
        return plan

    def __str__(self) -> str:
        return " ".join(f"{key}={getattr(self, key)}" for key in _changed(self))

    @property
    def num_replicas(self) -> int:
        """The length of the data axis. Needs a resolved plan."""
        if self.data is None:
            raise PlanError(
                "The number of replicas is not known while data=auto. It depends on the ranks, "
                "the cores and the batch; call plan.resolve(...) first."
            )
        return self.data

    @property
    def num_ranks(self) -> int:
        """The ranks of the mesh; servers and spares come on top. Needs a resolved plan."""
        return self.num_replicas * self.tensor * self.pipeline

    @property
    def num_pieces(self) -> int:
        """The equal parts that the global batch is cut into. Needs a resolved plan."""
        if self.pieces is None:
            raise PlanError(
                f"The number of pieces of the plan {str(self)!r} is not fixed yet. It depends on "
                "the number of replicas; call plan.resolve(...) first."
            )
        return self.pieces

    @property
    def num_microbatches(self) -> int:
        """The pieces that are in one pipeline together; 1 without a pipeline."""
        if self.microbatches is not None:
            return self.microbatches
        return 2 * self.pipeline if self.pipeline > 1 else 1

    @property
    def num_stages(self) -> int:
        """The stages of each pipeline rank."""
        if self.stages is not None:
            return self.stages
        return _STAGES_OF[self.schedule][0]

    def refuse_missing(self) -> None:
        """Refuse a technique that the text knows and the package does not have yet."""
        for key in _changed(self):
            if key in NOT_YET:
                raise PlanError(
                    f"{key}={getattr(self, key)} asks for {NOT_YET[key]}, which is not built yet. "
                    f"A plan is followed whole or not at all. Leave {key} out."
                )

    def resolve(self, *, ranks: int | None, cores: int, batch_size: int) -> Self:
        """The same plan with `data` and `pieces` fixed, or the reason why it cannot be.

        `ranks` is what a launcher or the command line gave, and must then be met exactly; with None
        an automatic `data` is the largest count that fits the `cores` and divides the batch.
        """
        self.refuse_missing()
        data, pieces = fit(_counts(self), ranks=ranks, cores=cores, batch_size=batch_size)
        return msgspec.structs.replace(self, data=data, pieces=pieces)


def describe() -> list[tuple[str, str, str]]:
    """Each key with its values and its meaning, in the order in which a plan prints them."""
    return [
        (key, known.values, known.meaning + ("; only the default so far" if key in NOT_YET else ""))
        for key, known in KEYS.items()
    ]


def _counts(plan: Plan) -> Counts:
    return Counts(
        data=plan.data,
        tensor=plan.tensor,
        pipeline=plan.pipeline,
        accumulate=plan.accumulate,
        microbatches=plan.num_microbatches,
        pieces=plan.pieces,
    )


def _changed(plan: Plan) -> list[str]:
    return [
        field.name
        for field in msgspec.structs.fields(plan)
        if getattr(plan, field.name) != field.default
    ]


def _read(key: str, text: str) -> Value:
    try:
        return KEYS[key].read(text)
    except ValueError:
        raise PlanError(
            f"{key}={text} is not possible. {key}, the {KEYS[key].meaning}, may be "
            f"{KEYS[key].values}."
        ) from None


# ---- the rules between keys

# How few and how many stages a rank may have under each schedule; the first is the default.
_STAGES_OF: dict[str, tuple[int, float]] = {
    "1f1b": (1, 1),
    "gpipe": (1, 1),
    "interleaved": (2, math.inf),
    "zero-bubble": (1, math.inf),
    "zbv": (2, 2),
}

_PIPELINE = Need(lambda plan: plan.pipeline > 1, "without a pipeline", "add pipeline=2 or more")
_SERVER = Need(lambda plan: plan.sync == "server", "without servers", "add sync=server")

# A key that is written, even with its default value, must do something.
_NEEDS = {
    "zero": Need(
        lambda plan: plan.zero == 0 or plan.data != 1,
        "with data=1: it shards over the data axis",
        "use data=2 or more",
    ),
    "schedule": _PIPELINE,
    "microbatches": _PIPELINE,
    "stages": _PIPELINE,
    "servers": _SERVER,
    "staleness": _SERVER,
    "copies": _SERVER,
    "local_steps": Need(
        lambda plan: (
            plan.local_steps == 1
            or plan.data != 1
            or plan.outer != "average"
            or plan.sync == "server"
        ),
        "with data=1: there is no other replica to average with",
        "use data=2 or more",
    ),
    "outer": Need(
        lambda plan: plan.local_steps > 1,
        "with local_steps=1: replicas agree on every step",
        "add local_steps=2 or more",
    ),
    "codec": Need(
        lambda plan: plan.codec == "none" or plan.data != 1 or plan.sync == "server",
        "with data=1: no gradient is sent",
        "use data=2 or more",
    ),
}


def _refuse_without_effect(plan: Plan, keys: Iterable[str]) -> None:
    for key in keys:
        need = _NEEDS.get(key)
        if need is not None and not need.met(plan):
            raise PlanError(
                f"{key}={getattr(plan, key)} has no effect {need.without}. "
                f"Leave {key} out, or {need.way_out}."
            )


def _refuse_contradictions(plan: Plan) -> None:
    fewest, most = _STAGES_OF[plan.schedule]
    if not fewest <= plan.num_stages <= most:
        allowed = str(fewest) if fewest == most else f"{fewest} or more"
        raise PlanError(
            f"stages={plan.stages} does not go with schedule={plan.schedule}, which needs "
            f"{allowed} on each rank. Leave stages out, or use another schedule."
        )
    if plan.copies > plan.servers:
        raise PlanError(
            f"copies={plan.copies} does not fit on servers={plan.servers}. Each copy of a shard "
            f"lives on a server of its own. Use servers={plan.copies} or copies={plan.servers}."
        )
    if plan.local_steps > 1 and plan.precision == "fp16":
        raise PlanError(
            f"precision=fp16 does not go with local_steps={plan.local_steps}. The loss scale of "
            f"fp16 is agreed on every step, and replicas agree only every {plan.local_steps} "
            "steps. Use precision=bf16."
        )
    if plan.local_steps > 1 and plan.zero:
        raise PlanError(
            f"zero={plan.zero} does not go with local_steps={plan.local_steps}. Between two "
            "averages the replicas differ, so none can hold a part of the others' state. "
            "Leave one of them out."
        )
    if plan.pieces is not None:
        refuse_pieces(_counts(plan), plan.pieces)
        if plan.data is not None and plan.local_steps > 1 and plan.pieces % plan.data:
            raise PlanError(
                f"pieces={plan.pieces} is not a multiple of data={plan.data}. With "
                f"local_steps={plan.local_steps} each replica trains alone and counts the same in "
                "the average, so all need equally many pieces. Use a multiple of data."
            )
