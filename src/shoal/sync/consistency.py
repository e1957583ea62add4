"""Finds state that was corrupted: replicas are compared, and what one rank holds alone is guarded.

Each rank tells a digest of a slice of what replicas hold alike with the small numbers of a step
(`step_metadata.py`), so that no message is added; it is of the state before that step, and ranks
see whether it differs before they make it. Before a save, and after the last step, all of it is
compared. Then the tensors that differ are found. Two replicas cannot tell which of them is right,
and the run ends without saving. Of three or more, those that are not as most are take the state of
the others, and the step is computed again. What one rank alone holds is guarded from one update to
the next (`guard.py`); that it changed ends the run.

Not found: a gradient that was corrupted before it was summed, since all replicas then step on the
same wrong sum; and of state that takes several slices, what an update spreads to all before the
slice has its turn. Cost: `digests.py`; a save reads its state once more.
"""

from collections import Counter, deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from xxhash import xxh3_64_intdigest

from shoal import faults
from shoal.comm.collectives import Group
from shoal.comm.mesh import Mesh
from shoal.events.events import (
    Event,
    ReplicaRepairedEvent,
    ReplicasDifferEvent,
    StateCorruptedEvent,
)
from shoal.logs import log
from shoal.parallel.layout import whole_slice
from shoal.sync.choose import wait_for_parameters
from shoal.sync.digests import (
    DigestReader,
    TensorListing,
    canonical_nan,
    digest_to_float,
    find_majority,
)
from shoal.sync.guard import (
    NAMED,
    CorruptState,
    Guard,
    corruption_message,
    find_address,
    list_names,
)
from shoal.sync.state import ShardedState, broadcast_state, first_problem
from shoal.sync.state_inventory import StateInventory
from shoal.sync.strategy import Strategy

MOST_REPAIRS = 3  # of one rank, before it is not trusted any more

_Kind = type[ReplicaRepairedEvent] | type[ReplicasDifferEvent] | type[StateCorruptedEvent]


