"""`codec=auto` and `bucket=auto`: measured before the first step, in the group that trains.

The first step is rehearsed: computed and exchanged as it will be, and not made, as a step that a
lost rank ends is not. First without a codec and with usual buckets; then with what the link and the
packing say may be faster (`plans/measured.py`, which decides). Ranks gather each other's figures,
so all decide alike. A rank that joins a group later is told.

Cost: four computations of a step for each choice that is tried, one where steps take seconds; a few
messages, a megabyte each. Not for a step of the recipe's own, which updates before it is over.
"""

from collections.abc import Sequence
from time import perf_counter
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import torch
from torch import Tensor

from shoal.comm.compression import encode_with_residual
from shoal.comm.mesh import Mesh
from shoal.events.events import MeasuredPlanEvent
from shoal.events.tracing import TRACER
from shoal.faults import faultpoint
from shoal.formatting import in_seconds
from shoal.numerics.codecs import TOP_BLOCK, codec_at, make_codec, packs
from shoal.plans.keys import AUTO
from shoal.plans.measured import (
    BUCKETS_MB,
    GAINS,
    CodecFigures,
    LinkFigures,
    chosen_bucket,
    chosen_codec,
    next_codec,
)
from shoal.plans.plan import Plan
from shoal.sync.allreduce import AllReduce
from shoal.sync.choose import make_strategy
from shoal.sync.state import broadcast_bytes
from shoal.sync.strategy import LocalStep, Strategy
from shoal.training.custom_step import PLAIN

if TYPE_CHECKING:
    from shoal.training.trainer import Trainer

_TIMES = 4  # that a step is rehearsed; the first fills caches and is not counted
_LONG_S = 2.0  # a step that takes longer is rehearsed once
_PROBE_BYTES = 1 << 20
_SAMPLE = 1 << 20  # elements that a codec is timed with


class _Rehearsed(NamedTuple):
    """Of the slowest rank: the least seconds of a step, and the most bytes."""

    step_s: float
    compute_s: float
    num_bytes: int


def settle_plan(trainer: "Trainer", mesh: Mesh) -> tuple[Plan, Strategy]:
    """The plan with nothing left open, the same on all ranks, and its strategy.

    Every rank must call it first in every group of a run whose plan left something open.
    """
    plan, world = trainer.plan, mesh.world
    knowing = [
        rank for rank, (knows,) in enumerate(world.all_gather_numbers([not plan.is_open])) if knows
    ]
    if knowing:
        own = msgspec.json.encode((plan.codec, plan.bucket))
        content = broadcast_bytes(world, knowing[0], own)
        codec, bucket = msgspec.json.decode(content, type=tuple[str, int | str])
        if not plan.is_open:
            return plan, trainer.strategy
        plan = msgspec.structs.replace(plan, codec=codec, bucket=bucket)
    elif (kept := trainer.checkpointer.kept_plan(world)) is not None and not kept.is_open:
        assert isinstance(kept.bucket, int)
        plan = _settled(plan, kept.codec, kept.bucket)  # all ranks began again
    elif trainer.num_steps and mesh.data.num_ranks > 1:
        with TRACER.span("measure"):
            plan = _Measuring(trainer, mesh).decide()
    else:
        plan = _settled(plan, "none", BUCKETS_MB[0])
    before, strategy = trainer.strategy, _strategy_of(trainer, plan, trainer.run.num_steps())
    if isinstance(before, AllReduce) and before.keeps and isinstance(strategy, AllReduce):
        strategy.keep_gradients()  # for hooks that were there before the choice
    return plan, strategy


def _settled(plan: Plan, codec: str, bucket: int) -> Plan:
    return msgspec.structs.replace(
        plan,
        codec=codec if plan.codec == AUTO else plan.codec,
        bucket=bucket if plan.bucket == AUTO else plan.bucket,
    )


def _strategy_of(trainer: "Trainer", plan: Plan, num_steps: int) -> Strategy:
    scale, loop = trainer.loss_scale, trainer.loop
    by_script = "a loop of a script's own may write to them" if loop and loop.is_script else ""
    apart = trainer.run.writes_weights or by_script
    return make_strategy(plan, num_steps, trainer.run.meets_after, lambda: scale.value, apart)


