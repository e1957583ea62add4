"""What a step costs a rank: the messages that it sends and the bytes that it holds.

Each strategy declares its own beside the code that sends and holds them (`Strategy.costs`), with
the sizes of a `RankLayout`. Here is what they share: the form of the answer, sums in the order of
the tree, the small messages on which ranks agree, optimizer state, partial sums.

The bytes of a message are those that leave the rank: of an all-reduce over n ranks, 2(n-1)/n of the
tensor. Evaluation, and the messages of a start or a recovery, are not counted; what a pipeline and
the tensor axis send is not the strategy's (`cost/traffic.py`).
"""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from shoal.comm.collectives import Group, bytes_of_all_reduce
from shoal.comm.reduce import TreeReduce
from shoal.comm.tree import Block, PieceSum
from shoal.numerics.offload import PART_BYTES
from shoal.plans.plan import Plan
from shoal.sync.rank_layout import RankLayout
from shoal.sync.step_metadata import metadata_lengths

DOUBLE, SINGLE = 8, 4  # bytes


class Message(msgspec.Struct, frozen=True):
    """The messages of one kind in a step. `num_bytes` leave this rank."""

    what: str
    axis: str
    how: str
    count: int
    num_bytes: int


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


class StepCosts(NamedTuple):
    """What one rank, or one server, steps on, holds and sends in a step."""

    num_stepped: int  # elements
    memory: MemoryUse
    sums: Sequence[Message]  # of gradients and parameters
    agreement: Sequence[Message] = ()  # on losses, flags, the norm and buffers

    @property
    def messages(self) -> list[Message]:
        """All that are sent, in the order of a step."""
        return [message for message in (*self.sums, *self.agreement) if message.count]


# ---- messages


def tree_message(
    what: str,
    rows: Sequence[tuple[int, int]],
    tree: Sequence[Sequence[Block]],
    layout: RankLayout,
    axis: str = "data",
) -> Message:
    """Sums in tree order (`comm/reduce.py`); `rows` are (elements, bytes of one)."""
    n, data = layout.line(axis)
    if n == 1 or any_order(tree):
        return all_reduce_message(what, axis, [count * size for count, size in rows], layout)
    num_bytes = num_messages = 0
    most, at_once = max(len(blocks) for blocks in tree), TreeReduce(Group(), tree).at_once
    for count, size in rows:
        own = count * (data + 1) // n - count * data // n
        if at_once(count * size):
            num_bytes += len(tree[data]) * count * (n - 1) * size
        else:
            num_bytes += (len(tree[data]) * (count - own) + own * (n - 1)) * size
        num_messages += 1 if at_once(count * size) else most + 1
    return Message(what, axis, "reduce-scatter, gather", num_messages, num_bytes)


def all_reduce_message(what: str, axis: str, sizes: Sequence[int], layout: RankLayout) -> Message:
    n, _ = layout.line(axis)
    if n == 1:
        return Message(what, axis, "all-reduce", 0, 0)
    num_bytes = sum(bytes_of_all_reduce(size, n) for size in sizes)
    return Message(what, axis, "all-reduce", len(sizes), num_bytes)


def any_order(tree: Sequence[Sequence[Block]]) -> bool:
    """Whether each sum has two terms, so that an all-reduce gives the same bits."""
    return TreeReduce(Group(), tree).any_order


def agreement(layout: RankLayout, apart: bool) -> list[Message]:
    """All on which ranks in lockstep agree beside the gradients (`rounds.py`).

    `apart`: ranks hold different parts of the gradient, so its norm and whether it is finite are
    agreed on too.
    """
    sent = [metadata_message(layout)]
    if layout.facts.clips and apart:
        size = layout.facts.norm_blocks * SINGLE
        sent.append(all_reduce_message("gradient norm", layout.world, [size], layout))
    # Of packed gradients too: what is not finite must not stay in what was not sent.
    checks = layout.plan.precision == "fp16" or layout.plan.packed_codec != "none"
    if checks and apart:
        size = layout.num_ranks * DOUBLE
        sent.append(all_reduce_message("is it finite", layout.world, [size], layout))
    return [*sent, changed_buffers(layout)]