class Consistency:
    """Of one rank. With `most_slices` 0 nothing is looked at.

    `watch` comes first and for each new mesh; then, for each step: `begin`, `digest`, `verify`,
    and `end` when it was made, then `release`. `check` is for a state at rest, `leave` for a group
    that is lost. Every rank must call `verify` and `check`, and as often.
    """

    def __init__(self, most_slices: int, emit: Callable[[Event], None]):
        self.most_slices, self._emit = most_slices, emit
        self._repairs: Counter[int] = Counter()  # by rank
        self._repaired_at = -1  # the last step after which that was
        self._guards = False

    def watch(self, strategy: Strategy, mesh: Mesh) -> None:
        """Watch the state of this strategy from now on. Never communicates."""
        self._strategy, self._mesh, self._inventory = strategy, mesh, StateInventory(strategy)
        if not strategy.in_lockstep:  # peers hold the same, when replicas have agreed
            self._mesh = mesh._replace(data=mesh.peers)
        is_on = bool(self.most_slices)
        self._guards = is_on and mesh.num_ranks > 1
        self._compares = is_on and self._mesh.data.num_ranks > 1 and self._inventory.is_alike
        self._reader, self._turn = DigestReader(), 0
        self._alike_after: deque[int] = deque(maxlen=self.most_slices + 1)  # steps
        self._weights, self._state = Guard(self.most_slices), Guard(self.most_slices)
        self._lines = data_lines(mesh, not strategy.in_lockstep)
        self._own_line = next(line for line in self._lines if mesh.rank in line)
        faults.expose("rank", lambda what: find_address(self._inventory.everything(), what))

    def begin(self, step: int) -> None:
        """A step begins, and only the update may write from now on."""
        if self._guards:
            self._state.refresh()
            if self._inventory.own_weights.tensors:
                wait_for_parameters(self._strategy)
                self._weights.note(self._inventory.own_weights, step)

    def digest(self, step: int) -> float:
        """Of a slice of what replicas hold alike after `step`; 0 if there is nothing to tell."""
        if not self._compares:
            return 0.0
        wait_for_parameters(self._strategy)
        tensors = self._inventory.in_step().tensors
        if not tensors:
            return 0.0
        if not self._alike_after:
            self._alike_after.append(step)
        self._turn += 1
        return digest_to_float(self._reader.digest(tensors, self._turn, self.most_slices))

    def verify(self, digests: Sequence[float], step: int) -> bool:
        """Before a step is made: True if state was repaired, and it must be computed again."""
        if self._guards:
            self._weights.refresh()  # some models write to their own weights in their forward
            self._check_changes(step)
        if self._compares and any(digests):
            if not all(_are_alike(digests, line) for line in self._lines):
                differs = not _are_alike(digests, self._own_line)
                is_repaired = self._resolve(step, differs, at_rest=False)
                if is_repaired and self._strategy.in_lockstep:
                    return True
            else:
                self._alike_after.append(step)
        if self._guards:  # the update writes
            self._state.forget()
            self._weights.forget()
        return False

    def leave(self, step: int) -> None:
        """A group is lost, and what this rank holds after `step` is taken along."""
        if self._guards:
            self._state.refresh()
            self._weights.refresh()
            self._check_changes(step)

    def end(self, step: int, meets: bool) -> None:
        """The step is made; if it `meets`, the whole state may be looked at."""
        if self._guards:
            self._state.note(self._inventory.own_state(), step)
            if meets:
                self._weights.note(self._inventory.own_weights, step)

    def release(self) -> None:
        """Hooks and loops of the user's own may write to weights, until the next step begins."""
        if self._guards:
            self._weights.forget()

    def check(self, step: int) -> None:
        """All of the state after `step`, before it is saved or given away."""
        self.leave(step)
        if self._compares:
            wait_for_parameters(self._strategy)
            self._resolve(step, True, at_rest=True)

    def agree_on_state(self, replicas: Sequence[int], step: int) -> None:
        """Before newcomers take the state after `step` of one of those who hold it: let these hold
        the same. Every replica must call it."""
        if self._compares and self._strategy.in_lockstep and len(replicas) > 1:
            _raise_on_all(self._mesh.data, self._compare(step, replicas, at_rest=True))

    def _check_changes(self, step: int) -> None:
        names = self._state.changed() + self._weights.changed()
        if names:
            rank = self._mesh.rank
            self._report(StateCorruptedEvent, step, [rank], names)
            raise CorruptState(corruption_message(f"rank {rank}", names, f" after step {step}"))

    def _resolve(self, step: int, differs: bool, at_rest: bool) -> bool:
        """Repair what can be, or raise; whether anything was. Every rank must reach this."""
        world, before = self._mesh.world, self._repairs.total()
        replicas = range(self._mesh.data.num_ranks)
        _raise_on_all(world, self._compare(step, replicas, at_rest) if differs else "")
        is_repaired = self._repairs.total() > before
        return any(row[0] for row in world.all_gather_numbers([is_repaired]))

    def _compare(self, step: int, replicas: Sequence[int], at_rest: bool) -> str:
        """Compare some replicas, tensor by tensor, and repair those that differ from most.

        What is wrong, if that cannot be. Every rank of the line must reach this.
        """
        data = self._mesh.data
        takes_part, listing = data.rank in replicas, TensorListing([], [])
        if takes_part:
            listing = self._inventory.at_rest() if at_rest else self._inventory.in_step()
        tensors, names = listing
        digest = xxh3_64_intdigest("\n".join(names).encode())
        layouts = data.all_gather_numbers([len(names), digest_to_float(digest)])
        if len({tuple(layouts[replica]) for replica in replicas}) > 1:
            return self._not_alike(replicas, ["the number of tensors"], step)
        numbers, rows = self._different(tensors, int(layouts[replicas[0]][0]), replicas)
        if not numbers:
            self._alike_after.append(step)
            return ""
        verdict = find_majority([rows[replica] for replica in replicas])
        odd, right = [replicas[i] for i in verdict.odd], [replicas[i] for i in verdict.right]
        shown = [names[number] for number in numbers] if takes_part else []
        problem = self._problem(odd, right, shown, step) if takes_part else ""
        # A newcomer does not know what was repaired before.
        if any(row[0] for row in data.all_gather_numbers([bool(problem)])):
            if data.rank == replicas[0]:
                self._report(ReplicasDifferEvent, step, self._ranks(odd), shown)
            return problem
        if data.rank == right[0]:
            self._report(ReplicaRepairedEvent, step, self._ranks(odd), shown)
        self._repair([tensors[n] for n in numbers] if takes_part else [], odd, right[0], at_rest)
        self._repairs.update(self._ranks(odd))
        self._repaired_at = step
        self._alike_after.append(step)
        return ""

    def _different(
        self, tensors: list[Tensor], count: int, replicas: Sequence[int]
    ) -> tuple[list[int], list[list[float]]]:
        """The tensors that are not alike, by number, and each rank's digests of them."""
        numbers, rows = self._gather(tensors, list(range(count)), replicas)
        if numbers:  # which NaN it is may differ
            alike = (
                [canonical_nan(tensors[number].detach()) for number in numbers] if tensors else []
            )
            numbers, rows = self._gather(alike, numbers, replicas)
        return numbers, rows

    def _gather(
        self, tensors: list[Tensor], numbers: list[int], replicas: Sequence[int]
    ) -> tuple[list[int], list[list[float]]]:
        own = [digest_to_float(digest) for digest in DigestReader().digests(tensors)]
        rows = self._mesh.data.all_gather_numbers(own or [0.0] * len(numbers))
        found = [i for i in range(len(numbers)) if len({rows[r][i] for r in replicas}) > 1]
        return [numbers[i] for i in found], [[row[i] for i in found] for row in rows]

    @torch.no_grad()
    def _repair(
        self, tensors: Sequence[Tensor], odd: Sequence[int], leader: int, at_rest: bool
    ) -> None:
        """Let replicas that are odd take some tensors of another."""
        data = self._mesh.data
        held = {str(number): [whole_slice(tensor)] for number, tensor in enumerate(tensors)}
        given = broadcast_state(data, leader, ShardedState(held, {}))
        if data.rank in odd:
            for name, (own,) in held.items():
                own.tensor.copy_(given.tensors[name][0].tensor)
            if at_rest:
                self._strategy.buffers.hold()
            self._weights.forget()

    def _problem(self, odd: list[int], right: list[int], names: list[str], step: int) -> str:
        """Why replicas cannot be repaired, if so."""
        ranks = self._ranks(odd)
        if not right:
            return self._not_alike(odd, names, step)
        often = [rank for rank in ranks if self._repairs[rank] >= MOST_REPAIRS]
        if step == self._repaired_at or often:
            return _repeated_message(often or ranks, names, self._when(step))
        return ""

    def _not_alike(self, replicas: Sequence[int], names: Sequence[str], step: int) -> str:
        return _differing_message(self._ranks(replicas), names, self._when(step))

    def _ranks(self, replicas: Sequence[int]) -> list[int]:
        """Of replicas of this line, as the whole run counts them."""
        return [self._own_line[replica] for replica in replicas]

    def _when(self, step: int) -> str:
        since = self._since(step)
        return f"between steps {since} and {step}" if since < step else f"after step {step}"

    def _since(self, step: int) -> int:
        """The last step after which all was alike, as far as it was looked at."""
        turns = min(self._reader.num_slices, len(self._alike_after))
        return self._alike_after[-turns] if turns else step

    def _report(self, kind: _Kind, step: int, ranks: list[int], names: list[str]) -> None:
        since, count = self._since(step), len(names)
        event = kind(step=step, since=since, ranks=ranks, count=count, tensors=names[:NAMED])
        log.warning("%s %s", event, names)
        self._emit(event)


