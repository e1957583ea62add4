"""What the ranks of a launcher tell each other outside of their steps, through the store they meet
in: who is there, how far each is, how it ended.

Nobody supervises them, so each looks after the others itself: a rank that waits for another holds a
descriptor of that one's process (of the same host) and knows at once when it has ended. On other
hosts a rank is known by what it tells alone. Cost: a request to the store every 20 ms while a rank
waits, none while it trains.

Read next: `rank.py`, for what is told.
"""

import os
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
import torch.distributed as dist

from shoal.errors import FormError, ShoalError, UsageError
from shoal.formatting import name_ranks
from shoal.system.processes import readable
from shoal.world import World

POLL_S = 0.02
ENDING_S = 60.0  # for ranks to say how they ended, once this one has
FAILING_S = 2.0  # the same, once one of them has failed


class RanksGone(ShoalError):
    """Processes of other ranks have ended, and what they had to tell will not come."""

    def __init__(self, ranks: Sequence[int]):
        super().__init__(f"{name_ranks(ranks)} ended")
        self.ranks = ranks


class RankCard(msgspec.Struct, frozen=True):
    """Who a rank is: its process, and what it was asked for."""

    num_ranks: int
    host: str
    pid: int
    given: dict[str, str]


def refuse_unlike_cards(cards: Mapping[int, RankCard]) -> None:
    """Refuse ranks that were started for unlike things. Pure, and the same on every rank."""
    first = cards[min(cards)]
    for rank, card in sorted(cards.items()):
        if card.num_ranks != first.num_ranks:
            raise UsageError(
                f"Rank {rank} was told of {card.num_ranks} ranks, and rank 0 of {first.num_ranks}. "
                "All ranks of a run are started by one command of the launcher."
            )
        for name in [*first.given, *card.given]:
            here, there = card.given.get(name), first.given.get(name)
            if here != there:
                raise UsageError(
                    f"Ranks are about to train unlike things: rank {rank} was started with "
                    f"{_shown(name, here)}, and rank 0 with {_shown(name, there)}. All ranks of a "
                    "run are given the same command."
                )


def _shown(name: str, value: str | None) -> str:
    return f"no {name}" if value is None else f"{name} {value}"


class RankPeers:
    """The ranks of this job, as one of them sees the others."""

    def __init__(self, store: dist.Store, world: World):
        restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self._store = dist.PrefixStore(f"shoal/train/{restart}", store)
        self.world = world
        self._watched: dict[int, int] = {}  # rank -> a descriptor of its process
        self._gone: set[int] = set()

    @property
    def others(self) -> list[int]:
        return [rank for rank in range(self.world.num_ranks) if rank != self.world.rank]

    def meet(self, given: Mapping[str, str], timeout_s: float) -> bool:
        """Wait for all ranks and compare what they are asked for. Whether all are of one host."""
        own = RankCard(self.world.num_ranks, _this_host(), os.getpid(), dict(given))
        if self._store.add(f"came/{self.world.rank}", 1) > 1:
            raise UsageError(
                f"Two processes say that they are rank {self.world.rank}. The launcher gives each "
                "process a number of its own; look at what sets RANK."
            )
        self.tell("card", msgspec.msgpack.encode(own))
        found = self.await_all("card", timeout_s)
        cards = {rank: msgspec.msgpack.decode(c, type=RankCard) for rank, c in found.items()}
        for rank in self.others:
            if cards[rank].host == own.host:
                self._watch(rank, cards[rank].pid)
        refuse_unlike_cards(cards)
        return len({card.host for card in cards.values()}) == 1

    def close(self) -> None:
        while self._watched:
            os.close(self._watched.popitem()[1])

    def tell(self, what: str, content: bytes) -> None:
        try:
            self.tell_all(f"{what}/{self.world.rank}", content)
        except RuntimeError:
            raise RanksGone([0]) from None

    def count(self, what: str) -> int:
        """The next number of something that all ranks number together."""
        return self._store.add(what, 1)

    def tell_all(self, key: str, content: bytes) -> None:
        self._store.set(key, content)  # type: ignore[arg-type] # it takes bytes too

    def heard(self, key: str) -> bytes | None:
        """What was told under a key, if it was."""
        return self._store.get(key) if self._store.check([key]) else None

    def await_one(self, what: str, rank: int) -> bytes:
        """What a rank tells, whenever it does; RanksGone if it has ended."""
        return self._await(what, [rank], None)[rank]

    def await_all(self, what: str, timeout_s: float | None = None) -> dict[int, bytes]:
        """What every rank tells; FormError names those that have not by the deadline."""
        ranks = range(self.world.num_ranks)
        found = self._await(what, ranks, timeout_s)
        if missing := [rank for rank in ranks if rank not in found]:
            raise FormError(
                f"The group of {self.world.num_ranks} ranks did not form within {timeout_s:g} s: "
                f"{name_ranks(missing)} did not come. Look at what that process printed; "
                "--form-timeout gives it longer."
            )
        return found

    def first_came(self) -> bool:
        """Whether rank 0 is there, or was."""
        try:
            return bool(self.told_by("card", [0]))
        except RanksGone:
            return True

    def end_together(self, code: int, patience_s: float = ENDING_S) -> None:
        """Let rank 0, which holds the store, stay until those that came have read all; if all
        fail, let these stay until it has said why: a launcher ends the rest with the first."""
        with suppress(RanksGone):
            if self.world.rank == 0:
                self._await("read", self.told_by("card", self.others), patience_s)
                return
            self.tell("read", b"")
            if code:
                self._await("end", [0], ENDING_S if 0 in self._watched else FAILING_S)

    def told_by(self, what: str, ranks: Collection[int]) -> dict[int, bytes]:
        """What those of some ranks told that have told it."""
        try:
            found = {rank: self.heard(f"{what}/{rank}") for rank in ranks}
        except RuntimeError:
            raise RanksGone([0]) from None
        return {rank: content for rank, content in found.items() if content is not None}

    def gone(self) -> list[int]:
        """The ranks of this host whose processes have ended."""
        if self._watched:
            ended = set(readable(self._watched.values(), 0))
            self._gone |= {rank for rank, process in self._watched.items() if process in ended}
        return sorted(self._gone)

    def _await(
        self, what: str, ranks: Collection[int], timeout_s: float | None
    ) -> dict[int, bytes]:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        found: dict[int, bytes] = {}
        while True:
            gone = set(self.gone())  # before we look for what they may have told
            found |= self.told_by(what, [rank for rank in ranks if rank not in found])
            missing = [rank for rank in ranks if rank not in found]
            if not missing or (deadline is not None and time.monotonic() > deadline):
                return found
            if lost := sorted(gone & set(missing)):
                raise RanksGone(lost)
            time.sleep(POLL_S)

    def _watch(self, rank: int, pid: int) -> None:
        try:
            self._watched[rank] = os.pidfd_open(pid)
        except ProcessLookupError:
            self._gone.add(rank)
        except OSError:
            return  # a kernel without it: that rank is known by what it tells


def _this_host() -> str:
    """The same for all processes that can see each other's numbers."""
    namespace = ""
    with suppress(OSError):
        namespace = os.readlink("/proc/self/ns/pid")
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    return f"{boot} {namespace}"
