"""What messages between the ranks of a host take in memory, beside what is sent. Pure.

Ranks on cores meet in shared memory (`comm/shared_rounds.py`): each group has a ring of slots for
every rank, and two ranks of a pipeline a mailbox for each direction, whose slots are all used in
turn. What two share counts half for each. A pipeline also keeps what it has sent until it surely
has arrived (`parallel/pipeline/messages.py`).
"""

from collections.abc import Iterator

from shoal.comm.shared_rounds import mail_bytes, segment_bytes
from shoal.cost.profile import Profile
from shoal.parallel.pipeline.messages import most_leaving
from shoal.parallel.pipeline.stages import StagePlan, StageSpec, rank_of_stage
from shoal.plans.plan import Plan


def group_bytes(plan: Plan) -> int:
    """A rank's part of the rings of its groups: of all ranks, and of each axis that is not all."""
    axes = [n for n in (plan.num_replicas, plan.tensor, plan.pipeline) if n < plan.num_ranks]
    return sum(segment_bytes(n) // n for n in (plan.num_ranks, *axes) if n > 1)


def pipeline_bytes(profile: Profile, plan: Plan, stages: StagePlan, rank: int) -> int:
    """What a rank of a pipeline holds for its messages: its half of mailboxes, and what has left.
    Pieces of an evaluation go through the same mailboxes, forward."""
    largest: dict[tuple[int, int], float] = {}
    own = [s for s in stages.stages if _rank_of(s, plan) == rank]
    for source, to, size in _letters(profile, plan, stages):
        if rank in (source, to):
            largest[source, to] = max(size, largest.get((source, to), 0.0))
    held = sum(mail_bytes(round(size)) for size in largest.values()) // 2
    samples = profile.batch_size / plan.num_pieces
    sent = [_bytes(profile, _back(profile, s), samples) for s in own if s.index]
    kept = min(most_leaving(plan.pipeline), plan.num_microbatches * len(own))
    return held + round(kept * max(sent, default=0.0))


def received_bytes(profile: Profile, stage: StageSpec, samples: float) -> float:
    """Of the values that a stage is given, which it keeps until its backward."""
    return _bytes(profile, stage.received, samples)


def _letters(profile: Profile, plan: Plan, stages: StagePlan) -> Iterator[tuple[int, int, float]]:
    """The largest message from each stage to the next and back: who sends, to whom, bytes."""
    samples = profile.batch_size / plan.num_pieces
    forward = max(samples, profile.evaluation.num_samples)
    for one, after in zip(stages.stages, stages.stages[1:]):
        here, there = _rank_of(one, plan), _rank_of(after, plan)
        if here != there:
            yield here, there, max((_bytes(profile, (n,), forward) for n in one.sent), default=0.0)
            back = _back(profile, after)
            yield there, here, max((_bytes(profile, (n,), samples) for n in back), default=0.0)


def _back(profile: Profile, stage: StageSpec) -> tuple[int, ...]:
    """The values whose gradients a stage gives back."""
    return tuple(n for n in stage.received if profile.values[n].needs_gradient)


def _bytes(profile: Profile, numbers: tuple[int, ...], samples: float) -> float:
    return sum(profile.values[n].num_bytes.at(samples) for n in numbers)


def _rank_of(stage: StageSpec, plan: Plan) -> int:
    return rank_of_stage(stage.index, plan.pipeline, plan.schedule)
