"""Save checkpoints while training continues: each rank writes its share, rank 0 commits.

The state does not change between two updates. So a thread writes it during the next forward and
backward passes, and the next update only waits until the rest is copied (`snapshot.py`). Buffers
change in a forward pass, so they are copied at once.

All ranks agree first: no rank may still write an older checkpoint, and if what they hold has
changed they assign the writers again. The threads do the rest. Rank 0 creates the draft, for which
the others wait, since a remote store may be slow. Each rank writes its file, and a small JSON file
that lists its content; rank 0 waits for all of these, writes the manifest and the seal, and
commits. A rank that cannot write discards the draft, and the others notice: a full disk costs a
warning, not a step. Read next: `commit.py`, `storage/store.py`.
"""

import errno
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from socket import gethostname
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor

from shoal.checkpoint import manifest as manifests
from shoal.checkpoint.chunks import PlacedChunk, TensorRegion, assign_writers, lay_out_file
from shoal.checkpoint.commit import commit_checkpoint, merge_tensors, write_chunks
from shoal.checkpoint.dtypes import dtype_name
from shoal.checkpoint.manifest import FileEntry, Manifest, Origin, Progress
from shoal.checkpoint.signing import signing_key
from shoal.checkpoint.snapshot import Snapshot, SnapshotBuffer
from shoal.comm.collectives import Group
from shoal.comm.wire import digest_number
from shoal.errors import GroupLost
from shoal.events.tracing import TRACER
from shoal.faults import faultpoint
from shoal.parallel.boxes import Box
from shoal.parallel.layout import Slice
from shoal.storage.object_client import StoreError
from shoal.storage.store import Draft, Store
from shoal.sync.state import broadcast_bytes

SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 0.001, 0.5
PATIENCE_S = 600.0  # for the slowest rank's disk


class RankManifest(msgspec.Struct, frozen=True):
    """What one rank wrote: a JSON file of the draft, dropped at the commit."""

    file: FileEntry
    tensors: tuple[manifests.TensorEntry, ...]
    plain: dict[str, Any]


class SaveResult(NamedTuple):
    """The outcome of a save; `problem` is empty if it was committed."""

    name: str
    num_bytes: int
    seconds: float
    problem: str = ""
    is_committed: bool = False  # True on rank 0 only, which commits
    is_echo: bool = False  # another rank had the problem, and discarded the draft


