"""The memory of a rank, in bytes.

The figures follow the strategies line by line (`sync/`, `training/compute.py`), with the sizes of
`rank.py`; those of an outer optimizer are in `outer.py`.
"""

import msgspec

from shoal.comm.buckets import WINDOW_BYTES
from shoal.comm.tree import PieceSum, blocks_of
from shoal.cost import outer
from shoal.cost.rank import Rank
from shoal.cost.traffic import any_order
from shoal.numerics.offload import PART_BYTES
from shoal.sync.rounds import most_rounds


class Amount(msgspec.Struct, frozen=True):
    num_bytes: int
    formula: str


class MemoryUse(msgspec.Struct, frozen=True):
    """The memory of one rank or server, without activations. `extra` is what a step needs on top,
    estimated."""

    parameters: Amount
    gradients: Amount
    optimizer: Amount
    buffers: Amount
    extra: Amount

    @property
    def num_bytes(self) -> int:
        parts = (self.parameters, self.gradients, self.optimizer, self.buffers, self.extra)
        return sum(part.num_bytes for part in parts)


def rank_memory(rank: Rank) -> MemoryUse:
    """The memory of a rank."""
    parameters = sum(p.num_bytes for p in rank.parameters)
    gradients = sum(p.num_bytes for p in rank.trained)
    held, first = "what this rank holds", Amount(gradients, "as the parameters")
    if rank.plan.zero == 3:
        held = "a shard of each parameter"
    elif rank.plan.zero:
        parameters += sum(size for size, _ in rank.flat_buffer_bytes) - gradients
        held = "all, in flat buffers"
        own = sum(shard for _, shard in rank.flat_buffer_bytes)
        rows = _num_shards(rank)
        first = Amount(own * rows, "own shards" + (f" x {rows} terms" if rows > 1 else ""))
    elif rank.num_replicas > 1 and rank.plan.local_steps == 1:
        rows = len(rank.tree[rank.place.data]) if rank.plan.sums == "exact" else 1
        first = Amount(gradients * rows, "buckets" + (f" x {rows} subtrees" if rows > 1 else ""))
    buffers = rank.buffer_bytes()
    return MemoryUse(
        Amount(parameters, held),
        first,
        _state(rank),
        Amount(2 * buffers, "all, and a copy to go back to"),
        _extra(rank, gradients),
    )


def _num_shards(rank: Rank) -> int:
    """The partial sums that zero=2 keeps until the last piece is done."""
    if rank.plan.zero == 1:
        return 1
    return len(blocks_of(range(most_rounds(rank.num_rounds, rank.num_replicas))))


def _state_bytes(rank: Rank) -> int:
    state = rank.facts.state
    if rank.plan.zero in (1, 2):
        total = 0
        for s in rank.segments:
            p = rank.trained[s.parameter]
            shape = p.shape if s.length == p.num_elements else (s.length,)
            total += sum(kept.num_bytes(shape) for kept in state.get(p.name, ()))
        return total
    return sum(kept.num_bytes(p.shape) for p in rank.trained for kept in state.get(p.name, ()))


def _state(rank: Rank) -> Amount:
    parts = [[kept.itemsize for kept in k if kept.dims is None] for k in rank.facts.state.values()]
    each = " or ".join(map(str, sorted({sum(sizes) for sizes in parts})))
    total, words = _state_bytes(rank), f"{each} bytes for each of {rank.num_stepped:,} elements"
    if rank.plan.offload == "none":
        return Amount(total, words)
    stepped = sum(p.num_bytes for p in rank.trained) or 1
    return Amount(
        min(total, total * PART_BYTES // stepped),
        f"at a time, of {total:,} bytes in files: {words}",
    )


def _extra(rank: Rank, gradients: int) -> Amount:
    """What a step holds temporarily, at its peak."""
    plan = rank.plan
    if plan.zero == 3:
        return _extra_gathered(rank)
    num_sums = _num_sums(rank)
    words = [f"{num_sums} partial sum{'s' * (num_sums > 1)} of gradients"] if num_sums else []
    extra = num_sums * gradients
    if plan.local_steps > 1 and plan.has_anchor:
        num_bytes, named = outer.outer_memory(rank)
        extra += num_bytes
        words.append(named)
    elif plan.local_steps > 1:
        extra += sum(p.num_bytes for p in rank.parameters if p.dtype.is_floating_point)
        words.append("the weights of the last agreement")
    if rank.num_replicas > 1 and plan.local_steps == 1:
        window, largest = _in_flight(rank, gradients)
        if window:
            words.append("what is under way")
        if plan.zero or not num_sums:
            words.append("the largest bucket's gradients")
            extra += largest
        extra += window
    return Amount(extra, ", ".join(words) or "nothing")


def _num_sums(rank: Rank) -> int:
    """The partial sums of whole gradients that are kept while pieces are computed."""
    plan, size, rounds = rank.plan, rank.plan.num_microbatches, len(rank.rounds)
    exact = plan.sums == "exact"
    in_round = most_sums(size) if exact and size > 1 else 0
    if rounds == 1 or plan.zero == 2 or not exact:
        return in_round
    alone = rank.num_replicas == 1 or plan.local_steps > 1
    return in_round + most_sums(rounds) - (alone and not in_round)  # the last is the gradient


def _in_flight(rank: Rank, gradients: int) -> tuple[int, int]:
    """The bytes of messages in flight, and of the largest bucket."""
    if rank.plan.zero:
        sizes = [size for size, _ in rank.flat_buffer_bytes]
        return 2 * min(WINDOW_BYTES, sum(sizes)), max(sizes, default=0)
    sizes = [sum(p.num_bytes for p in bucket) for bucket in rank.buckets]
    rows = len(rank.tree[rank.place.data])
    scatters = rank.plan.sums == "exact" and not any_order(rank.tree)
    window = min(WINDOW_BYTES, rows * gradients) if scatters else 0
    return window, max(sizes, default=0)


def _extra_gathered(rank: Rank) -> Amount:
    units = rank.gathered_units()
    largest = max(units, default=0)
    if rank.stages:
        # Without a module around them all, FSDP2 keeps each unit until its backward pass.
        return Amount(sum(units) + largest, "all units gathered, the largest one's gradients")
    root, blocks = units[-1], sorted(units[:-1])[-2:]
    words = "two largest units and the rest of the model gathered, the largest one's gradients"
    return Amount(root + sum(blocks) + largest, words)


def most_sums(num_terms: int) -> int:
    """The most partial sums that the tree keeps at once, with the newest term."""
    made, most = PieceSum(range(num_terms)), 0
    for _ in range(num_terms):
        most = max(most, len(made.rows) + len(made.levels) + 1)
        made.push([])
    return most
