"""What a rank holds and sends whose parameters and state are those of all ranks of its host.

Read next: `host_state.py`, for what is where; `costs.py`.
"""

from shoal.sync.costs import (
    Amount,
    MemoryUse,
    StepCosts,
    added_up,
    agreement,
    buffers_held,
    partial_sums,
    sums_by_piece,
    sums_in_step,
)
from shoal.sync.host_state import CHUNK, MemoryLayout
from shoal.sync.rank_layout import RankLayout


def costs_of_shared(layout: RankLayout) -> StepCosts:
    """Of what all hold once, a rank counts its share: the sum over ranks is what the host holds."""
    held, n = memory_of(layout), layout.num_replicas
    size = layout.trained[0].dtype.itemsize if layout.trained else 0
    row, own = held.length * size, len(held.blocks[layout.place.data])
    frozen = sum(p.num_bytes for p in layout.parameters if not p.is_trained)
    largest = max((buffer.starts[-1] for buffer in held.buffers), default=0) * size
    counts = [kept for each in layout.facts.state.values() for kept in each if kept.dims == ()]
    memory = MemoryUse(
        Amount(row // n + frozen, f"1/{n} of what all hold together"),
        Amount(own * row, "where all read them" + (f", x {own} subtrees" if own > 1 else "")),
        Amount(
            held.num_slots * row // n + sum(kept.itemsize for kept in counts),
            f"1/{n} of what all hold together",
        ),
        buffers_held(layout),
        added_up(
            partial_sums(layout, sums_in_step(layout, alone=False)),
            Amount((2 + held.num_slots) * CHUNK * size, "the log of a chunk, and its sum"),
            Amount(largest, "the largest bucket's gradients"),
        ),
    )
    stepped = sum(s.length for s in held.segments(layout.place.data))
    return StepCosts(stepped, memory, [], agreement(layout, apart=True))


def memory_of(layout: RankLayout) -> MemoryLayout:
    """As `HostState.make` lays it out."""
    slots = [sum(kept.dims is None for kept in each) for each in layout.facts.state.values()]
    lengths = [p.num_elements for p in layout.trained]
    blocks = layout.tree
    if not sums_by_piece(layout.plan):
        blocks = layout.tree_of_ranks
    return MemoryLayout.of(lengths, max(slots, default=0), blocks)
