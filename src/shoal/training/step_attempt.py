"""One attempt to make the next step: forward, backward, exchange and update, phase by phase.

A plain step is one phase. A step of the recipe's own (`custom_step.py`) is as many as it calls:
before each of them, and at the end of the step, ranks tell each other in one small message what
comes next, so that ranks that decided unlike are named and none waits for another for ever. What
a phase has committed is on record in `RankProgress`; an attempt that a loss of the group ends
leaves it there, and the next attempt goes on after it.

Cost of a phase: that of a plain step's exchange, whole, whatever part of the model it trains; and
the message, some microseconds on one host. A rank keeps its pieces of the batch for all phases.
Read next: `trainer.py`, which commits the step.
"""

import math
from collections.abc import Sequence
from time import perf_counter, time
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from shoal.comm.clocks import clock_offset
from shoal.comm.flight_recorder import RECORDER
from shoal.comm.mesh import NO_REQUESTS, Mesh, RankRequests
from shoal.comm.wire import digest_number
from shoal.data.batches import Piece
from shoal.errors import AgreementLost, RecipeError
from shoal.events.meters import split_times
from shoal.events.step import PhaseHook, StepInfo, Times
from shoal.events.tracing import TRACER
from shoal.faults import faultpoint
from shoal.numerics import schedules
from shoal.numerics.norms import clip_factor
from shoal.numerics.optimizers import stepping_only
from shoal.sync.choose import late_mark
from shoal.sync.named_parts import means
from shoal.sync.strategy import GlobalStep, LocalStep
from shoal.system.processes import WORK
from shoal.training.compute import AS_RAISED
from shoal.training.custom_step import (
    PLAIN,
    Phase,
    StepBatch,
    norm_of,
    parameters_by_name,
    parts_of,
    total_of,
)
from shoal.training.diagnostics import (
    check_agreed,
    no_weight_error,
    not_finite_error,
    ranks_that_computed,
    refuse_other_samples,
)
from shoal.training.progress import PhaseResult
from shoal.training.rank_check import first_difference, first_unlike_pair

if TYPE_CHECKING:
    from shoal.training.trainer import Trainer

_END = "the end of the step"
_NOT_COMPUTED = GlobalStep([], [], 0.0, None, [], NO_REQUESTS, True, None, None)


class PhasesDiverged(RecipeError):
    """Ranks are about to make unlike phases."""


class Phases:
    """Of one rank: what its phases train, and where ranks agree on what comes next."""

    def __init__(self, optimizer: torch.optim.Optimizer):
        self.parameters = parameters_by_name(optimizer)

    def settle(self, mesh: Mesh) -> None:
        """Work in this mesh from now on."""
        self._mesh = mesh

    def meet(self, step: int, what: str) -> None:
        """All ranks are about to do the same. Every rank must call it."""
        if self._mesh.num_ranks == 1:
            return
        own, world = digest_number([f"{step} {what}".encode()]), self._mesh.world
        digests = [row[0] for row in world.all_gather_numbers([own])]
        pair = first_unlike_pair(digests, range(world.num_ranks))
        if pair is not None:
            told = {"what comes next": f"{what} (of step {step + 1})"}
            raise PhasesDiverged(
                f"Ranks do unlike things: {first_difference(world, pair, told)}. A step function "
                "must make the same phases on every rank: decide by batch.step and by what "
                "minimize returned, not by a rank's own draws, clock or files."
            )


class MadeStep(NamedTuple):
    """A step that all ranks have made and none has committed."""

    info: StepInfo
    agreed: GlobalStep  # of its last phase
    asked: RankRequests  # of any rank
    asked_in: Mesh
    busy_s: Sequence[float]  # by rank; empty if all phases were made in an attempt before


