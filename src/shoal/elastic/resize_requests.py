"""Requests to resize a run, or to save it, from the client's request to the reply.

Read next: `control.py`.
"""

from pathlib import Path
from typing import Any

import msgspec

from shoal.elastic.actions import Action, NotResized, Resized
from shoal.elastic.control import (
    ControlClient,
    ControlReply,
    ControlRequest,
    ControlSocket,
    SizeChange,
)
from shoal.elastic.membership import Membership
from shoal.errors import UsageError, sendable
from shoal.events.events import Event, SavedEvent, SaveFailedEvent, SaveSkippedEvent
from shoal.formatting import plural
from shoal.logs import warn_once
from shoal.plans.plan import Plan
from shoal.plans.resize import (
    RunSize,
    describe_change,
    describe_lost_state,
    resize_plan,
    served_size,
    size_of,
    with_size,
)


def _open_control(run_dir: Path) -> ControlSocket | None:
    """None, with a warning, if the run directory cannot hold a socket."""
    try:
        return ControlSocket(run_dir)
    except OSError as error:
        warn_once(f"{run_dir} cannot hold a socket ({error.strerror}): no `shoal resize` here.")
        return None


class SaveRequests:
    """Clients that wait for a checkpoint of the step under way, or of a later one."""

    def __init__(self) -> None:
        self._waiting: list[tuple[ControlClient, int]] = []  # and the last step when they asked
        self._told = -1  # the generation in which a rank knows of it

    def add(self, client: ControlClient, step: int) -> None:
        self._waiting.append((client, step))
        self._told = -1

    def is_due(self, generation: int) -> bool:
        """Whether a rank of this generation must be asked; True once."""
        is_new, self._told = generation != self._told, generation
        return is_new and bool(self._waiting)

    def take(self, event: Event) -> None:
        """Reply to those who asked for what this event tells of."""
        if not isinstance(event, SavedEvent | SaveFailedEvent | SaveSkippedEvent):
            return
        reply = ControlReply(refused=f"Step {event.step} was not saved.")
        if isinstance(event, SavedEvent):
            reply = ControlReply(saved=event.name)
        elif event.why:
            reply = ControlReply(refused=sendable(f"Step {event.step} was not saved: {event.why}."))
        for client, step in self._waiting:
            if step <= event.step:
                client.reply(reply)
        self._waiting = [one for one in self._waiting if one[1] > event.step]

    def close(self) -> None:
        for client, _ in self._waiting:
            client.refuse("The run was over before it could be saved.")


class ResizeRequests:
    """Handles one resize at a time, of a client or of the run itself as hosts come and go. `plan`
    is the present one; `alone` is the reason why the run cannot have more than one rank, if there
    is one."""

    def __init__(self, run_dir: Path, plan: Plan, alone: str = ""):
        self.control, self.plan = _open_control(run_dir), plan
        self._alone = alone
        self._client: ControlClient | None = None
        self._num_bytes, self._generation = 0, -1
        self.saves = SaveRequests()

    def poll(self, members: Membership, is_stopping: bool, now: float) -> list[Action]:
        """Start what clients have requested, or refuse it."""
        actions: list[Action] = []
        for client, request in [] if self.control is None else self.control.requests():
            try:
                if is_stopping or members.over:
                    raise UsageError("The run is about to end.")
                if request.save:
                    self._refuse_unsavable()
                    self.saves.add(client, members.step)
                    continue
                actions += self._start(request, members, now)
                self._client = client
            except UsageError as wrong:
                client.refuse(str(wrong))
        return actions

    def _refuse_unsavable(self) -> None:
        if self.plan.fragments > 1:
            raise UsageError(
                "Its replicas agree on each fragment at another time, so there is no step to save "
                "but those of save_every. Stop it: it saves itself, and goes on with --resume."
            )

    def _start(self, request: ControlRequest, members: Membership, now: float) -> list[Action]:
        if members.is_resizing:
            raise UsageError("The run is being resized already. Ask again when that is done.")
        wanted = resize_plan(self.plan, request.resize)
        if self._alone and wanted.num_ranks > 1:
            raise UsageError(self._alone)
        size = size_of(wanted)
        if size.num_ranks > max(members.num_slots, members.size.num_ranks):
            raise UsageError(
                f"data={wanted.num_replicas}: the hosts of this run have room for "
                f"{plural(members.num_slots, 'rank')}. Let another host join, or ask for less."
            )
        self._num_bytes, self._generation = 0, -1
        return members.resize(size, now, self._needs_repartition(size))

    def _needs_repartition(self, size: RunSize) -> bool:
        """Whether the servers must restart from a new partition of their state."""
        before, after = (served_size(self.plan, one) for one in (size_of(self.plan), size))
        return size.num_servers > 0 and before != after

    def add_moved_bytes(self, generation: int, num_bytes: int) -> None:
        """Count bytes that a server moves; a newer generation starts at zero."""
        if generation > self._generation:
            self._generation, self._num_bytes = generation, 0
        if generation == self._generation:
            self._num_bytes += num_bytes

    def finish(self, action: Resized, now: float) -> dict[str, Any]:
        """Reply to the client; returns the fields of the event `resize_plan`."""
        before, self.plan = self.plan, with_size(self.plan, action.after)
        ms = (now - action.paused_at) * 1000
        change = SizeChange(
            step=action.step,
            plan=str(self.plan),
            change=describe_change(action.before, action.after, before.tensor * before.pipeline),
            bytes=self._num_bytes,
            ms=round(ms, 1),
            lost=describe_lost_state(before, self.plan),
        )
        self._reply(ControlReply(change))
        return msgspec.structs.asdict(change)

    def cancel(self, action: NotResized) -> None:
        self._refuse(f"The run keeps its size: {action.cause}.")

    def close(self) -> None:
        self._refuse("The run was over before it could be resized.")
        self.saves.close()
        if self.control is not None:
            self.control.close()

    def _refuse(self, why: str) -> None:
        self._reply(ControlReply(refused=sendable(why)))

    def _reply(self, reply: ControlReply) -> None:
        if self._client is not None:
            self._client.reply(reply)
            self._client = None
