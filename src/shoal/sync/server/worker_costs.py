"""What a worker of servers sends and holds: the rank that speaks with them, and its others.

Gradients and parameters count as sent also where they are read in memory that a host shares; the
few bytes of the requests around them do not count. Pure. What servers do: `costs.py`.
"""

from shoal.plans.keys import HALF_CODECS
from shoal.sync.costs import (
    DOUBLE,
    SINGLE,
    Amount,
    MemoryUse,
    Message,
    StepCosts,
    added_up,
    all_reduce_message,
    buffers_held,
    changed_buffers,
    metadata_message,
    most_sums,
    tree_message,
)
from shoal.sync.rank_layout import LocalParameter, RankLayout
from shoal.sync.rounds import blocks_by_rank
from shoal.sync.server.costs import layout_on_servers, pushed_blocks
from shoal.sync.server.lookup_costs import sent_by_worker
from shoal.sync.server.packing import is_packed, packed_bytes
from shoal.sync.server.parameter_views import parameter_addresses


def worker_costs(layout: RankLayout) -> StepCosts:
    """Gradients out, each subtree of the worker's pieces apart; optimizer state is elsewhere."""
    blocks, plan = pushed_blocks(layout), layout.plan
    keys = layout_on_servers(layout).keys
    num_bytes = len(blocks) * sum(min(key.num_bytes, packed_bytes(plan.codec, key)) for key in keys)
    sums = [
        sum_within(layout),
        Message("gradients", "servers", "push", len(keys) * bool(blocks), num_bytes),
        spread_message(layout),
        *shared_messages(layout),
        *sent_by_worker(layout, blocks),
    ]
    told = []
    if plan.staleness_bound == 0 or plan.num_ranks_apart > 1:  # else workers tell nothing
        told = [metadata_message(layout), changed_buffers(layout), *told_within(layout)]
    return StepCosts(0, _held(layout, max(1, len(blocks))), sums, told)


def spread_message(layout: RankLayout) -> Message:
    """The trained weights, to the ranks of a replica that hold the same."""
    count, number = layout.line("within")
    return _broadcast("weights", "within", _pulled(layout), 0 if number else count - 1)


def shared_messages(layout: RankLayout) -> list[Message]:
    """Out of lockstep, what ranks of a replica hold whole that have unlike parts: of the first."""
    plan, found = layout.plan, layout.facts.survey
    if plan.waits_for_all:
        return []
    pulled, told = _pulled(layout), list[Message]()
    if found.tensor is not None:
        uncut = [p for p in pulled if p.name not in found.tensor.cuts]
        others = 0 if layout.place.tensor else plan.tensor - 1
        told.append(_broadcast("weights of all", "tensor", uncut, others))
    for ranks in sorted({layout.facts.pipeline_ranks(p.name) for p in pulled}):
        tied = [p for p in pulled if layout.facts.pipeline_ranks(p.name) == ranks]
        others = len(ranks) - 1 if layout.place.pipeline == ranks[0] else 0
        if len(ranks) > 1:
            told.append(_broadcast("weights of several stages", "pipeline", tied, others))
    return told


def _pulled(layout: RankLayout) -> list[LocalParameter]:
    return [p for p in layout.trained if not layout.plan.has_anchor or p.dtype.is_floating_point]


def _broadcast(what: str, axis: str, held: list[LocalParameter], others: int) -> Message:
    kinds, num_bytes = {p.dtype for p in held}, sum(p.num_bytes for p in held)
    return Message(what, axis, "broadcast", len(kinds) * bool(others), others * num_bytes)


def sum_within(layout: RankLayout) -> Message:
    """The gradients of the ranks of a replica that hold the same, where they push in every step."""
    count, _ = layout.line("within")
    rounds = layout.plan.num_rounds // layout.plan.num_apart
    places = layout_on_servers(layout)
    sizes = [flat.starts[-1] for flat in places.flat_buffers] if count > 1 else []
    rows = list(zip(sizes, places.itemsizes, strict=False))
    return tree_message("gradients", rows, blocks_by_rank(rounds, count), layout, "within")


def told_within(layout: RankLayout) -> list[Message]:
    """What the ranks of a replica tell each other beside losses: the norms of blocks, whether all
    is finite, and after which step they stop."""
    plan, told = layout.plan, list[Message]()
    if plan.num_ranks_apart == 1:
        return told
    if layout.facts.clips:
        size = layout.facts.norm_blocks * SINGLE
        told.append(all_reduce_message("gradient norm", "replica", [size], layout))
    size = plan.num_ranks_apart * DOUBLE
    if plan.precision == "fp16":
        told.append(all_reduce_message("is it finite", "replica", [size], layout))
    if plan.staleness_bound != 0:
        told.append(all_reduce_message("when to stop", "replica", [2 * size], layout))
    return told


def _held(layout: RankLayout, num_rows: int) -> MemoryUse:
    """A worker's gradients are in memory that servers read.

    In lockstep a parameter that one server holds is read in shared memory, without a copy.
    """
    places = layout_on_servers(layout)
    sums = most_sums(len(layout.rounds)) if len(layout.rounds) > 1 else 0
    sizes = zip(places.flat_buffers, places.itemsizes, strict=True)
    largest = max((flat.starts[-1] * size for flat, size in sizes), default=0)
    rows = "for the servers" + (f", {num_rows} subtrees" if num_rows > 1 else "")
    held = sum(p.num_bytes for p in layout.parameters)
    read = 0
    if layout.plan.staleness_bound == 0 and not layout.line("within")[1]:
        read = sum(layout.trained[number].num_bytes for number in parameter_addresses(places))
    words = f"{sums} partial sums of gradients" if sums else "the largest bucket's gradients"
    extra = Amount(sums * layout.gradient_bytes or largest, words)
    if layout.plan.codec not in ("none", *HALF_CODECS):
        packed = [key for key in places.keys if is_packed(layout.plan.codec, key)]
        count = 2 * num_rows * sum(key.stop - key.start for key in packed)
        extra = added_up(extra, Amount(SINGLE * count, "what packing did not send, and a copy"))
    return MemoryUse(
        Amount(held - read, "but what it reads at the servers" if read else "what this rank holds"),
        Amount(places.row_places(num_rows)[-1], rows),
        Amount(0, "on the servers"),
        buffers_held(layout),
        extra,
    )
