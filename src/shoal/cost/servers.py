"""The cost of parameter servers: what a worker sends and holds, and what each server does.

It uses the layout that workers and servers use themselves (`sync/server/layout.py`). Gradients and
parameters count as sent also where they are read in memory that a host shares; the few bytes of the
requests around them do not count.
"""

from collections.abc import Sequence

import msgspec

from shoal.comm.tree import Block, blocks_of
from shoal.cost.lookups import rows_held, sent_by_server, sent_by_worker, sum_bytes
from shoal.cost.memory import Amount, MemoryUse, most_sums
from shoal.cost.rank import LocalParameter, PlanFacts, Rank
from shoal.cost.traffic import Message, changed_buffers, metadata_message
from shoal.sync.server.layout import ParameterKey, ServerLayout, make_layout
from shoal.sync.server.packing import PACKED_BYTES, is_packed
from shoal.sync.server.parameter_views import parameter_addresses
from shoal.sync.server.replication import leaders_of


class ServerRow(msgspec.Struct, frozen=True):
    """One server: the elements that it steps on, what it holds, what it sends in a step."""

    server: int
    num_stepped: int
    memory: MemoryUse
    messages: list[Message]


def worker_memory(rank: Rank) -> MemoryUse:
    """A worker holds no optimizer state; its gradients are in memory that the servers read.

    In lockstep a parameter that one server holds is read in shared memory, without a copy.
    """
    layout, num_rows = _layout(rank.facts, rank.trained), _num_rows(rank)
    sums = most_sums(len(rank.rounds)) if len(rank.rounds) > 1 else 0
    sizes = zip(layout.flat_buffers, layout.itemsizes, strict=True)
    largest = max((flat.starts[-1] * size for flat, size in sizes), default=0)
    rows = "for the servers" + (f", {num_rows} subtrees" if num_rows > 1 else "")
    held = sum(p.num_bytes for p in rank.parameters)
    read = 0
    if rank.plan.staleness_bound == 0:
        read = sum(rank.trained[number].num_bytes for number in parameter_addresses(layout))
    words = f"{sums} partial sums of gradients" if sums else "the largest bucket's gradients"
    return MemoryUse(
        Amount(held - read, "but what it reads at the servers" if read else "what this rank holds"),
        Amount(layout.row_places(num_rows)[-1], rows),
        Amount(0, "on the servers"),
        Amount(2 * rank.buffer_bytes(), "all, and a copy to go back to"),
        Amount(sums * sum(p.num_bytes for p in rank.trained) or largest, words),
    )


def worker_messages(rank: Rank) -> list[Message]:
    layout = _layout(rank.facts, rank.trained)
    num_bytes = _num_rows(rank) * sum(_sent_bytes(key, rank.plan.codec) for key in layout.keys)
    sent = [Message("gradients", "servers", "push", len(layout.keys), num_bytes)]
    sent += sent_by_worker(rank, _blocks(rank))
    if rank.plan.staleness_bound == 0:  # else workers send each other nothing
        sent += [metadata_message(rank), changed_buffers(rank)]
    return [message for message in sent if message.count]


def _sent_bytes(key: ParameterKey, codec: str) -> int:
    if codec == "none" or not is_packed(key.itemsize):
        return key.num_bytes
    return PACKED_BYTES * (key.stop - key.start)


def server_rows(facts: PlanFacts) -> list[ServerRow]:
    trained = Rank(facts, 0).trained
    layout = _layout(facts, trained)
    return [_server_row(facts, trained, layout, n) for n in range(facts.plan.num_servers)]