class StepAttempt:
    """Call `make` once."""

    def __init__(self, trainer: "Trainer"):
        self._trainer, self._asked_in = trainer, trainer.mesh
        self._batch = trainer.batches.at(trainer.step)
        self._pieces: dict[int, _KeptPiece] = {}
        self._sent_before = trainer.mesh.bytes_sent
        self._times: list[Times] = []  # by phase
        self._busy: list[Sequence[float]] = []  # by phase, then by rank
        self._asked, self._agreed = NO_REQUESTS, _NOT_COMPUTED

    def make(self) -> MadeStep | None:
        """Make the step; None if it must be tried again: with a smaller loss scale, say."""
        trainer = self._trainer
        if trainer.run.step is None:
            result = self._phase(PLAIN)
            return None if result is None else self._made([result], result.loss, result.parts)
        made = trainer.progress.phases
        batch = StepBatch(trainer.step, [*trainer.phases.parameters], tuple(made), self._minimize)
        with AS_RAISED:
            trainer.run.step(batch)
        batch.end()
        trainer.phases.meet(trainer.step, _END)
        return self._made(made, total_of(made), parts_of(made))

    def _minimize(self, phase: Phase) -> float:
        """Make and commit a phase of a step of the recipe's own."""
        trainer = self._trainer
        trainer.phases.meet(trainer.step, str(phase))
        while (result := self._phase(phase)) is None:
            continue  # state was repaired
        trainer.progress.phases.append(result)  # committed
        trainer.consistency.end(trainer.step, meets=False)
        for hook in trainer.hooks:
            if isinstance(hook, PhaseHook):
                hook.on_phase(phase.number)
        faultpoint("phase.committed", trainer.step)
        return result.loss

    def _phase(self, phase: Phase) -> PhaseResult | None:
        """What all know of a phase that they have made; None if it must be computed again."""
        trainer, batch = self._trainer, self._batch
        trainer.consistency.begin(trainer.step)
        blocked, waited = RECORDER.blocked, RECORDER.waited
        first_s, waited_s = blocked.seconds, waited.seconds
        started, tally = perf_counter(), LocalStep(asked=_asked(trainer))
        data_s = self._compute(phase, tally)
        faultpoint("step.computed", trainer.step)
        tally.busy_s = perf_counter() - started
        blocked_s, waited_s = blocked.seconds - first_s, waited.seconds - waited_s
        tally.digest = trainer.consistency.digest(trainer.step)
        self._asked_in, exchange = trainer.mesh, trainer.strategy.exchange
        with TRACER.span("exchange"):
            agreed = check_agreed(exchange(tally, trainer.run.clip is not None), trainer.plan)
        exchanged, second_s = perf_counter(), blocked.seconds
        faultpoint("step.exchanged", trainer.step)
        refuse_other_samples(trainer.batches.source, batch, agreed, trainer.plan)
        if trainer.consistency.verify(agreed.digests, trainer.step):
            return None  # what the step was computed with was corrupted here or elsewhere
        with TRACER.span("update"):
            norm = self._update(agreed, phase)
        if norm is None:
            if not trainer.loss_scale.overflow():
                alike = trainer.strategy.in_lockstep  # and so every rank finds the same
                who = ranks_that_computed(agreed, trainer.plan, trainer.mesh) if alike else ()
                raise not_finite_error(trainer.batches, batch.step, agreed, trainer.model, who)
            return None
        trainer.loss_scale.good_step()
        # Forward, backward and update exchange, too: shards, stages, what servers hold.
        blocked_s += blocked.seconds - second_s
        compute_s = tally.busy_s - data_s + perf_counter() - exchanged - blocked_s
        exchange_s = exchanged - started - tally.busy_s + blocked_s - waited_s
        rank, asked = trainer.mesh.rank, agreed.asked
        self._times.append(
            split_times(data_s, compute_s, exchange_s, agreed.busy_s, rank, waited_s)
        )
        self._busy.append(agreed.busy_s)
        if asked.stop or asked.meet:
            before = self._asked
            self._asked = RankRequests(before.stop or asked.stop, before.meet or asked.meet)
        self._agreed = agreed
        mark = late_mark(trainer.strategy) if agreed.mark is None else agreed.mark
        shown = None if agreed.norm is None else norm
        known = shown, mark, agreed.num_samples, means(agreed.parts)
        return PhaseResult(phase.name, agreed.loss, *known)

    def _compute(self, phase: Phase, tally: LocalStep) -> float:
        """Forward and backward of this rank's pieces; returns the seconds that data took."""
        trainer, batch, data_s = self._trainer, self._batch, 0.0
        rounds, load = trainer.runner.rounds, batch.piece if phase is PLAIN else self._piece
        for number, indices in enumerate(rounds):
            asked = perf_counter()
            with TRACER.span("load"):
                pieces = [load(index) for index in indices]
            data_s += perf_counter() - asked
            tally.count_samples(pieces, trainer.batches.source)
            WORK.done += 1
            around = trainer.strategy.microbatch(number == 0, number == len(rounds) - 1)
            with TRACER.span(_pieces_in_words(indices)), around:
                trainer.runner.round(batch, phase, indices, pieces, tally)
        return data_s

    def _piece(self, index: int) -> Piece:
        """A piece that several phases use: loaded once, unless one of them has written to it."""
        kept = self._pieces.get(index)
        if kept is None or kept.is_written:
            kept = self._pieces[index] = _KeptPiece(self._batch.piece(index))
        return kept.piece

    def _update(self, agreed: GlobalStep, phase: Phase) -> float | None:
        """Step, and return the gradient's norm before clipping; None if all is not finite.

        A gradient that is neither clipped nor loss-scaled is not looked through for that: it shows
        in the next loss, or in the last weights, and its step is the one that is blamed.
        """
        trainer, unit = self._trainer, self._batch.num_samples if agreed.is_mean else 1.0
        if agreed.num_samples == 0:  # quarantine left them all out, and every rank knows it
            trainer.strategy.buffers.restore()
            return 0.0
        if not agreed.weight:
            raise no_weight_error(trainer.step, is_share=agreed.num_samples is None)
        scale = unit / (agreed.weight * trainer.loss_scale.value)
        norm = (agreed.norm or 0.0) * scale
        if not math.isfinite(agreed.loss) or not math.isfinite(norm):
            return None
        if trainer.schedule is not None:
            factor = trainer.schedule(trainer.step, trainer.num_steps)
            schedules.apply(trainer.optimizer, factor)
        if trainer.run.clip is not None:
            scale *= clip_factor(norm, trainer.run.clip)
        trainer.checkpointer.await_copy()
        with stepping_only(trainer.optimizer, phase.of):
            return norm if self._step_until_agreed(scale) else None

    def _step_until_agreed(self, scale: float) -> bool:
        """`Strategy.update`, in as many groups as it takes once the step is made on this rank."""
        trainer = self._trainer
        while True:
            try:
                return trainer.strategy.update(scale, check=trainer.loss_scale.dynamic)
            except AgreementLost as lost:
                trainer.regroup(lost)

    def _made(
        self, phases: Sequence[PhaseResult], loss: float, parts: dict[str, float]
    ) -> MadeStep:
        trainer, batch = self._trainer, self._batch
        loaded = phases[-1].num_samples
        busy_s, times = _added_up(self._busy), _added_up(self._times)
        info = StepInfo(
            trainer.step + 1,
            loss,
            batch.num_samples,
            float(trainer.optimizer.param_groups[0]["lr"]),
            norm_of(phases),
            Times(*times) if times else Times(0, 0, 0, 0),
            trainer.mesh.bytes_sent - self._sent_before,
            phases[-1].mark,
            0 if loaded is None else batch.num_samples - loaded,
            ranks=tuple(busy_s) if trainer.strategy.in_lockstep else (),
            parts=parts,
            time=time(),
        )
        return MadeStep(info, self._agreed, self._asked, self._asked_in, busy_s)


