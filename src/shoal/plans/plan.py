"""How a run is distributed: one line of text, checked before a process starts.

A `Plan` is a frozen record that parses from `key=value` words and prints as them, without defaults.
`Plan(...)` and `Plan.parse` refuse values out of range, and keys that contradict each other or have
no effect; `resolve` fixes what depends on the machine and the batch. All of it is arithmetic
without torch, so that the command line can refuse a plan in milliseconds.

Rules that need the model (heads that the tensor axis must divide) belong to the module that cuts
the model. Read next: `rules.py`, and `comm/mesh.py`, which turns a resolved plan into axes.
"""

from typing import Literal, Self

import msgspec

from shoal.errors import PlanError, nearest
from shoal.plans.fit import PlanCounts, fit
from shoal.plans.keys import AUTO, BUCKET_MB, KEYS, PlanValue
from shoal.plans.rules import (
    STAGES_OF,
    refuse_contradictions,
    refuse_without_effect,
)

_ELSEWHERE = {  # what is asked for in plans, and said in another place
    "teacher": "A teacher is no part of a plan: `shoal distill --teachers N` lets it compute in N "
    "processes of its own on each host, and `--cache DIR` asks it once about each sample."
}


class Plan(msgspec.Struct, frozen=True):
    """How a run is distributed. The fields are the keys of its text; `KEYS` explains each one."""

    data: int | None = None  # None is `auto`, which `resolve` replaces
    tensor: int = 1
    pipeline: int = 1
    zero: int = 0
    schedule: str = "1f1b"
    microbatches: int | None = None  # None: `num_microbatches`
    stages: int | None = None  # None: `num_stages`
    sync: str = "allreduce"
    servers: int = 1
    hosts: int = 1
    staleness: int | Literal["any"] = 0
    combine: str = "mean"
    damping: str = "none"
    rates: str = "even"
    copies: int = 1
    deadline: str = "none"
    replicas: int | None = None  # None: `num_apart`
    local_steps: int = 1
    outer: str = "average"
    fragments: int = 1
    sums: str = "exact"
    codec: str = "none"
    bucket: int | Literal["auto"] = BUCKET_MB
    precision: str = "fp32"
    accumulate: int = 1
    pieces: int | None = None  # None until `resolve` fixes it
    recompute: str = "none"
    offload: str = "none"
    memory: str = "shared"

    def __post_init__(self) -> None:
        changed = _non_default(self)
        for key in changed:
            canonical = _read(key, str(getattr(self, key)))
            msgspec.structs.force_setattr(self, key, canonical)
        refuse_without_effect(self, changed)
        refuse_contradictions(self)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `key=value` words, separated by spaces or commas."""
        written: dict[str, PlanValue] = {}
        for word in text.replace(",", " ").split():
            key, equals, value = word.partition("=")
            if not equals or not key or not value:
                raise PlanError(
                    f"{word!r} in the plan {text!r} is not key=value. A plan is words such as "
                    "data=2, separated by spaces or commas, with no space around the '='."
                )
            if key not in KEYS:
                elsewhere = _ELSEWHERE.get(key) or nearest(key, KEYS)
                raise PlanError(f"The plan has no key {key!r}. {elsewhere}")
            if key in written:
                raise PlanError(
                    f"{key} is given twice in the plan {text!r}. Each key may be given once; "
                    f"leave one {key} out."
                )
            written[key] = _read(key, value)
        plan: Self = msgspec.convert(written, cls)
        refuse_without_effect(plan, written)
        return plan

    def __str__(self) -> str:
        return " ".join(f"{key}={getattr(self, key)}" for key in _non_default(self))

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
    def is_loose(self) -> bool:
        """Whether replicas step apart, through servers or for some local steps."""
        return self.local_steps > 1 or self.sync == "server"

    @property
    def num_apart(self) -> int:
        """The replicas that step apart; 1 if all ranks are in lockstep. Needs a resolved plan."""
        return (self.replicas or self.num_replicas) if self.is_loose else 1

    @property
    def num_within(self) -> int:
        """The length of the data axis within one of them."""
        return self.num_replicas // self.num_apart

    @property
    def num_parts(self) -> int:
        """The parts of the model that have servers of their own; under local steps those that a
        replica's ranks hold."""
        return self.tensor * self.pipeline

    @property
    def num_ranks_apart(self) -> int:
        """The ranks of one of them."""
        return self.num_within * self.tensor * self.pipeline

    @property
    def num_ranks(self) -> int:
        """The ranks of the mesh, without servers and spares. Needs a resolved plan."""
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
    def counts(self) -> PlanCounts:
        """The keys that count ranks and pieces."""
        return PlanCounts(
            data=self.data,
            tensor=self.tensor,
            pipeline=self.pipeline,
            accumulate=self.accumulate,
            microbatches=self.num_microbatches,
            pieces=self.pieces,
        )

    @property
    def may_share(self) -> bool:
        """Whether ranks of one host may hold parameters and optimizer state together."""
        agrees = self.sync == "allreduce" and self.local_steps == 1 and self.codec == "none"
        is_whole = self.tensor == self.pipeline == 1 and self.zero < 3
        return agrees and is_whole and self.data != 1 and self.offload == "none"

    @property
    def shares(self) -> bool:
        """Whether they are to, where model and optimizer allow it."""
        return self.may_share and self.memory == "shared"

    @property
    def outer_rates(self) -> tuple[float, float]:
        """The learning rate and momentum of the outer optimizer; (1, 0) for an average."""
        _, *numbers = self.outer.split(":")
        rate, momentum = map(float, numbers or (1, 0))
        return rate, momentum

    @property
    def has_anchor(self) -> bool:
        """Whether outer gradients, relative to the last agreed weights, are sent, not weights."""
        if self.local_steps == 1:
            return False
        is_average = self.outer == "average" and self.codec == "none" and self.fragments == 1
        return self.sync == "server" or not is_average

    @property
    def packed_codec(self) -> str:
        """The codec of gradients that ranks send each other in every step; `none` elsewhere, and
        until it is measured."""
        in_steps = self.sync == "allreduce" and self.local_steps == 1
        return self.codec if in_steps and self.codec != AUTO else "none"

    @property
    def bucket_bytes(self) -> int:
        """Of a bucket of gradients; the usual number until it is measured."""
        return (self.bucket if isinstance(self.bucket, int) else BUCKET_MB) << 20

    @property
    def is_open(self) -> bool:
        """Whether something is left to be measured in the first steps."""
        return AUTO in (self.codec, self.bucket)

    @property
    def num_servers(self) -> int:
        """Parameter servers, in addition to the ranks."""
        return self.servers if self.sync == "server" else 0

    @property
    def num_host_servers(self) -> int:
        """Servers that aggregate gradients for the parameter servers, one per host."""
        return self.hosts if self.hosts > 1 else 0

    @property
    def num_serving(self) -> int:
        """All server processes."""
        return self.num_servers + self.num_host_servers

    @property
    def staleness_bound(self) -> int | None:
        """How many batches a worker may be ahead; None without a bound."""
        return None if self.staleness == "any" else self.staleness

    @property
    def deadline_s(self) -> float | None:
        """Seconds after which a round closes without late replicas; None: it waits for all."""
        return None if self.deadline == "none" else float(self.deadline)

    @property
    def waits_for_all(self) -> bool:
        """Whether no replica continues before all have agreed, where they agree at all."""
        return self.staleness_bound == 0 and self.deadline_s is None

    @property
    def rate_factors(self) -> list[float]:
        """The factor of each replica's learning rate. Needs a resolved plan."""
        if self.rates == "even":
            return [1.0] * self.num_replicas
        return [float(rate) for rate in self.rates.split(":")]

    @property
    def cuts_model(self) -> bool:
        """Whether a replica of the model takes more than one rank."""
        return self.tensor > 1 or self.pipeline > 1

    @property
    def saves_memory(self) -> bool:
        """Whether a key is set whose purpose is to save memory."""
        return self.zero > 0 or self.recompute != "none" or self.offload != "none"

    @property
    def num_microbatches(self) -> int:
        """The pieces in one pipeline at the same time; 1 without a pipeline."""
        if self.microbatches is not None:
            return self.microbatches
        return 2 * self.pipeline if self.pipeline > 1 else 1

    @property
    def num_rounds(self) -> int:
        """The terms of a gradient's sum: pieces, or those that are in a pipeline together."""
        return self.num_pieces // self.num_microbatches

    @property
    def num_stages(self) -> int:
        """The stages of each pipeline rank."""
        if self.stages is not None:
            return self.stages
        return STAGES_OF[self.schedule][0]

    def resolve(self, *, ranks: int | None, cores: int, batch_size: int) -> Self:
        """The same plan with `data` and `pieces` fixed; PlanError says why it cannot be.

        `ranks`, from a launcher or the command line, must be met exactly; with None an automatic
        `data` is the largest count that fits the `cores` and divides the batch.
        """
        data, pieces = fit(self.counts, ranks=ranks, cores=cores, batch_size=batch_size)
        return msgspec.structs.replace(self, data=data, pieces=pieces)


def describe_keys() -> list[tuple[str, str, str]]:
    """Each key with its values and its meaning, in the order in which a plan prints them."""
    return [(key, known.values, known.meaning) for key, known in KEYS.items()]


def _non_default(plan: Plan) -> list[str]:
    return [
        field.name
        for field in msgspec.structs.fields(plan)
        if getattr(plan, field.name) != field.default
    ]


def _read(key: str, text: str) -> PlanValue:
    try:
        return KEYS[key].read(text)
    except ValueError:
        raise PlanError(
            f"{key}={text} is not possible. {key}, the {KEYS[key].meaning}, may be "
            f"{KEYS[key].values}."
        ) from None
