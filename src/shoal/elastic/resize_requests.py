"""Requests to resize a run, from the client's request to the reply. Read next: `control.py`."""

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


class ResizeRequests:
    """Handles one resize at a time, of a client or of the run itself as hosts come and go. `plan`
    is the present one; `alone` is the reason why the run cannot have more than one rank, if there
    is one."""

    def __init__(self, run_dir: Path, plan: Plan, alone: str = ""):
        self.control, self.plan = _open_control(run_dir), plan
        self._alone = alone
        self._client: ControlClient | None = None
        self._num_bytes, self._generation = 0, -1

    def poll(self, members: Membership, is_stopping: bool, now: float) -> list[Action]:
        """Start what clients have requested, or refuse it."""
        actions: list[Action] = []
        for client, request in [] if self.control is None else self.control.requests():
            try:
                actions += self._start(request, members, is_stopping, now)
                self._client = client
            except UsageError as wrong:
                client.refuse(str(wrong))
        return actions

    def _start(
        self, request: ControlRequest, members: Membership, is_stopping: bool, now: float
    ) -> list[Action]:
        if is_stopping or members.over:
            raise UsageError("The run is about to end. Go on with --resume and another --plan.")
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
        if self.control is not None:
            self.control.close()

    def _refuse(self, why: str) -> None:
        self._reply(ControlReply(refused=sendable(why)))

    def _reply(self, reply: ControlReply) -> None:
        if self._client is not None:
            self._client.reply(reply)
            self._client = None