def begin_traced_step(trainer: "Trainer") -> None:
    """Put what the next step does on record; if it is the first to be traced, compare clocks.

    Every rank must call it. Without lockstep ranks are not together here, and their clocks were
    compared when the group formed.
    """
    step = trainer.step + 1
    RECORDER.step = step
    if TRACER.steps and step == TRACER.steps[0] and trainer.strategy.in_lockstep:
        TRACER.offset_s = clock_offset(trainer.mesh.world)
    TRACER.begin_step(step)


class _KeptPiece:
    """A piece, and whether its tensors were written to since."""

    def __init__(self, piece: Piece):
        self.piece = piece
        leaves: list[Any] = tree_leaves((piece.inputs, piece.target))
        self._tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        self._versions = [tensor._version for tensor in self._tensors]

    @property
    def is_written(self) -> bool:
        return [tensor._version for tensor in self._tensors] != self._versions


def _added_up(by_phase: Sequence[Sequence[float]]) -> Sequence[float]:
    """Over the phases, of which a plain step has one; empty if there are none."""
    if len(by_phase) == 1:
        return by_phase[0]
    return [sum(of_one) for of_one in zip(*by_phase, strict=True)]


def _pieces_in_words(indices: range) -> str:
    return f"piece {indices[0]}" if len(indices) == 1 else f"pieces {indices[0]} to {indices[-1]}"


def _asked(trainer: "Trainer") -> RankRequests:
    asked = trainer.seat.asked()
    if trainer.loop is not None and trainer.loop.wants_stop:
        asked = asked._replace(stop=True)
    return asked