def _server_row(
    facts: PlanFacts, trained: Sequence[LocalParameter], layout: ServerLayout, number: int
) -> ServerRow:
    plan, num_servers = facts.plan, facts.plan.num_servers
    own, held = [number], _bytes_of(layout, [number])
    own += leaders_of(number, num_servers, plan.copies)
    num_stepped = state = 0
    for segment in (s for n in own for key in layout.held_by(n) for s in layout.segments(key)):
        p = trained[segment.parameter]
        shape = p.shape if segment.length == p.num_elements else (segment.length,)
        num_stepped += segment.length
        if plan.local_steps == 1:
            state += sum(kept.num_bytes(shape) for kept in facts.state.get(p.name, ()))
        elif plan.outer_rates[1]:
            state += segment.length * max(4, p.dtype.itemsize)  # the outer momentum
    rows = 0  # of tables, in bytes
    for name, use in facts.tables.items():
        count = sum(rows_held(use, n, num_servers) for n in own)
        whole = next(p for p in facts.parameters if p.name == name)
        num_stepped += count * whole.shape[1]
        state += sum(kept.num_bytes((count, whole.shape[1])) for kept in facts.state.get(name, ()))
        rows += count * use.row_bytes
    sizes = [layout.value_places(n)[-1] for n in own]
    words = "its part of all"
    if plan.waits_for_all:
        sizes, words = [sizes[0], *sizes], f"{words}, two sets"
    words += "".join(f", and of server {n}" for n in own[1:])
    memory = MemoryUse(
        Amount(sum(sizes) + rows, words),
        Amount(_bytes_of(layout, own), "of the last step"),
        Amount(state, f"of {num_stepped:,} elements"),
        Amount(0, "at the workers"),
        Amount(held, "sums over pieces"),
    )
    num_ranks = plan.num_ranks
    who, count = ("workers", num_ranks) if plan.hosts == 1 else ("hosts", plan.hosts)
    sent = [Message("parameters", who, "pull", count, count * held)]
    looked = sent_by_server(facts.tables, number, num_servers)
    sent += [looked] if looked.count else []
    if plan.copies > 1:
        count = (1 if plan.staleness_bound == 0 else num_ranks) * (plan.copies - 1)
        summed = held + sum(sum_bytes(use, number, num_servers) for use in facts.tables.values())
        sent.append(Message("sums", "servers", "copy", count, count * summed))
    return ServerRow(number, num_stepped, memory, sent)


def host_rows(facts: PlanFacts) -> list[ServerRow]:
    """What a host's aggregator server holds and forwards; all hosts are alike."""
    plan, layout = facts.plan, _layout(facts, Rank(facts, 0).trained).on_one_server()
    held = sum(key.num_bytes for key in layout.keys)
    memory = MemoryUse(
        Amount(2 * layout.value_places(0)[-1], "all, for its workers, two sets"),
        Amount(held, "sums over its workers"),
        Amount(0, "on the servers"),
        Amount(0, "at the workers"),
        Amount(held, "parameters as they come in"),
    )
    num_workers = plan.num_ranks // plan.hosts
    sent = [
        Message("gradients", "servers", "push", len(layout.keys), held),
        Message("parameters", "workers", "pull", num_workers, num_workers * held),
    ]
    return [ServerRow(host, 0, memory, sent) for host in range(plan.hosts)]


def _bytes_of(layout: ServerLayout, servers: Sequence[int]) -> int:
    return sum(layout.keys[key].num_bytes for n in servers for key in layout.held_by(n))


def _layout(facts: PlanFacts, trained: Sequence[LocalParameter]) -> ServerLayout:
    sizes = [(p.num_elements, p.dtype.itemsize, p.dtype) for p in trained]
    may_cut = facts.is_element_wise or facts.plan.local_steps > 1
    return make_layout(sizes, may_cut, facts.plan.num_servers)


def _num_rows(rank: Rank) -> int:
    return len(_blocks(rank))


def _blocks(rank: Rank) -> list[Block]:
    """The partial sums that a worker pushes; the servers add them in the order of the tree."""
    if rank.plan.staleness_bound == 0:
        return rank.tree[rank.place.data]
    own = blocks_of(range(len(rank.rounds)))
    return [Block(block.first + rank.rounds.start, block.num_pieces) for block in own]