def data_lines(mesh: Mesh, of_peers: bool = False) -> list[list[int]]:
    """The ranks of each line along the data axis, or of peers in replicas that step apart: tensor
    ranks are neighbours, and so are those of a replica. Pure."""
    width, length = mesh.tensor.num_ranks, mesh.data.num_ranks
    if of_peers:
        width, length = width * mesh.own.data.num_ranks, mesh.peers.num_ranks
    stages = range(mesh.pipeline.num_ranks)
    firsts = [stage * width * length + place for stage in stages for place in range(width)]
    return [[first + replica * width for replica in range(length)] for first in firsts]


def _are_alike(digests: Sequence[float], line: Sequence[int]) -> bool:
    first = digests[line[0]]
    return all(digests[rank] == first for rank in line)


def _raise_on_all(group: Group, problem: str) -> None:
    """On all ranks, if one has a problem. Every rank must reach this."""
    found = first_problem(group, problem)
    if found:
        raise CorruptState(found)


def _differing_message(ranks: Sequence[int], names: Sequence[str], when: str) -> str:
    shown = f"{', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
    return (
        f"Replicas differ: {list_names(names)} became unlike on ranks {shown} {when}. Replicas "
        "hold the same bits after every step, so memory was corrupted, or code changes one rank "
        "alone; which of them is right cannot be told. It was not saved; resume from the newest "
        "checkpoint with --resume. Code that changes weights must do so alike on all ranks."
    )


def _repeated_message(ranks: Sequence[int], names: Sequence[str], when: str) -> str:
    return (
        f"Rank {', '.join(map(str, ranks))} differs from the other replicas again, in "
        f"{list_names(names)}, {when}, though it took their state before. Its memory is broken, or "
        "code changes it alone. It was not saved; resume from the newest checkpoint with --resume, "
        "on another machine."
    )
