"""How the ranks of a new group come to hold the same state.

All say how far they are. The one that is furthest, the lowest rank among equals, is the leader; a
rank that is behind takes the leader's state, in the form a checkpoint has. Survivors of a loss
differ by one step at most, or by one phase of a step of the recipe's own, since each exchange needs
all of them; a newcomer is behind by everything. Out of lockstep each continues from its own step, a
newcomer from its seat's. If all are new, all are at step 0 and hold the seed's weights.

Read next: `progress.py`, for what is known beside the tensors; `sync/state.py`, for these.
"""

import math
from typing import TYPE_CHECKING

import msgspec

from shoal.errors import AllWorkersLost, ShoalError
from shoal.events.step import StepInfo, Times
from shoal.faults import faultpoint
from shoal.numerics.precision import ScaleState
from shoal.sync.choose import current_requests
from shoal.sync.state import MemorySource, broadcast_bytes, broadcast_state
from shoal.training.progress import RankProgress
from shoal.training.stream_state import take_stream_position, with_stream_position

if TYPE_CHECKING:
    from shoal.training.trainer import Trainer


# A step that no living rank has made.
UNKNOWN = StepInfo(0, math.nan, 0, 0.0, None, Times(0.0, 0.0, 0.0, 0.0), 0)


class _Shared(msgspec.Struct, frozen=True):
    """What the leader sends beside the tensors."""

    progress: RankProgress
    loss_scale: ScaleState


def sync_state(trainer: "Trainer") -> tuple[RankProgress, bool]:
    """Where this rank is once all hold the same state; True if it took over another's step.

    Every rank must call it. Tensors and the loss scale are loaded on the way.
    """
    group, strategy, own = trainer.mesh.data, trainer.strategy, trainer.progress
    is_sure = trainer.loop is None or trainer.loop.is_sure
    told = [*own.place, len(own.evaluations), own.writes_record, strategy.newcomer_step(), is_sure]
    rows = group.all_gather_numbers(told)
    places = [row[:3] for row in rows]
    furthest = max(places)
    writers = [rank for rank, row in enumerate(rows) if row[3]] or [places.index(furthest)]
    is_first = trainer.mesh.tensor.rank == trainer.mesh.pipeline.rank == 0
    writes = is_first and group.rank == writers[0]  # one in all, however models are cut
    # After the first batch, newcomers and others hold the same: the first weights.
    served = int(min(row[4] for row in rows))
    if not furthest[0] and served > 1:
        raise AllWorkersLost(
            "Every worker was lost at once, and what they held beside the servers with them.",
            served,  # which only servers can tell
        )
    own = msgspec.structs.replace(own, writes_record=writes, served=served)
    leader = _leader(rows, furthest)
    if min(places) == furthest and not trainer.loss_scale.dynamic:
        return own, False
    theirs = _share(trainer, leader)
    if min(places) == furthest:
        return own, False
    if min(place[:2] for place in places) == furthest[:2]:  # all hold the step
        return msgspec.structs.replace(own, evaluations=theirs.evaluations), False
    faultpoint("handover.sharing", theirs.step)
    furthest_ranks = [rank for rank, place in enumerate(places) if place[:2] == furthest[:2]]
    trainer.consistency.agree_on_state(furthest_ranks, theirs.step)
    own_state = strategy.newcomer_state()
    if trainer.loop is not None:
        own_state = trainer.loop.for_newcomer(trainer, own_state)
    state = broadcast_state(group, leader, with_stream_position(trainer, own_state))
    if not strategy.in_lockstep:
        return _join(trainer, own, theirs, MemorySource(state))
    if own.place < theirs.place:
        strategy.join(MemorySource(state), theirs.step)
        take_stream_position(trainer, MemorySource(state))
        if trainer.loop is not None:
            trainer.loop.join(trainer, MemorySource(state))
    took_over = own.step < theirs.step  # not if it was behind by a phase of a step
    return msgspec.structs.replace(theirs, writes_record=writes, served=served), took_over


def _leader(rows: list[list[float]], furthest: list[float]) -> int:
    """The lowest rank of those that are furthest and hold what a script's loop made of it."""
    able = [rank for rank, row in enumerate(rows) if row[:3] == furthest and row[5]]
    if not able:
        raise ShoalError(
            f"Every rank that had run the script's loop after step {int(furthest[0])} was lost, "
            "and with them what it left in trainer.state. Start the script again; with "
            "checkpoints=DIRECTORY and resume=True it goes on from the newest."
        )
    return able[0]


def _join(
    trainer: "Trainer", own: RankProgress, theirs: RankProgress, state: MemorySource
) -> tuple[RankProgress, bool]:
    """Out of lockstep each goes on from its own step; a newcomer from where its seat had come."""
    is_new = not own.step
    if is_new:
        step = trainer.strategy.newcomer_step()
        trainer.strategy.join(state, step)
        take_stream_position(trainer, state)
        info = None if theirs.last_info is None else theirs.last_info._replace(step=step)
        own = msgspec.structs.replace(own, step=step, last_info=info)
    if is_new and own.step > theirs.step:
        # What follows the step needs all, and no other rank is there: it is still to be done.
        info = own.last_info or UNKNOWN._replace(step=own.step)
        stopped = current_requests(trainer.strategy).stop
        return msgspec.structs.replace(own, last_info=info, stopped=stopped), True
    if own.step == theirs.step:
        own = msgspec.structs.replace(own, evaluations=theirs.evaluations, stopped=theirs.stopped)
    elif own.step == theirs.past_evaluations[0]:
        # An evaluation needs all ranks, so what came after a step that one has left is over.
        own = msgspec.structs.replace(own, evaluations=theirs.past_evaluations[1])
    return own, is_new and own.step == theirs.step


def _share(trainer: "Trainer", leader: int) -> RankProgress:
    """The leader's progress; and its loss scale, which some may have lowered for a lost step.
    Out of lockstep each replica has its own."""
    own = msgspec.msgpack.encode(_Shared(trainer.progress, trainer.loss_scale.state))
    content = broadcast_bytes(trainer.mesh.data, leader, own)
    shared = msgspec.msgpack.decode(content, type=_Shared)
    if trainer.strategy.in_lockstep or not trainer.progress.step:
        trainer.loss_scale.load(shared.loss_scale)
    return shared.progress
