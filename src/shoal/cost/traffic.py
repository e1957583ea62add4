"""The messages that a rank sends in a step.

The figures follow the strategies line by line (`sync/`, `training/compute.py`), with the sizes of
`rank.py`; those of an outer optimizer are in `outer.py`. The bytes of a message are those that
leave this rank: of an all-reduce over n ranks, 2(n-1)/n of the tensor. Gathers of zero=3 are
FSDP2's. Evaluation, and the messages of a start or a recovery, are not counted.
"""

from collections.abc import Sequence

import msgspec

from shoal.comm.collectives import Group, bytes_of_all_reduce
from shoal.comm.reduce import TreeReduce
from shoal.comm.tree import Block
from shoal.cost import outer
from shoal.cost.rank import PlanFacts, Rank
from shoal.parallel.pipeline.stages import rank_of_stage
from shoal.plans.plan import Plan
from shoal.sync.local import NUM_WINDOW_NUMBERS
from shoal.sync.rounds import blocks_by_rank, most_rounds
from shoal.sync.step_metadata import metadata_lengths

DOUBLE, SINGLE = 8, 4  # bytes


class Message(msgspec.Struct, frozen=True):
    """The messages of one kind in a step. `num_bytes` leave this rank."""

    what: str
    axis: str
    how: str
    count: int
    num_bytes: int


def rank_messages(rank: Rank, norm_blocks: int) -> list[Message]:
    """All messages of a rank in a step. `norm_blocks` are the norm blocks of all ranks."""
    if rank.plan.local_steps > 1:
        return _averages(rank)
    sent = [*_gradients(rank), *_pipeline(rank), *_tensor(rank), metadata_message(rank)]
    if rank.facts.clips and (_is_cut(rank.plan) or rank.plan.zero):
        sent.append(_all_reduce("gradient norm", "world", [norm_blocks * SINGLE], rank))
    if rank.plan.precision == "fp16" and (_is_cut(rank.plan) or rank.plan.zero):
        sent.append(_all_reduce("is it finite", "world", [rank.plan.num_ranks * DOUBLE], rank))
    sent.append(changed_buffers(rank))
    return [message for message in sent if message.count]


def _gradients(rank: Rank) -> list[Message]:
    if rank.num_replicas == 1:
        return []
    if rank.plan.zero == 3:
        return _gathers(rank)
    if rank.plan.zero:
        return _scatters(rank)
    if rank.plan.sums == "ring":
        flat = [sum(p.num_bytes for p in bucket) for bucket in rank.buckets]
        return [_all_reduce("gradients", "data", flat, rank)]
    rows = [(sum(p.num_elements for p in b), b[0].dtype.itemsize) for b in rank.buckets]
    return [_in_tree("gradients", rows, rank.tree, rank)]


def _scatters(rank: Rank) -> list[Message]:
    """zero=1 sends once, zero=2 after every round; parameters come back once."""
    times, tree, n = 1, rank.tree, rank.num_replicas
    if rank.plan.zero == 2:
        times, tree = most_rounds(rank.num_rounds, n), blocks_by_rank(n, n)
    own = sum(shard for _, shard in rank.flat_buffer_bytes)
    elsewhere = sum(size for size, _ in rank.flat_buffer_bytes) - own
    most = max(len(blocks) for blocks in tree)
    return [
        Message(
            "gradients",
            "data",
            "all-to-all",
            times * most * len(rank.flat_buffers),
            times * len(tree[rank.place.data]) * elsewhere,
        ),
        Message("parameters", "data", "gather", len(rank.flat_buffers), own * (n - 1)),
    ]


def _gathers(rank: Rank) -> list[Message]:
    """Of FSDP2: a unit is gathered for forward and again for backward, unless it was kept."""
    units, n = rank.gathered_units(), rank.num_replicas
    units_sent = [size for size in units if size]
    pieces = len(rank.rounds) * rank.plan.num_microbatches
    again = [] if rank.stages else [size for size in units[:-1] if size]
    gathered = [*units_sent, *again]
    rest = [p for p in rank.trained if not p.is_sharded]
    kinds = [sum(p.num_bytes for p in rest if p.dtype == d) for d in {p.dtype for p in rest}]
    found = [
        Message("parameters", "data", "all-gather", *_times(pieces, gathered, n)),
        Message("gradients", "data", "reduce-scatter", *_times(pieces, units_sent, n)),
    ]
    return [*found, _all_reduce("gradients left whole", "data", kinds, rank)]