class Saver:
    """One rank's part in all saves of a run. Every rank's `on_result` gets the outcome of each."""

    def __init__(self, store: Store, on_result: Callable[[SaveResult], None]):
        signing_key()  # refuse a bad key now, and not in each save
        self.store = store
        self._on_result = on_result
        self._thread: threading.Thread | None = None
        self._snapshot: Snapshot | None = None
        self._begun, self._written = threading.Event(), threading.Event()
        self._begun.set()  # no save is under way
        self._written.set()
        self._given_up = threading.Event()
        self._assigned = 0.0  # a digest of what all ranks held when writers were last assigned
        self._placed: list[PlacedChunk] = []
        # Of each chunk: the region that holds it, and where in it.
        self._sources: list[tuple[TensorRegion, Box]] = []
        self._space = SnapshotBuffer()

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
        """Start a save; every rank calls it with what it holds. Returns why not, if it did not.

        The tensors in `at_once` may change as soon as this returns, those in `copied` never
        change, the others may change after `await_copy`.
        """
        views = dict(list_regions(tensors, dtype_name))
        token = int.from_bytes(os.urandom(6), "big")
        rows = group.all_gather_numbers([self.is_busy, token, _digest(list(views)), self._assigned])
        late = [str(rank) for rank, row in enumerate(rows) if row[0]]
        if late:
            if not rows[0][0]:  # rank 0 has ended the save that this rank may wait for
                self._begun.set()
            return f"rank {', '.join(late)} still writes the one before"
        all_held = _digest([row[2] for row in rows])
        if any(row[3] != all_held for row in rows):  # also if a rank is new
            self._assign(group, list(views))
            self._assigned = all_held
        sources = [where.of(views[held]) for held, where in self._sources]
        now = [held.name in at_once for held, _ in self._sources]
        never = [held.name in copied for held, _ in self._sources]
        self._snapshot = Snapshot(self._placed, sources, now, self._space, never)
        work = _RankSave(group.rank, group.num_ranks, name, f"{int(rows[0][1]):x}", plain, about)
        self._begun.clear()
        self._written.clear()
        self._given_up = threading.Event()
        self._thread = threading.Thread(
            target=self._run, args=(work, self._snapshot), name="shoal-save", daemon=True
        )
        self._thread.start()
        return ""

    def await_copy(self) -> None:
        """Wait until the state may change again."""
        if self._snapshot is not None:
            self._snapshot.release()
            self._snapshot = None

    def finish(self, group: Group) -> None:
        """Wait until the save under way has ended. Every rank must call it."""
        if group.rank == 0:
            self._begun.wait()
        group.all_gather_numbers([1.0])
        self._begun.set()  # a draft that does not exist now will not be created
        self._written.wait()
        group.all_gather_numbers([1.0])  # so rank 0 does not wait for a file that will not come
        if self._thread is not None:
            self._thread.join()

    def give_up(self) -> None:
        """End the save: a rank was lost, and its file will not come."""
        self._given_up.set()
        self.await_copy()

    def _assign(self, group: Group, own: list[TensorRegion]) -> None:
        self._placed = lay_out_file(assign_writers(gather_regions(group, own))[group.rank])
        by_name: dict[str, list[TensorRegion]] = {}
        for held in own:
            by_name.setdefault(held.name, []).append(held)
        self._sources = [
            _source(chunk.region, by_name[chunk.region.name]) for chunk in self._placed
        ]

    def _run(self, work: "_RankSave", snapshot: Snapshot) -> None:
        """The thread: write, and on rank 0 commit."""
        started = time.monotonic()
        problem, size, committed, is_echo = "", 0, False, False
        draft = self.store.join_draft(work.name, work.token)
        try:
            with TRACER.span("copy", "save"):
                snapshot.copy()
            with TRACER.span("write", "save"):
                self._begin(work, draft)
                size = work.write(draft, self._placed, snapshot).file.num_bytes
            self._written.set()
            if work.rank == 0:
                with TRACER.span("commit", "save"):
                    size, committed = work.commit(draft, self._given_up), True
        except (GroupLost, TimeoutError) as error:
            problem = str(error)
        except FileNotFoundError as error:  # another rank reports why
            gone = f"what was to become {self.store}/{work.name} is gone"
            problem, is_echo = gone if error.filename else str(error.strerror), True
        except OSError as error:
            problem = work.place + (error.strerror or str(error))
        except Exception as error:  # noqa: BLE001 (a defect must not look like a good save)
            problem = f"{work.place}{type(error).__name__}: {error}"
        finally:
            snapshot.close()
            self._begun.set()
            self._written.set()
        if problem:
            draft.discard()
        seconds = time.monotonic() - started
        self._on_result(SaveResult(work.name, size, seconds, problem, committed, is_echo))

    def _begin(self, work: "_RankSave", draft: Draft) -> None:
        """Rank 0 creates the draft; the others wait for it."""
        if work.rank == 0:
            try:
                faultpoint("checkpoint.beginning")
                self.store.sweep()
                self.store.create_draft(work.name, work.token)
            except StoreError:
                raise  # its message names the store
            except OSError as error:
                raise OSError(error.errno, f"{self.store}: {error.strerror}") from error
            finally:
                self._begun.set()
            return
        backoff = _Backoff(self._given_up, "rank 0 was lost before it had begun")
        while True:
            is_last = self._begun.is_set()  # read first: it may be created in between
            if _is_there(draft):
                return
            if is_last:
                raise FileNotFoundError(errno.ENOENT, "rank 0 has given it up")
            backoff.pause("rank 0 began nothing")