class _Measuring:
    """Call `decide` once, on every rank."""

    def __init__(self, trainer: "Trainer", mesh: Mesh):
        self._trainer, self._mesh, self._plan = trainer, mesh, trainer.plan
        self._codecs: dict[str, float] = {}  # seconds of steps
        self._buckets: dict[int, float] = {}

    def decide(self) -> Plan:
        plan, usual = self._plan, BUCKETS_MB[0]
        dense = self._rehearse(_settled(plan, "none", usual))
        link = self._link(dense)
        codec, figures = "none", dict[str, CodecFigures]()
        if plan.codec == AUTO:
            all_figures = {name: self._packing(name) for name in GAINS}
            figures = {name: one for name, one in all_figures.items() if one is not None}
            self._codecs["none"] = dense.step_s
            while (name := next_codec(link, figures, self._codecs)) is not None:
                self._codecs[name] = self._packed_s(name)
            if chosen_codec(self._codecs) != "none":
                self._codecs["none"] = self._again(_settled(plan, "none", usual), dense.step_s)
            codec = chosen_codec(self._codecs)
        bucket = usual
        has_buckets = not (self._mesh.data.shares_memory and _settled(plan, codec, usual).shares)
        if plan.bucket == AUTO and has_buckets:
            self._buckets[usual] = self._codecs.get(codec, dense.step_s)
            bucket = self._bucket(codec)
        settled = _settled(plan, codec, bucket)
        if self._mesh.rank == 0:
            self._tell(settled, link, figures)
        return settled

    def _packed_s(self, name: str) -> float:
        """Seconds of a step after a codec's warm-up; of one in it, if that would lose."""
        plan, steps = _settled(self._plan, name, BUCKETS_MB[0]), self._trainer.run.num_steps()
        seconds = self._rehearse(plan).step_s
        if codec_at(name, 0, steps).name == codec_at(name, steps, steps).name:
            return seconds
        early = self._rehearse(plan, steps).step_s
        return seconds if early <= self._codecs["none"] else early

    def _bucket(self, codec: str) -> int:
        """The usual one, unless another wins twice."""
        usual, seconds = BUCKETS_MB[0], self._buckets
        for size in BUCKETS_MB[1:]:
            seconds[size] = self._rehearse(_settled(self._plan, codec, size)).step_s
        best = chosen_bucket(seconds)
        if best != usual:
            seconds[usual] = self._again(_settled(self._plan, codec, usual), seconds[usual])
            again = self._rehearse(_settled(self._plan, codec, best)).step_s
            seconds[best] = max(seconds[best], again)
        return chosen_bucket(seconds)

    def _again(self, plan: Plan, seconds: float) -> float:
        """The usual choice once more, lest a busy moment speaks against it."""
        return seconds if seconds > _LONG_S else min(seconds, self._rehearse(plan).step_s)

    def _rehearse(self, plan: Plan, num_steps: int = 0) -> _Rehearsed:
        """Compute and exchange the next step under a plan, of a run of so many, of which a
        twentieth is a codec's warm-up."""
        trainer = self._trainer
        if plan.shares:  # what is compared is the exchange
            plan = msgspec.structs.replace(plan, memory="apart")
        strategy = _strategy_of(trainer, plan, num_steps)
        # A strategy that shards lets its optimizer step on other tensors.
        optimizer = trainer.run.make_optimizer(trainer.model) if plan.zero else trainer.optimizer
        strategy.attach(trainer.model, optimizer, self._mesh, trainer.spread.holding)
        found: list[_Rehearsed] = []
        try:
            trainer.runner.settle(self._mesh, strategy)
            while len(found) < _TIMES and not (found and found[0].step_s > _LONG_S):
                found.append(self._attempt(strategy))
        finally:
            strategy.detach()
        return min(found[1:] or found)

    def _attempt(self, strategy: Strategy) -> _Rehearsed:
        trainer, tally = self._trainer, LocalStep()
        batch, rounds = trainer.batches.at(trainer.step), trainer.runner.rounds
        faultpoint("plan.measuring", trainer.step)
        loaded = [[batch.piece(index) for index in indices] for indices in rounds]
        sent = self._mesh.bytes_sent
        self._gather([0.0])  # all begin together
        began = perf_counter()
        for number, (indices, pieces) in enumerate(zip(rounds, loaded, strict=True)):
            with strategy.microbatch(number == 0, number == len(rounds) - 1):
                trainer.runner.round(batch, PLAIN, indices, pieces, tally)
        computing = perf_counter() - began
        strategy.exchange(tally, trainer.run.clip is not None)
        own = perf_counter() - began, computing, self._mesh.bytes_sent - sent
        seconds, computing, num_bytes = self._gather(own)
        return _Rehearsed(seconds, computing, int(num_bytes))

    def _link(self, dense: _Rehearsed) -> LinkFigures:
        group = self._mesh.data
        latency, probe = (self._seconds(torch.zeros(n)) for n in (1, _PROBE_BYTES // 4))
        num_bytes = _PROBE_BYTES * 2 * (group.num_ranks - 1) / group.num_ranks
        waited = dense.step_s - dense.compute_s
        rate = num_bytes / max(probe - latency, probe / 2)
        return LinkFigures(latency, rate, dense.compute_s, waited, dense.num_bytes)

    def _seconds(self, tensor: Tensor) -> float:
        """Of a sum over replicas, that of the slowest rank."""
        times: list[float] = []
        while len(times) < _TIMES and not (times and times[0] > _LONG_S / 4):
            self._gather([0.0])
            began = perf_counter()
            self._mesh.data.all_reduce(tensor.to(self._mesh.device)).wait()
            times += self._gather([perf_counter() - began])
        return min(times[1:] or times)

    def _packing(self, name: str) -> CodecFigures | None:
        """Of packing here: an own gradient is packed and unpacked, and so is a sum. None if it
        makes nothing smaller on any rank, which may hold unlike parts of the model."""
        codec = make_codec(name)
        assert codec is not None
        packed = [p for p in self._trained if packs(name, p.shape, p.itemsize)]
        count, times = sum(p.numel() for p in packed), list[float]()
        draws = torch.Generator().manual_seed(0)
        flat = torch.randn(min(_SAMPLE, -(-count // TOP_BLOCK) * TOP_BLOCK), generator=draws)
        flat = flat.to(self._mesh.device)
        for _ in range(_TIMES):
            began = perf_counter()
            encoded, _ = encode_with_residual(codec, flat)
            for _ in range(2):
                codec.decode(encoded, flat.numel())
            times.append(perf_counter() - began)
        own_s = min(times[1:]) * count / max(1, flat.numel())
        whole, small = sum(p.nbytes for p in self._trained), sum(p.nbytes for p in packed)
        share = (whole - small + codec.num_bytes(count)) / max(1, whole)
        seconds, share, is_used = self._gather([own_s, share, bool(packed)])
        return CodecFigures(share, seconds) if is_used else None

    @property
    def _trained(self) -> Sequence[Tensor]:
        return [p for p in self._trainer.model.parameters() if p.requires_grad]

    def _gather(self, own: Sequence[float]) -> list[float]:
        """The most of any rank."""
        return [
            max(column) for column in zip(*self._mesh.world.all_gather_numbers(own), strict=True)
        ]

    def _tell(self, plan: Plan, link: LinkFigures, figures: dict[str, CodecFigures]) -> None:
        steps = {f"codec={name}": seconds for name, seconds in self._codecs.items()}
        steps |= {f"bucket={size}": seconds for size, seconds in self._buckets.items()}
        left_open = [key for key in ("codec", "bucket") if getattr(self._plan, key) == AUTO]
        settled = " ".join(f"{key}={getattr(plan, key)}" for key in left_open)
        taken = ", ".join(f"{name} {in_seconds(seconds)}" for name, seconds in steps.items())
        self._trainer.seat.emit(
            MeasuredPlanEvent(
                plan=str(plan),
                codec=plan.codec,
                bucket=plan.bucket_bytes >> 20,
                open=left_open,
                step_s=steps,
                link=link._asdict() | {"hidden_s": link.hidden_s},
                codecs={name: one._asdict() for name, one in figures.items()},
                text=f"measured, and chosen: {settled}. A step takes {taken}; the link carries "
                f"{link.bytes_per_s / 1e6:,.1f} MB/s, and a message takes "
                f"{in_seconds(link.latency_s)}",
            )
        )
