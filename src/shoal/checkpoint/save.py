"""Saving while training goes on: each rank writes what it owns, once, and one commits.

The state does not change between two updates. So a thread writes it while the next forward and
backward run, and the next update waits only until what is left has been copied (`snapshot.py`).
Buffers change in a forward, so they are copied at once.

All ranks agree first: nobody may still be busy with an older save, and if what they hold has
changed they deal anew who writes what. Everything else is the threads': rank 0's begins the draft,
for which the others wait, since a distant store takes its time; each then writes its own file and
says in a small one what is in it; rank 0's waits for all of those, writes the manifest and the
seal, and commits. A rank that cannot write discards the draft, which the others notice: a full disk
costs a warning, not a step.
"""

import errno
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import msgspec
import torch
import xxhash
from torch import Tensor

from shoal.checkpoint import manifest as manifests
from shoal.checkpoint.chunks import Held, Placed, deal, place
from shoal.checkpoint.manifest import File, Manifest, Origin, Progress
from shoal.checkpoint.signing import signing_key
from shoal.checkpoint.snapshot import Snapshot, Space
from shoal.checkpoint.types import name_of_type
from shoal.checkpoint.writing import commit, joined, write_chunks
from shoal.comm.collectives import Group
from shoal.errors import GroupLost
from shoal.faults import faultpoint
from shoal.parallel.boxes import Box
from shoal.parallel.layout import Slice
from shoal.storage.remote import StoreError
from shoal.storage.store import Draft, Store
from shoal.sync.state import share_bytes

SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 0.001, 0.5
PATIENCE_S = 600.0  # for the slowest rank's disk


class Part(msgspec.Struct, frozen=True):
    """What one rank wrote."""

    file: File
    tensors: tuple[manifests.Tensor, ...]
    plain: dict[str, Any]


class Saved(NamedTuple):
    """What became of a save; `problem` is empty if it was committed."""

    name: str
    num_bytes: int
    seconds: float
    problem: str = ""
    is_committed: bool = False  # True on rank 0 alone, which commits
    is_echo: bool = False  # the problem is another rank's, which gave the draft up


class Saver:
    """A rank's side of all saves of a run. `told` hears, on any rank, how each one ended."""

    def __init__(self, store: Store, told: Callable[[Saved], None]):
        signing_key()  # one that is wrong is refused now, and not by each save
        self.store = store
        self._told = told
        self._thread: threading.Thread | None = None
        self._snapshot: Snapshot | None = None
        self._begun, self._written = threading.Event(), threading.Event()
        self._begun.set()  # or never to be
        self._written.set()
        self._given_up = threading.Event()
        self._dealt = 0.0  # a digest of what all held when it was last dealt who writes what
        self._placed: list[Placed] = []
        self._sources: list[tuple[Held, Box]] = []  # of each chunk: what is held, where in it
        self._space = Space()

    @property
    def is_busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def save(
        self,
        group: Group,
        name: str,
        tensors: Mapping[str, Sequence[Slice]],
        plain: dict[str, Any],
        about: tuple[Progress, Origin],
        *,
        at_once: Collection[str] = (),
        copied: Collection[str] = (),
    ) -> str:
        """Begin a save; every rank calls it with what it holds. Returns why not, if it did not.

        The tensors in `at_once` may change as soon as this returns, the others once
        `await_copy` has; those in `copied` never do.
        """
        views = dict(listed(tensors, name_of_type))
        token = int.from_bytes(os.urandom(6), "big")
        rows = group.gather_numbers([self.is_busy, token, _digest(list(views)), self._dealt])
        late = [str(rank) for rank, row in enumerate(rows) if row[0]]
        if late:
            if not rows[0][0]:  # the save that this rank may wait for has ended without it
                self._begun.set()
            return f"rank {', '.join(late)} still writes the one before"
        all_held = _digest([row[2] for row in rows])
        if any(row[3] != all_held for row in rows):  # also if one of them is new here
            self._deal(group, list(views))
            self._dealt = all_held
        sources = [where.of(views[held]) for held, where in self._sources]
        now = [held.name in at_once for held, _ in self._sources]
        never = [held.name in copied for held, _ in self._sources]
        self._snapshot = Snapshot(self._placed, sources, now, self._space, never)
        work = _Work(group.rank, group.num_ranks, name, f"{int(rows[0][1]):x}", plain, about)
        self._begun.clear()
        self._written.clear()
        self._given_up = threading.Event()
        self._thread = threading.Thread(
            target=self._run, args=(work, self._snapshot), name="shoal-save", daemon=True
        )
        self._thread.start()
        return ""

    def await_copy(self) -> None:
        """Until the state may change again."""
        if self._snapshot is not None:
            self._snapshot.release()
            self._snapshot = None

    def finish(self, group: Group) -> None:
        """Until the save under way has ended, one way or another. Every rank must call it."""
        if group.rank == 0:
            self._begun.wait()
        group.gather_numbers([1.0])
        self._begun.set()  # what is not there now will not come
        self._written.wait()
        group.gather_numbers([1.0])  # so rank 0 need not wait for a part that will not come
        if self._thread is not None:
            self._thread.join()

    def give_up(self) -> None:
        """A rank was lost, and its part will not come."""
        self._given_up.set()
        self.await_copy()

    def _deal(self, group: Group, own: list[Held]) -> None:
        self._placed = place(deal(held_by_all(group, own))[group.rank])
        by_name: dict[str, list[Held]] = {}
        for held in own:
            by_name.setdefault(held.name, []).append(held)
        self._sources = [_source(chunk.held, by_name[chunk.held.name]) for chunk in self._placed]

    def _run(self, work: "_Work", snapshot: Snapshot) -> None:
        """In the thread."""
        started = time.monotonic()
        problem, size, committed, is_echo = "", 0, False, False
        draft = self.store.join(work.name, work.token)
        try:
            snapshot.copy()
            self._begin(work, draft)
            size = work.write(draft, self._placed, snapshot).file.num_bytes
            self._written.set()
            if work.rank == 0:
                size, committed = work.commit(draft, self._given_up), True
        except (GroupLost, TimeoutError) as error:
            problem = str(error)
        except FileNotFoundError as error:  # whoever has a reason of its own says it
            gone = f"what was to become {self.store}/{work.name} is gone"
            problem, is_echo = gone if error.filename else str(error.strerror), True
        except OSError as error:
            problem = error.strerror or str(error)
        except Exception as error:  # noqa: BLE001 (a defect must not look like a save that worked)
            problem = f"{type(error).__name__}: {error}"
        finally:
            snapshot.close()
            self._begun.set()
            self._written.set()
        if problem:
            draft.discard()
        seconds = time.monotonic() - started
        self._told(Saved(work.name, size, seconds, problem, committed, is_echo))

    def _begin(self, work: "_Work", draft: Draft) -> None:
        """Rank 0 opens the draft; the others wait until it has."""
        if work.rank == 0:
            try:
                faultpoint("checkpoint.beginning")
                self.store.sweep()
                self.store.begin(work.name, work.token)
            except StoreError:
                raise  # which says where
            except OSError as error:
                raise OSError(error.errno, f"{self.store}: {error.strerror}") from error
            finally:
                self._begun.set()
            return
        pauses = _Pauses(self._given_up, "rank 0 was lost before it had begun")
        while True:
            is_last = self._begun.is_set()  # asked before the look: it may come in between
            if _is_there(draft):
                return
            if is_last:
                raise FileNotFoundError(errno.ENOENT, "rank 0 has given it up")
            pauses.pause("rank 0 began nothing")