class _RankSave(NamedTuple):
    """One save, of one rank."""

    rank: int
    num_ranks: int
    name: str
    token: str
    plain: dict[str, Any]
    about: tuple[Progress, Origin]

    @property
    def place(self) -> str:
        """Whose problem it is, if it may be that of one host only."""
        return f"rank {self.rank} on {gethostname()}: " if self.num_ranks > 1 else ""

    def write(
        self, draft: Draft, placed: Sequence[PlacedChunk], snapshot: Snapshot
    ) -> RankManifest:
        """Write this rank's file, and the list of its content."""
        faultpoint("checkpoint.begun")
        file, tensors = write_chunks(draft, self.rank, placed, snapshot.chunks())
        snapshot.close()
        part = RankManifest(file, tensors, self.plain)
        draft.write(_rank_manifest_name(self.rank), [msgspec.json.encode(part)])
        return part

    def commit(self, draft: Draft, given_up: threading.Event) -> int:
        """On rank 0: wait for all ranks, then commit. Returns the checkpoint's bytes."""
        parts = [_await_rank_manifest(draft, rank, given_up) for rank in range(self.num_ranks)]
        progress, origin = self.about
        manifest = Manifest(
            manifests.FORMAT,
            manifests.VERSION,
            progress,
            origin,
            {name: value for part in parts for name, value in part.plain.items()},
            tuple(part.file for part in parts),
            merge_tensors(part.tensors for part in parts),
        )
        drop = [_rank_manifest_name(rank) for rank in range(self.num_ranks)]
        return commit_checkpoint(draft, manifest, drop)


class _Backoff:
    """Growing pauses while waiting for another rank, with a deadline."""

    def __init__(self, given_up: threading.Event, lost: str):
        self._given_up, self._lost = given_up, lost
        self._deadline, self._pause_s = time.monotonic() + PATIENCE_S, SHORTEST_PAUSE_S

    def pause(self, late: str) -> None:
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)  # remote stores are slow
        if self._given_up.wait(self._pause_s):
            raise GroupLost(self._lost)
        if time.monotonic() > self._deadline:
            raise TimeoutError(
                f"{late} within {PATIENCE_S:g} s. All ranks must see the same directory"
            )


def _is_there(draft: Draft) -> bool:
    with suppress(FileNotFoundError):
        draft.read(_rank_manifest_name(0))
        return True
    return False


def _await_rank_manifest(draft: Draft, rank: int, given_up: threading.Event) -> RankManifest:
    backoff = _Backoff(given_up, f"rank {rank} was lost before it had written its part")
    while (content := draft.read(_rank_manifest_name(rank))) is None:
        backoff.pause(f"rank {rank} wrote nothing")
    return msgspec.json.decode(content, type=RankManifest)


def _rank_manifest_name(rank: int) -> str:
    return f"part-{rank:05d}.json"


def list_regions(
    tensors: Mapping[str, Sequence[Slice]], name_of: Callable[[torch.dtype], str]
) -> Iterator[tuple[TensorRegion, Tensor]]:
    """The regions that a rank holds, each with its values."""
    for name, parts in tensors.items():
        for part in parts:
            box = Box(part.offset, tuple(part.tensor.shape))
            yield (
                TensorRegion(name, name_of(part.tensor.dtype), part.global_shape, box),
                part.tensor,
            )


def gather_regions(group: Group, own: list[TensorRegion]) -> list[list[TensorRegion]]:
    """The regions of every rank. Every rank must call it."""
    encoded = msgspec.msgpack.encode(own)
    return [
        msgspec.msgpack.decode(broadcast_bytes(group, rank, encoded), type=list[TensorRegion])
        for rank in range(group.num_ranks)
    ]


def _digest(items: list[Any]) -> float:
    """A hash as a float, which carries 53 bits of it."""
    return digest_number([msgspec.msgpack.encode(items)])


def _source(chunk: TensorRegion, own: Sequence[TensorRegion]) -> tuple[TensorRegion, Box]:
    """Which of this rank's regions contains a chunk, and where in it."""
    held = next(
        held for held in own if held.box.intersect(chunk.box) == chunk.box or not chunk.box.numel
    )
    return held, chunk.box.relative_to(held.box)
