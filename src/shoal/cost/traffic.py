"""The messages of the mesh that a model is cut over: those of its pipeline and of its tensor axis.

They are the same whatever strategy sums the gradients; what that one sends, it declares itself
(`sync/costs.py`). The bytes of a message are those that leave this rank.
"""

from collections.abc import Mapping

from shoal.comm.collectives import bytes_of_all_reduce
from shoal.cost.tensor import TensorTraffic
from shoal.sync.costs import Message
from shoal.sync.rank_layout import RankLayout


def mesh_messages(layout: RankLayout, moves: Mapping[int, TensorTraffic]) -> list[Message]:
    """What a rank sends to other parts of its replica; `moves` are the tensor axis's, by stage."""
    return [*_pipeline(layout), *_tensor(layout, moves)]


def _pipeline(layout: RankLayout) -> list[Message]:
    """Values to the next stage, their gradients to the one before, and sums of tied parameters."""
    found = layout.facts.survey.stages
    if found is None:
        return []
    times = _pieces_in_step(layout)
    forward, backward = [], []
    own = {stage.index for stage in layout.stages}
    for stage in layout.stages:
        if stage.index + 1 not in own:
            forward += [found.tape.values[n].num_bytes for n in stage.sent]
        if stage.index - 1 not in own:
            needed = [n for n in stage.received if n in found.tape.need_gradient]
            backward += [found.tape.values[n].num_bytes for n in needed]
    sent = [
        Message("activations", "pipeline", "send", times * len(forward), times * sum(forward)),
        Message(
            "their gradients", "pipeline", "send", times * len(backward), times * sum(backward)
        ),
    ]
    count = num_bytes = 0
    for p in layout.trained:
        holders = layout.facts.pipeline_ranks(p.name)
        if len(holders) > 1:
            rounds = times // layout.plan.num_microbatches
            count += rounds
            num_bytes += rounds * bytes_of_all_reduce(p.num_bytes, len(holders))
    return [*sent, Message("tied gradients", "pipeline", "all-reduce", count, num_bytes)]


def _tensor(layout: RankLayout, moves: Mapping[int, TensorTraffic]) -> list[Message]:
    own = (
        [moves[s.index] for s in layout.stages if s.index in moves]
        if layout.stages
        else [*moves.values()]
    )
    times = _pieces_in_step(layout)
    return [
        Message(
            "activations",
            "tensor",
            "all-reduce or gather",
            times * sum(m.num_forward for m in own),
            times * sum(m.forward_bytes for m in own),
        ),
        Message(
            "their gradients",
            "tensor",
            "all-reduce",
            times * sum(m.num_backward for m in own),
            times * sum(m.backward_bytes for m in own),
        ),
    ]


def _pieces_in_step(layout: RankLayout) -> int:
    """Of this rank; of local steps, in a window."""
    return len(layout.rounds) * layout.plan.num_microbatches * layout.plan.local_steps