class _Work(NamedTuple):
    """One save of one rank."""

    rank: int
    num_ranks: int
    name: str
    token: str
    plain: dict[str, Any]
    about: tuple[Progress, Origin]

    def write(self, draft: Draft, placed: Sequence[Placed], snapshot: Snapshot) -> Part:
        """Write this rank's file, and what is in it."""
        faultpoint("checkpoint.begun")
        file, tensors = write_chunks(draft, self.rank, placed, snapshot.chunks())
        snapshot.close()
        part = Part(file, tensors, self.plain)
        draft.write(_part_name(self.rank), [msgspec.json.encode(part)])
        return part

    def commit(self, draft: Draft, given_up: threading.Event) -> int:
        """On rank 0: wait for all parts, then make the checkpoint appear. Returns its bytes."""
        parts = [_await_part(draft, rank, given_up) for rank in range(self.num_ranks)]
        progress, origin = self.about
        manifest = Manifest(
            manifests.FORMAT,
            manifests.VERSION,
            progress,
            origin,
            {name: value for part in parts for name, value in part.plain.items()},
            tuple(part.file for part in parts),
            joined(part.tensors for part in parts),
        )
        return commit(draft, manifest, drop=[_part_name(rank) for rank in range(self.num_ranks)])


class _Pauses:
    """Between looks at what another rank is to do: short at first, and not for ever."""

    def __init__(self, given_up: threading.Event, lost: str):
        self._given_up, self._lost = given_up, lost
        self._deadline, self._pause_s = time.monotonic() + PATIENCE_S, SHORTEST_PAUSE_S

    def pause(self, late: str) -> None:
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)  # asking a distant store is costly
        if self._given_up.wait(self._pause_s):
            raise GroupLost(self._lost)
        if time.monotonic() > self._deadline:
            raise TimeoutError(
                f"{late} within {PATIENCE_S:g} s. All ranks must see the same directory"
            )


def _is_there(draft: Draft) -> bool:
    with suppress(FileNotFoundError):
        draft.read(_part_name(0))
        return True
    return False


def _await_part(draft: Draft, rank: int, given_up: threading.Event) -> Part:
    pauses = _Pauses(given_up, f"rank {rank} was lost before it had written its part")
    while (content := draft.read(_part_name(rank))) is None:
        pauses.pause(f"rank {rank} wrote nothing")
    return msgspec.json.decode(content, type=Part)


def _part_name(rank: int) -> str:
    return f"part-{rank:05d}.json"


def listed(
    tensors: Mapping[str, Sequence[Slice]], name_of: Callable[[torch.dtype], str]
) -> Iterator[tuple[Held, Tensor]]:
    """What a rank holds, as others are told of it, and the values."""
    for name, parts in tensors.items():
        for part in parts:
            box = Box(part.offset, tuple(part.tensor.shape))
            yield Held(name, name_of(part.tensor.dtype), part.global_shape, box), part.tensor


def held_by_all(group: Group, own: list[Held]) -> list[list[Held]]:
    """What each rank holds. Every rank must call it."""
    encoded = msgspec.msgpack.encode(own)
    return [
        msgspec.msgpack.decode(share_bytes(group, rank, encoded), type=list[Held])
        for rank in range(group.num_ranks)
    ]


def _digest(items: list[Any]) -> float:
    """A number that changes when they do; a float carries 53 bits of it."""
    return float(xxhash.xxh3_64_intdigest(msgspec.msgpack.encode(items)) >> 11)


def _source(chunk: Held, own: Sequence[Held]) -> tuple[Held, Box]:
    """Which of the boxes that this rank holds a chunk is a part of, and where in it."""
    held = next(
        held for held in own if held.box.meet(chunk.box) == chunk.box or not chunk.box.numel
    )
    return held, chunk.box.inside(held.box)