def metadata_message(layout: RankLayout) -> Message:
    """Losses, times and requests of all ranks; of a data group, what was touched and changed."""
    plan = layout.plan
    counts = len(layout.trained), len(layout.facts.buffers)
    of_all, of_part = map(sum, metadata_lengths(layout.num_pieces, layout.num_ranks, *counts))
    if not plan.cuts_model:
        size = (of_all + of_part) * DOUBLE
        return all_reduce_message("losses and flags", layout.world, [size], layout)
    message = all_reduce_message("losses and flags", layout.world, [of_all * DOUBLE], layout)
    more = all_reduce_message("", "data", [of_part * DOUBLE] if of_part else [], layout)
    return msgspec.structs.replace(
        message, count=message.count + more.count, num_bytes=message.num_bytes + more.num_bytes
    )


def changed_buffers(layout: RankLayout) -> Message:
    changed = layout.changed_elements()
    rows = [(changed, DOUBLE)] if changed else []
    return tree_message("changed buffers", rows, layout.piece_tree, layout)


# ---- memory


def memory_of_parts(
    layout: RankLayout, gradients: Amount, extra: Amount, held: str = "what this rank holds"
) -> MemoryUse:
    """Of a rank whose optimizer steps on the parts of parameters that it holds, as they are."""
    return MemoryUse(
        Amount(sum(p.num_bytes for p in layout.parameters), held),
        gradients,
        optimizer_state(layout, [(p.name, p.shape) for p in layout.trained]),
        buffers_held(layout),
        extra,
    )


def as_parameters(layout: RankLayout) -> Amount:
    """Gradients where backward leaves them."""
    return Amount(layout.gradient_bytes, "as the parameters")


def buffers_held(layout: RankLayout) -> Amount:
    return Amount(2 * layout.buffer_bytes(), "all, and a copy to go back to")


def optimizer_state(layout: RankLayout, parts: Iterable[tuple[str, Sequence[int]]]) -> Amount:
    """Of what this rank's optimizer steps on: names of parameters, and shapes of parts of them."""
    state, stepped = layout.facts.state, list(parts)
    each = " or ".join(map(str, layout.facts.state_sizes))
    total = sum(kept.num_bytes(shape) for name, shape in stepped for kept in state.get(name, ()))
    num_stepped = sum(math.prod(shape) for _, shape in stepped)
    words = f"{each} bytes for each of {num_stepped:,} elements"
    if layout.plan.offload == "none":
        return Amount(total, words)
    return Amount(
        min(total, total * PART_BYTES // (layout.gradient_bytes or 1)),
        f"at a time, of {total:,} bytes in files: {words}",
    )


def partial_sums(layout: RankLayout, num_sums: int) -> Amount:
    """Of whole gradients, while pieces are computed."""
    words = f"{num_sums} partial sum{'s' * (num_sums > 1)} of gradients" if num_sums else ""
    return Amount(num_sums * layout.gradient_bytes, words)


def sums_in_round(layout: RankLayout) -> int:
    """The partial sums that a round of a pipeline needs."""
    size = layout.plan.num_microbatches
    return most_sums(size) if layout.plan.sums == "exact" and size > 1 else 0


def sums_in_step(layout: RankLayout, alone: bool) -> int:
    """Those that a step needs; if the rank is `alone`, the last one is the gradient."""
    in_round, rounds = sums_in_round(layout), len(layout.rounds)
    if rounds == 1 or not sums_by_piece(layout.plan):
        return in_round + (rounds > 1 and layout.plan.packed_codec != "none")
    return in_round + most_sums(rounds) - (alone and not in_round)


def sums_by_piece(plan: Plan) -> bool:
    """Whether pieces are added in one order for all numbers of ranks. A codec packs a rank's sum;
    of `zero=2` a rank keeps no more than one."""
    return plan.sums == "exact" and plan.packed_codec == "none" and plan.zero != 2


def most_sums(num_terms: int) -> int:
    """The most partial sums that the tree keeps at once, with the newest term."""
    made, most = PieceSum(range(num_terms)), 0
    for _ in range(num_terms):
        most = max(most, len(made.rows) + len(made.levels) + 1)
        made.push([])
    return most


def added_up(*amounts: Amount) -> Amount:
    """Those that have a formula are named."""
    named = [amount.formula for amount in amounts if amount.formula not in ("", "nothing")]
    return Amount(sum(amount.num_bytes for amount in amounts), ", ".join(named) or "nothing")
