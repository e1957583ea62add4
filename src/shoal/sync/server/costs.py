"""What a server and a host's aggregator hold, and what they send in a step.

It uses the layout that workers and servers use themselves (`layout.py`). Parameters count as sent
also where they are read in memory that a host shares; the few bytes of the requests around them do
not count. A worker's: `worker_costs.py`, and under local steps `outer_client.py`.
"""

from collections.abc import Sequence
from functools import lru_cache

from shoal.comm.tree import Block, blocks_of
from shoal.sync.costs import Amount, MemoryUse, Message, StepCosts
from shoal.sync.rank_layout import PlanFacts, RankLayout
from shoal.sync.server.layout import ServerLayout, make_layout
from shoal.sync.server.lookup_costs import rows_held, sent_by_server, sum_bytes
from shoal.sync.server.replication import leaders_of


def layout_on_servers(layout: RankLayout) -> ServerLayout:
    """Where the servers of a plan hold what a worker trains."""
    sizes = tuple((p.num_elements, p.dtype.itemsize, p.dtype) for p in layout.trained)
    may_cut = layout.facts.is_element_wise or layout.plan.local_steps > 1
    return _made_layout(sizes, may_cut, layout.plan.num_servers // layout.plan.num_parts)


_made_layout = lru_cache(16)(make_layout)  # a search asks for the same with many codecs


def pushed_blocks(layout: RankLayout) -> list[Block]:
    """The partial sums that a rank pushes; the servers add them in the order of the tree."""
    count, number = layout.line("within")
    if count > 1:  # the first pushes the sum of all
        rounds = layout.plan.num_rounds // layout.plan.num_apart
        return [Block(layout.replica * rounds, rounds)] if not number else []
    if layout.plan.staleness_bound == 0:
        return layout.tree[layout.place.data]
    own = blocks_of(range(len(layout.rounds)))
    return [Block(block.first + layout.rounds.start, block.num_pieces) for block in own]


def server_costs(facts: PlanFacts, server: int) -> StepCosts:
    """What one server steps on, holds and sends; with `copies`, also of those it has copies of."""
    server, part = divmod(server, facts.plan.num_parts)
    pipeline, tensor = divmod(part, facts.plan.tensor)
    worker = RankLayout(facts, pipeline * facts.plan.num_replicas * facts.plan.tensor + tensor)
    layout, own = layout_on_servers(worker), _leaders(facts, server)
    num_stepped, state = _stepped(worker, layout, own)
    rows = 0  # of tables, in bytes
    for name, use in facts.tables.items():
        count = sum(rows_held(use, n, facts.plan.num_servers) for n in own)
        whole = next(p for p in facts.parameters if p.name == name)
        num_stepped += count * whole.shape[1]
        state += sum(kept.num_bytes((count, whole.shape[1])) for kept in facts.state.get(name, ()))
        rows += count * use.row_bytes
    sizes = [layout.value_places(n)[-1] for n in own]
    words = "its part of all"
    if facts.plan.waits_for_all:
        sizes, words = [sizes[0], *sizes], f"{words}, two sets"
    words += "".join(f", and of server {n}" for n in own[1:])
    memory = MemoryUse(
        Amount(sum(sizes) + rows, words),
        Amount(_bytes_of(layout, own), "of the last step"),
        Amount(state, f"of {num_stepped:,} elements"),
        Amount(0, "at the workers"),
        Amount(_bytes_of(layout, [server]), "sums over pieces"),
    )
    return StepCosts(num_stepped, memory, _sent(facts, layout, server))


def aggregator_costs(facts: PlanFacts) -> StepCosts:
    """What a host's aggregator server holds and forwards; all hosts are alike."""
    plan, layout = facts.plan, layout_on_servers(RankLayout(facts, 0)).on_one_server()
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
    return StepCosts(0, memory, sent)


def _leaders(facts: PlanFacts, server: int) -> list[int]:
    """The servers whose part of the model a server holds: its own, and those it has copies of."""
    return [server, *leaders_of(server, facts.plan.num_servers, facts.plan.copies)]


def _stepped(worker: RankLayout, layout: ServerLayout, servers: Sequence[int]) -> tuple[int, int]:
    """The elements of dense parameters that are stepped on, and the bytes of optimizer state."""
    facts, plan, trained, num_stepped, state = worker.facts, worker.plan, worker.trained, 0, 0
    for segment in (s for n in servers for key in layout.held_by(n) for s in layout.segments(key)):
        p = trained[segment.parameter]
        num_stepped += segment.length
        if plan.local_steps == 1:
            shape = p.shape_of_run(segment.length)
            state += sum(kept.num_bytes(shape) for kept in facts.state.get(p.name, ()))
        elif plan.outer_rates[1]:
            state += segment.length * max(4, p.dtype.itemsize)  # the outer momentum
    return num_stepped, state


def _sent(facts: PlanFacts, layout: ServerLayout, server: int) -> list[Message]:
    """Parameters to who pulls them, rows to who looks them up, sums to copies."""
    plan, held = facts.plan, _bytes_of(layout, [server])
    who, count = ("workers", plan.num_apart) if plan.hosts == 1 else ("hosts", plan.hosts)
    sent = [Message("parameters", who, "pull", count, count * held)]
    looked = sent_by_server(facts.tables, server, plan.num_servers)
    sent += [looked] if looked.count else []
    if plan.copies > 1:
        count = (1 if plan.staleness_bound == 0 else plan.num_apart) * (plan.copies - 1)
        tables = facts.tables.values()
        summed = held + sum(sum_bytes(use, server, plan.num_servers) for use in tables)
        sent.append(Message("sums", "servers", "copy", count, count * summed))
    return sent


def _bytes_of(layout: ServerLayout, servers: Sequence[int]) -> int:
    return sum(layout.keys[key].num_bytes for n in servers for key in layout.held_by(n))
