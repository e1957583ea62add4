"""What parameter servers cost: what a worker sends and holds, and what each server does.

By the layout that workers and servers agree on themselves (`sync/server/layout.py`). Counted are
gradients and parameters, also where they are not sent but read in memory that a host shares; the
few bytes of the questions around them are not.
"""

from collections.abc import Sequence

import msgspec

from shoal.comm.tree import Block, blocks_of
from shoal.explain.costs import Amount, Memory, Message, changed_buffers, most_sums, tail
from shoal.explain.lookups import rows_held, sent_by_server, sent_by_worker
from shoal.explain.rank import Facts, Local, Rank
from shoal.sync.server.copies import kept_by
from shoal.sync.server.layout import Layout, lay_out


class ServerRow(msgspec.Struct, frozen=True):
    """One server: the elements that its optimizers step on, what it holds, sends in a step."""

    server: int
    num_stepped: int
    memory: Memory
    messages: list[Message]


def worker_memory(rank: Rank) -> Memory:
    """A worker keeps no state of the optimizer; its gradients stand where servers read them."""
    layout, num_rows = _layout(rank.facts, rank.trained), _num_rows(rank)
    sums = most_sums(len(rank.rounds)) if len(rank.rounds) > 1 else 0
    sizes = zip(layout.shelves, layout.itemsizes, strict=True)
    largest = max((shelf.starts[-1] * size for shelf, size in sizes), default=0)
    rows = "for the servers" + (f", {num_rows} subtrees" if num_rows > 1 else "")
    words = f"{sums} partial sums of gradients" if sums else "the largest bucket's gradients"
    return Memory(
        Amount(sum(p.num_bytes for p in rank.parameters), "what this rank holds"),
        Amount(layout.row_places(num_rows)[-1], rows),
        Amount(0, "on the servers"),
        Amount(2 * rank.buffer_bytes(), "all, and a copy to go back to"),
        Amount(sums * sum(p.num_bytes for p in rank.trained) or largest, words),
    )


def worker_messages(rank: Rank) -> list[Message]:
    layout = _layout(rank.facts, rank.trained)
    num_bytes = _num_rows(rank) * sum(key.num_bytes for key in layout.keys)
    sent = [Message("gradients", "servers", "push", len(layout.keys), num_bytes)]
    sent += sent_by_worker(rank.facts.tables, rank.rounds, _blocks(rank), rank.plan.num_servers)
    if rank.plan.bound == 0:  # else workers tell each other nothing
        sent += [tail(rank), changed_buffers(rank)]
    return [message for message in sent if message.count]


def server_rows(facts: Facts) -> list[ServerRow]:
    trained = Rank(facts, 0).trained
    layout = _layout(facts, trained)
    return [_server_row(facts, trained, layout, n) for n in range(facts.plan.num_servers)]


def _server_row(facts: Facts, trained: Sequence[Local], layout: Layout, number: int) -> ServerRow:
    plan, num_servers = facts.plan, facts.plan.num_servers
    own, held = [number], _bytes_of(layout, [number])
    own += kept_by(number, num_servers, plan.copies)
    num_stepped = state = 0
    for segment in (s for n in own for key in layout.held_by(n) for s in layout.segments(key)):
        p = trained[segment.parameter]
        shape = p.shape if segment.length == p.num_elements else (segment.length,)
        num_stepped += segment.length
        state += sum(kept.num_bytes(shape) for kept in facts.state.get(p.name, ()))
    others = "".join(f", and of server {n}" for n in own[1:])
    rows = 0  # of tables, in bytes
    for name, use in facts.tables.items():
        count = rows_held(use, number, num_servers)
        whole = next(p for p in facts.parameters if p.name == name)
        num_stepped += count * whole.shape[1]
        state += sum(kept.num_bytes((count, whole.shape[1])) for kept in facts.state.get(name, ()))
        rows += count * use.row_bytes
    values = sum(layout.value_places(n)[-1] for n in own)
    memory = Memory(
        Amount(values + rows, f"its part of all{others}"),
        Amount(_bytes_of(layout, own), "of the last step"),
        Amount(state, f"of {num_stepped:,} elements"),
        Amount(0, "at the workers"),
        Amount(held, "sums over pieces"),
    )
    num_ranks = plan.num_ranks
    told = [Message("parameters", "workers", "pull", num_ranks, num_ranks * held)]
    if plan.copies > 1:
        count = (1 if plan.bound == 0 else num_ranks) * (plan.copies - 1)
        told.append(Message("sums", "servers", "copy", count, count * held))
    looked = sent_by_server(facts.tables, number, num_servers)
    return ServerRow(number, num_stepped, memory, [*told, looked] if looked.count else told)


def _bytes_of(layout: Layout, servers: Sequence[int]) -> int:
    return sum(layout.keys[key].num_bytes for n in servers for key in layout.held_by(n))


def _layout(facts: Facts, trained: Sequence[Local]) -> Layout:
    sizes = [(p.num_elements, p.dtype.itemsize, p.dtype) for p in trained]
    return lay_out(sizes, facts.is_element_wise, facts.plan.num_servers)


def _num_rows(rank: Rank) -> int:
    return len(_blocks(rank))


def _blocks(rank: Rank) -> list[Block]:
    """The sums that a worker pushes apart, for the servers to add up in the order of the tree."""
    if rank.plan.bound == 0:
        return rank.tree[rank.place.data]
    own = blocks_of(range(len(rank.rounds)))
    return [Block(block.first + rank.rounds.start, block.num_pieces) for block in own]
