"""How the ranks of a new group come to hold the same state.

All say how far they are. Who is furthest, the lowest rank among equals, is the leader; whoever is
behind takes the leader's state, in the form a checkpoint has. Ranks that lived through a loss
differ by one step at most, since the exchange of a step needs all of them; a newcomer is behind
by everything. Out of lockstep each goes on from its own step, a newcomer from its seat's. If all
are new, all are at step 0 and hold the seed's weights.
"""

import math
from typing import TYPE_CHECKING

import msgspec

from shoal.errors import AgreementLost, ShoalError
from shoal.events.step import StepInfo, Times
from shoal.faults import faultpoint
from shoal.numerics.precision import ScaleState
from shoal.sync.choose import asked_now
from shoal.sync.state import Given, share_bytes, share_state

if TYPE_CHECKING:
    from shoal.training.trainer import Trainer


# A step that nobody who lives has made.
UNKNOWN = StepInfo(0, math.nan, 0, 0.0, None, Times(0.0, 0.0, 0.0, 0.0), 0)


class Notes(msgspec.Struct, frozen=True):
    """What is known of the last step beside the tensors."""

    step: int
    loss_scale: ScaleState
    answers: list[dict[str, float]]
    past: tuple[int, list[dict[str, float]]]
    info: StepInfo | None
    stopped: bool
    ended: bool


def update(trainer: "Trainer", scale: float) -> bool:
    """`Strategy.update`, in as many groups as it takes once the step is made on this rank."""
    while True:
        try:
            return trainer.strategy.update(scale, check=trainer.loss_scale.dynamic)
        except AgreementLost as lost:
            trainer.regroup(lost)


def catch_up(trainer: "Trainer") -> bool:
    """Agree on the state; True if this rank took over another's step. Every rank must call it."""
    group, strategy = trainer.mesh.data, trainer.strategy
    is_sure = trainer.loop is None or trainer.loop.is_sure
    own = [trainer.step, len(trainer.answers), trainer.is_scribe, strategy.begins_at, is_sure]
    rows = group.gather_numbers(own)
    places = [row[:2] for row in rows]
    furthest = max(places)
    scribes = [rank for rank, row in enumerate(rows) if row[2]] or [places.index(furthest)]
    first = trainer.mesh.tensor.rank == trainer.mesh.pipeline.rank == 0
    trainer.is_scribe = first and group.rank == scribes[0]  # one in all, however models are cut
    # After the first batch, who is new and who is not hold the same: the first weights.
    trainer.served = served = int(min(row[3] for row in rows))
    if not furthest[0] and served > 1:
        trainer.seat.step = served  # where the run was, which nobody else can tell any more
        raise ShoalError(
            "Every worker was lost at once, and what they held beside the servers with them."
        )
    leader = _leader(rows, furthest)
    if min(places) == furthest and not trainer.loss_scale.dynamic:
        return False
    notes = _share_notes(trainer, leader)
    trainer.loss_scale.load(notes.loss_scale)  # some may have lowered it for a step given up
    if min(places) == furthest:
        return False
    if min(place[0] for place in places) == furthest[0]:
        trainer.answers = notes.answers  # all hold the step; some missed an evaluation
        return False
    faultpoint("handover.sharing", notes.step)
    furthest_ranks = [rank for rank, place in enumerate(places) if place[0] == furthest[0]]
    trainer.consistency.agree_on_state(furthest_ranks, notes.step)
    own_state = strategy.state_dict(served=False)
    if trainer.loop is not None:
        own_state = trainer.loop.for_newcomer(trainer, own_state)
    state = share_state(group, leader, own_state)
    if not strategy.in_lockstep:
        return _join(trainer, notes, Given(state))
    behind = trainer.step < notes.step
    if behind:
        strategy.load_state_dict(Given(state), notes.step, served=False)
        if trainer.loop is not None:
            trainer.loop.join(trainer, Given(state))
    trainer.step, trainer.answers, trainer.last_info = notes.step, notes.answers, notes.info
    trainer.stopped, trainer.ended = notes.stopped, notes.ended
    return behind


def _leader(rows: list[list[float]], furthest: list[float]) -> int:
    """The lowest rank of those that are furthest and hold what a script's loop made of it."""
    able = [rank for rank, row in enumerate(rows) if row[:2] == furthest and row[4]]
    if not able:
        raise ShoalError(
            f"Every rank that had run the script's loop after step {int(furthest[0])} was lost, "
            "and with them what it left in trainer.state. Start the script again; with "
            "checkpoints=DIRECTORY and resume=True it goes on from the newest."
        )
    return able[0]


def _join(trainer: "Trainer", notes: Notes, state: Given) -> bool:
    """Where each goes on from a step of its own: a newcomer from where its seat had come."""
    is_new = not trainer.step
    if is_new:
        step = trainer.strategy.begins_at
        trainer.strategy.load_state_dict(state, step, served=False)
        trainer.step = step  # not before: a server may be lost on the way, and then it is new still
        trainer.last_info = None if notes.info is None else notes.info._replace(step=trainer.step)
    if is_new and trainer.step > notes.step:
        # What follows the step needs all, and nobody else is there: it is still to be done.
        trainer.last_info = trainer.last_info or UNKNOWN._replace(step=trainer.step)
        trainer.stopped = asked_now(trainer.strategy).stop
        return True
    if trainer.step == notes.step:
        trainer.answers, trainer.stopped = notes.answers, notes.stopped
    elif trainer.step == notes.past[0]:
        # An evaluation needs all ranks, so what came after a step that one has left is over.
        trainer.answers = notes.past[1]
    return is_new and trainer.step == notes.step


def _share_notes(trainer: "Trainer", leader: int) -> Notes:
    own = Notes(
        trainer.step,
        trainer.loss_scale.state,
        trainer.answers,
        trainer.past,
        trainer.last_info,
        trainer.stopped,
        trainer.ended,
    )
    content = share_bytes(trainer.mesh.data, leader, msgspec.msgpack.encode(own))
    return msgspec.msgpack.decode(content, type=Notes)
