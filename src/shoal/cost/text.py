"""Format an explanation as tables for a terminal.

Of ranks that differ by a few elements, the largest one is shown for each pipeline coordinate; the
record (`--json`) has them all.
"""

from collections.abc import Callable, Sequence

from shoal.cost.explain import Explanation, RankRow, ServerRow
from shoal.cost.tensor import TensorTraffic
from shoal.formatting import in_units, plural, table
from shoal.parallel.tensor.summary import cuts_in_words


def format_explanation(found: Explanation, recipe: str) -> str:
    parts = [_head(found, recipe)]
    if found.stages:
        parts.append(_of_stages(found))
    if found.cuts is not None:
        parts.append(_of_cuts(found))
    parts += [_of_memory(found), _of_messages(found), "\n".join(f"- {n}" for n in found.notes)]
    return "\n\n".join(parts)


def _head(found: Explanation, recipe: str) -> str:
    axes = " x ".join(f"{name} {length}" for name, length in found.axes.items() if length > 1)
    fewest, most = _ends([rank.num_pieces for rank in found.ranks])
    rounds = f"{fewest}" if fewest == most else f"{fewest} to {most}"
    each = f"{rounds} for each replica"
    if found.round_size > 1:
        each += f", in rounds of {found.round_size} through the pipeline"
    servers = f", {plural(len(found.servers), 'server')}" if found.servers else ""
    servers += f", {len(found.hosts)} of hosts" if found.hosts else ""
    frozen = found.num_parameters - found.num_trained
    return (
        f"{recipe} under {found.plan or 'data=1'!r}: {plural(found.num_ranks, 'rank')}"
        f"{f' = {axes}' if axes else ''}{servers}; "
        f"{plural(found.num_pieces, 'piece')} of {plural(found.piece_samples, 'sample')} a step, "
        f"{each}; "
        f"{found.num_parameters:,} parameters{f', {frozen:,} of them frozen' if frozen else ''}"
    )


def _of_stages(found: Explanation) -> str:
    rows = [["rank", "stage", "from", "to", "parameters", "cost", "sends, per microbatch"]]
    for stage in found.stages:
        sends = (
            f"{plural(stage.num_sent, 'value')}, {in_units(stage.sent_bytes)}"
            if stage.num_sent
            else "-"
        )
        rows.append(
            [
                str(stage.rank),
                str(stage.index),
                stage.first,
                stage.last,
                f"{stage.num_parameters:,}",
                f"{stage.share:.0%}",
                f"{sends} (stays here)" if stage.stays else sends,
            ]
        )
    lines = ["Stages, by rank on the pipeline axis", table(rows, (0, 1, 4, 5))]
    for tied in found.tied:
        held = " and ".join(map(str, tied.ranks))
        lines.append(f"  {tied.name} ({in_units(tied.num_bytes)}) is held by ranks {held}")
    if found.bubble is not None:
        lines.append(
            f"  waiting, if stages take the same time: {found.bubble.share:.1%} = "
            f"{found.bubble.formula}, p={found.axes['pipeline']}, m={found.round_size}, "
            f"v={len(found.stages) // found.axes['pipeline']}"
        )
    return "\n".join(lines)


def _of_cuts(found: Explanation) -> str:
    assert found.cuts is not None
    cuts = cuts_in_words(found.cuts.rows, found.cuts.share, found.axes["tensor"])
    return f"{cuts}\n  {_moves(found.cuts.moves)}"


def _moves(moves: TensorTraffic) -> str:
    return (
        f"one piece: {moves.num_forward} messages in forward ({in_units(moves.forward_bytes)}), "
        f"{moves.num_backward} in backward ({in_units(moves.backward_bytes)})"
    )


def _of_memory(found: Explanation) -> str:
    rows = [["rank", "", "bytes", "what that is"]]
    heaviest = [
        (str(rank.rank), rank.memory)
        for rank in _heaviest(found, lambda rank: rank.memory.num_bytes)
    ]
    heaviest += [(who, row.memory) for who, row in _of_servers(found)]
    for who, memory in heaviest:
        named = {
            "parameters": memory.parameters,
            "gradients": memory.gradients,
            "optimizer state": memory.optimizer,
            "buffers": memory.buffers,
            "extra, about": memory.extra,
        }
        for i, (name, amount) in enumerate(named.items()):
            if amount.num_bytes:
                first = who if i == 0 else ""
                rows.append([first, name, in_units(amount.num_bytes), amount.formula])
        rows.append(["", "in all", in_units(memory.num_bytes), ""])
    return f"Memory of {_who(found)}, without activations\n{table(rows, (0, 2))}"


def _of_messages(found: Explanation) -> str:
    rows = [["rank", "what", "axis", "how", "count", "bytes sent"]]
    senders = [(str(rank.rank), rank.messages) for rank in _heaviest(found, _sent)]
    senders += [(who, row.messages) for who, row in _of_servers(found)]
    for who, messages in senders:
        for i, sent in enumerate(messages):
            first = who if i == 0 else ""
            rows.append(
                [first, sent.what, sent.axis, sent.how, str(sent.count), in_units(sent.num_bytes)]
            )
        if messages:
            total = sum(sent.num_bytes for sent in messages)
            rows.append(["", "in all", "", "", "", in_units(total)])
    if len(rows) == 1:
        return "Messages: none, there is only one rank"
    return f"Messages of {_who(found)}, each step\n{table(rows, (0, 4, 5))}"


def _sent(rank: RankRow) -> int:
    return sum(message.num_bytes for message in rank.messages)


def _heaviest(found: Explanation, weight: Callable[[RankRow], int]) -> list[RankRow]:
    """Of the ranks with the same stages, the one with the most; of equals the first."""
    places = range(found.axes["pipeline"])
    return [max((r for r in found.ranks if r.pipeline == p), key=weight) for p in places]


def _of_servers(found: Explanation) -> list[tuple[str, ServerRow]]:
    """The server with the most memory, and one aggregator server, if there are any."""
    heaviest = sorted(found.servers, key=lambda row: -row.memory.num_bytes)[:1]
    named = [(f"server {row.server}", row) for row in heaviest]
    return [*named, *((f"host {row.server}'s", row) for row in found.hosts[:1])]


def _who(found: Explanation) -> str:
    if found.servers:
        return "the rank and the server that have most"
    if found.num_ranks == 1:
        return "the rank"
    if found.axes["pipeline"] == found.num_ranks:
        return "each rank"
    if found.axes["pipeline"] > 1:
        return "the rank that has most, at each place of the pipeline"
    return "the rank that has most"


def _ends(counts: Sequence[int]) -> tuple[int, int]:
    return min(counts), max(counts)
