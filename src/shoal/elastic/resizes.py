"""Requests for another size, from the command that asks to the answer that it gets."""

import time
from pathlib import Path
from typing import Any

import msgspec

from shoal.elastic.actions import Action, NotResized, Resized
from shoal.elastic.control import Answer, Caller, Change, Control, Request
from shoal.elastic.membership import Membership
from shoal.errors import UsageError, sendable
from shoal.logs import warn_once
from shoal.plans.plan import Plan
from shoal.plans.size import Size, in_words, parts_with, resized, served_size, size_of


def open_resizes(run_dir: Path, plan: Plan, alone: str) -> "Resizes | None":
    """None, with a warning, where no command can reach the run."""
    try:
        return Resizes(run_dir, plan, alone)
    except OSError as error:
        warn_once(f"{run_dir} cannot hold a socket ({error.strerror}): no `shoal resize` here.")
        return None


class Resizes:
    """Of one run; one at a time. `plan` is what the run follows now, and `alone` why its one rank
    can have no other, if it cannot."""

    def __init__(self, run_dir: Path, plan: Plan, alone: str = ""):
        self.control, self.plan = Control(run_dir), plan
        self._alone, self._wanted = alone, plan
        self._caller: Caller | None = None
        self._num_bytes, self._generation = 0, -1

    def turn(self, members: Membership, is_stopping: bool) -> list[Action]:
        """Hear what is asked for, and begin it."""
        actions: list[Action] = []
        for caller, asked in self.control.requests():
            try:
                actions += self._begin(asked, members, is_stopping)
                self._caller = caller
            except UsageError as wrong:
                caller.refuse(str(wrong))
        return actions

    def _begin(self, asked: Request, members: Membership, is_stopping: bool) -> list[Action]:
        if is_stopping or members.over:
            raise UsageError("The run is about to end. Go on with --resume and another --plan.")
        if members.is_resizing:
            raise UsageError("The run is being resized already. Ask again when that is done.")
        wanted = resized(self.plan, asked.resize)
        if self._alone and wanted.num_ranks > 1:
            raise UsageError(self._alone)
        self._wanted, self._num_bytes, self._generation = wanted, 0, -1
        return members.resize(size_of(wanted), time.monotonic(), self._parts(size_of(wanted)))

    def _parts(self, size: Size) -> bool:
        """Whether servers begin anew, from what they wrote down."""
        before, after = (served_size(self.plan, one) for one in (size_of(self.plan), size))
        return size.num_servers > 0 and before != after

    def parted(self, generation: int, num_bytes: int) -> None:
        """So many bytes move from a server. In another generation all begin again."""
        if generation > self._generation:
            self._generation, self._num_bytes = generation, 0
        if generation == self._generation:
            self._num_bytes += num_bytes

    def done(self, action: Resized) -> dict[str, Any]:
        """Tell who asked; what is to be put on record."""
        before, self.plan = self.plan, self._wanted
        ms = (time.monotonic() - action.met_at) * 1000
        told = Change(
            step=action.step,
            plan=str(self.plan),
            change=in_words(action.before, action.after),
            bytes=self._num_bytes,
            ms=round(ms, 1),
            lost=parts_with(before, self.plan),
        )
        self._answer(Answer(told))
        return msgspec.structs.asdict(told)

    def not_done(self, action: NotResized) -> None:
        self._refuse(f"The run keeps its size: {action.cause}.")

    def close(self) -> None:
        self._refuse("The run was over before it could be resized.")
        self.control.close()

    def _refuse(self, why: str) -> None:
        self._answer(Answer(refused=sendable(why)))

    def _answer(self, answer: Answer) -> None:
        if self._caller is not None:
            self._caller.answer(answer)
            self._caller = None