def _times(pieces: int, units: Sequence[int], n: int) -> tuple[int, int]:
    return pieces * len(units), pieces * sum(size // n * (n - 1) for size in units)


def _pipeline(rank: Rank) -> list[Message]:
    """Values to the next stage, their gradients to the one before, and sums of tied parameters."""
    found, plan = rank.facts.survey.stages, rank.plan
    if found is None:
        return []
    times = len(rank.rounds) * plan.num_microbatches
    forward, backward = [], []
    own = {stage.index for stage in rank.stages}
    for stage in rank.stages:
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
    for p in rank.trained:
        holders = holders_of(p.name, rank.facts)
        if len(holders) > 1:
            count += len(rank.rounds)
            num_bytes += len(rank.rounds) * bytes_of_all_reduce(p.num_bytes, len(holders))
    return [*sent, Message("tied gradients", "pipeline", "all-reduce", count, num_bytes)]


def holders_of(name: str, facts: PlanFacts) -> list[int]:
    """The pipeline ranks that hold a parameter."""
    found, plan = facts.survey.stages, facts.plan
    if found is None:
        return [0]
    users = found.holders[name]
    return sorted({rank_of_stage(s, plan.pipeline, plan.schedule) for s in users})


def _tensor(rank: Rank) -> list[Message]:
    moves = rank.facts.moves
    own = (
        [moves[s.index] for s in rank.stages if s.index in moves]
        if rank.stages
        else [*moves.values()]
    )
    times = len(rank.rounds) * rank.plan.num_microbatches
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


def metadata_message(rank: Rank) -> Message:
    """Losses, times and requests of all ranks; of a data group, what was touched and changed."""
    plan = rank.plan
    counts = len(rank.trained), len(rank.facts.buffers)
    of_all, of_part = map(sum, metadata_lengths(plan.num_pieces, plan.num_ranks, *counts))
    if not _is_cut(plan):
        return _all_reduce("losses and flags", "world", [(of_all + of_part) * DOUBLE], rank)
    message = _all_reduce("losses and flags", "world", [of_all * DOUBLE], rank)
    more = _all_reduce("", "data", [of_part * DOUBLE] if of_part else [], rank)
    return msgspec.structs.replace(
        message, count=message.count + more.count, num_bytes=message.num_bytes + more.num_bytes
    )


def changed_buffers(rank: Rank) -> Message:
    changed = rank.changed_elements()
    rows = [(changed, DOUBLE)] if changed else []
    return _in_tree("changed buffers", rows, rank.piece_tree, rank)


def _averages(rank: Rank) -> list[Message]:
    """The messages of a window of local steps; without fragments, all in its last step."""
    n, plan, kinds = rank.num_replicas, rank.plan, {SINGLE: rank.facts.averaged_buffers}
    for p in rank.parameters:
        if p.dtype.is_floating_point and not plan.has_anchor:
            kinds[p.dtype.itemsize] = kinds.get(p.dtype.itemsize, 0) + p.num_elements
    rows = [(count, size) for size, count in kinds.items() if count]
    what, times = "buffers" if plan.has_anchor else "weights", f"once in {plan.local_steps} steps"
    sent = [
        _in_tree(f"{what}, {times}", rows, blocks_by_rank(n, n), rank),
        _all_reduce("losses and flags", "data", [NUM_WINDOW_NUMBERS * n * DOUBLE], rank),
    ]
    if plan.has_anchor:
        sent.insert(0, _outer_gradients(rank, f"outer gradients, {times}"))
    if plan.fragments == 1 and not plan.num_servers:
        sent.append(_all_reduce("that all have it", "data", [n * DOUBLE], rank))
    kept = sent if plan.waits_for_all else sent[:1]  # else replicas send each other nothing
    return [message for message in kept if message.count]


def _outer_gradients(rank: Rank, what: str) -> Message:
    """The outer gradients of all fragments, each of which is sent in another step."""
    if rank.plan.num_servers:
        return Message(what, "servers", "push", *outer.push_traffic(rank))
    if rank.plan.codec != "none":
        return Message(what, "data", "all-to-all, gather", *outer.packed_traffic(rank))
    tree = blocks_by_rank(rank.num_replicas, rank.num_replicas)
    return _in_tree(what, outer.outer_buckets(rank), tree, rank)


def _in_tree(
    what: str, rows: Sequence[tuple[int, int]], tree: Sequence[Sequence[Block]], rank: Rank
) -> Message:
    """Sums in tree order (`comm/reduce.py`); `rows` are (elements, bytes of one)."""
    n, data = rank.num_replicas, rank.place.data
    if n == 1 or any_order(tree):
        return _all_reduce(what, "data", [count * size for count, size in rows], rank)
    num_bytes = num_messages = 0
    most, at_once = max(len(blocks) for blocks in tree), TreeReduce(Group(), tree).at_once
    for count, size in rows:
        own = count * (data + 1) // n - count * data // n
        if at_once(count * size):
            num_bytes += len(tree[data]) * count * (n - 1) * size
        else:
            num_bytes += (len(tree[data]) * (count - own) + own * (n - 1)) * size
        num_messages += 1 if at_once(count * size) else most + 1
    return Message(what, "data", "all-to-all, gather", num_messages, num_bytes)


def _all_reduce(what: str, axis: str, sizes: Sequence[int], rank: Rank) -> Message:
    n = rank.num_replicas if axis == "data" else rank.plan.num_ranks
    if n == 1:
        return Message(what, axis, "all-reduce", 0, 0)
    num_bytes = sum(bytes_of_all_reduce(size, n) for size in sizes)
    return Message(what, axis, "all-reduce", len(sizes), num_bytes)


def _is_cut(plan: Plan) -> bool:
    return plan.tensor * plan.pipeline > 1


def any_order(tree: Sequence[Sequence[Block]]) -> bool:
    """Whether each sum has two terms, so that an all-reduce gives the same bits."""
    return TreeReduce(Group(), tree).any_order
