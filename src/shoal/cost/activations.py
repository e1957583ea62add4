"""How many bytes activations take while pieces are computed. Pure.

Each event of the forward keeps some bytes until its backward; a stage of a pipeline keeps those of
every piece that is in flight, as its schedule has it. With recompute=blocks a block keeps its
inputs, and what is inside it is there only while it runs, forward or backward.
"""

from collections.abc import Sequence
from typing import NamedTuple

from shoal.cost.plan_facts import ModelFacts
from shoal.cost.profile import BlockTimes
from shoal.parallel.pipeline.schedules import Action, ActionKind
from shoal.plans.plan import Plan


class Moment(NamedTuple):
    """Of a pass through some events: bytes of activations, and the elements whose gradients are
    there already if none was before."""

    activations: float
    gradient_elements: int


class PassMemory(NamedTuple):
    """Of one piece in some events."""

    kept: float  # between its forward and its backward
    moments: list[Moment]  # of each event, in forward and in backward

    def with_inputs(self, num_bytes: float) -> "PassMemory":
        """Where what it is given is its own to keep: the inputs of a stage."""
        return PassMemory(self.kept + num_bytes, [Moment(self.peak + num_bytes, 0)])

    @property
    def peak(self) -> float:
        return max((moment.activations for moment in self.moments), default=0.0)


def pass_memory(
    model: ModelFacts, plan: Plan, times: Sequence[BlockTimes], events: range, samples: float
) -> PassMemory:
    """What the events of a stage, or of the whole model, hold of one piece."""
    profile = model.profile
    precision = profile.precision_of(plan.precision)
    factor = precision.kept
    own = [
        max(0.0, times[i].kept_bytes.at(samples)) * factor
        + precision.copies * sum(model.num_elements[n] for n in profile.blocks[i].parameters)
        for i in events
    ]
    inside = model.blocks_again(plan)
    moments: list[Moment] = []
    kept = within = 0.0
    block: str | None = None
    before: list[float] = []  # kept by what ran before each event
    alive: list[float] = []  # of its block, besides
    for at, i in enumerate(events):
        if inside[i] != block:
            block, within = inside[i], 0.0
            if block is not None:
                kept += model.input_bytes(i, block, inside, samples)
        before.append(kept)
        alive.append(within)
        moments.append(Moment(kept + within + times[i].forward_peak_bytes.at(samples) * factor, 0))
        if block is None:
            kept += own[at]
        else:
            within += own[at]
    whole = _sums_of_blocks(own, [inside[i] for i in events])
    done = 0
    for at, i in reversed(list(enumerate(events))):
        rematerialised = whole[at] if inside[i] is not None else own[at]
        peak = times[i].backward_peak_bytes.at(samples) * factor
        moments.append(Moment(before[at] + rematerialised + peak, done))
        done += sum(model.num_elements[name] for name in profile.blocks[i].parameters)
    moments.append(Moment(0.0, done))
    return PassMemory(kept, moments)


def _sums_of_blocks(own: Sequence[float], blocks: Sequence[str | None]) -> list[float]:
    """For each event, the bytes of its whole block."""
    totals: dict[str, float] = {}
    for size, block in zip(own, blocks, strict=True):
        if block is not None:
            totals[block] = totals.get(block, 0.0) + size
    return [totals.get(block, 0.0) if block is not None else 0.0 for block in blocks]


def peak_in_flight(actions: Sequence[Action], memory: dict[int, PassMemory]) -> float:
    """The most that a rank of a pipeline holds; `memory` is by stage. A backward that is split
    keeps what it needs until its second part."""
    held = most = 0.0
    peaks = {stage: own.peak for stage, own in memory.items()}
    split = {a[1:] for a in actions if a.kind == ActionKind.WEIGHT}
    for kind, stage, microbatch in actions:
        own = memory[stage]
        if kind == ActionKind.FORWARD:
            most = max(most, held + peaks[stage])
            held += own.kept
        elif kind in (ActionKind.BACKWARD, ActionKind.INPUT):
            most = max(most, held - own.kept + peaks[stage])
        if kind == ActionKind.WEIGHT or (
            kind == ActionKind.BACKWARD and (stage, microbatch) not in split
        ):
            held -= own.kept
    return most
