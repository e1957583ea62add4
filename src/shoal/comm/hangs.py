"""Who keeps the others waiting: a report of a hang, from where each rank says that it stands.

Ranks that begin and end no collective for a while tell so with their heartbeats: the collectives
they wait for, and how far they got in each group (`comm/flight_recorder.py`). A rank that is behind
in a group did not come. Ranks may wait for a rank that waits itself, as the stages of a pipeline
do, so the ones to name are those at the end: they wait for none. Pure. Read next: `supervisor.py`,
which asks for it when nothing gets done, or a rank computes for long.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from shoal.comm.flight_recorder import OpenCollective, Standing
from shoal.events.events import HangEvent
from shoal.formatting import name_ranks

IDLE_S = 0.3  # without a collective, after which a rank says where it stands


class _Wait(NamedTuple):
    """Of one rank: the collective, and the ranks that have not begun it."""

    at: OpenCollective
    missing: tuple[int, ...]


def explain_hang(standings: Mapping[int, Standing], num_ranks: int, step: int) -> HangEvent | None:
    """What is known of a hang; None if no rank waits in a collective. `standings` are by rank."""
    waits = {rank: wait for rank, s in standings.items() if (wait := _wait_of(rank, s, standings))}
    if not waits:
        return None
    first = min(waits, key=lambda rank: (-len(waits[rank].missing), rank))
    culprits = _ends_of(first, waits, standings, num_ranks)
    at = waits[first].at
    together = sorted(rank for rank, w in waits.items() if (w.at.group, w.at.number) == _key(at))
    lines = {str(r): standings[r].line for r in culprits if r in standings and standings[r].line}
    seconds = round(max(waits[rank].at.seconds for rank in together))
    return HangEvent(
        step=at.step or step + 1,
        seconds=seconds,
        op=at.op,
        what=at.what,
        at=at.at,
        waiting=together,
        missing=culprits,
        lines=lines,
        text=_sentence(at, together, culprits, waits, lines),
    )


def _key(at: OpenCollective) -> tuple[str, int]:
    return at.group, at.number


def _wait_of(rank: int, own: Standing, standings: Mapping[int, Standing]) -> _Wait | None:
    """The oldest collective that others have not begun, or else the oldest of all; None of a rank
    that computes, and has begun some that it will wait for later."""
    if own.line:
        return None
    found = []
    for at in own.open:
        others = [r for r in at.ranks if r != rank]
        behind = [r for r in others if not _has_begun(standings.get(r), at)]
        found.append(_Wait(at, tuple(behind)))
    return next((wait for wait in found if wait.missing), found[0] if found else None)


def _has_begun(standing: Standing | None, at: OpenCollective) -> bool:
    """A rank that says nothing is busy with collectives, or has no group: it is not known to be
    behind, unless it never says where it stands."""
    return standing is not None and standing.reached.get(at.group, 0) >= at.number


def _ends_of(
    first: int, waits: Mapping[int, _Wait], standings: Mapping[int, Standing], num_ranks: int
) -> list[int]:
    """The ranks that `first` waits for, through others, and that wait for none themselves."""
    if not waits[first].at.ranks:  # for a server, which waits for those that do not ask it
        return [rank for rank in range(num_ranks) if rank not in waits]
    seen, ends, todo = {first}, set(), [*waits[first].missing]
    while todo:
        rank = todo.pop()
        if rank in seen:
            continue
        seen.add(rank)
        if rank not in waits:
            ends.add(rank)
        elif waits[rank].at.ranks:
            todo += waits[rank].missing
        else:
            ends |= {r for r in range(num_ranks) if r not in waits}
    return sorted(ends)


def _sentence(
    at: OpenCollective,
    together: Sequence[int],
    culprits: Sequence[int],
    waits: Mapping[int, _Wait],
    lines: Mapping[str, str],
) -> str:
    wait = "waits" if len(together) == 1 else "wait"
    begun = f"{name_ranks(together)} {wait} in {at.op} ({at.what}) of step {at.step}"
    begun += f", begun at {at.at}"
    if culprits:
        where = [f"rank {rank} is at {line}" for rank, line in lines.items()]
        return f"{begun}, and {name_ranks(culprits)} did not come" + "".join(
            f"; {one}" for one in where
        )
    others = [
        f"rank {rank} in {w.at.op} ({w.at.what}) begun at {w.at.at}"
        for rank, w in sorted(waits.items())
        if rank not in together
    ]
    if others:
        return f"{begun}, while others wait elsewhere: {', '.join(others)}"
    return f"{begun}, and all have come: the transport does not end it"
