"""What is told of a resize."""

from pathlib import Path

from shoal.elastic.actions import Resized
from shoal.elastic.control import ControlReply
from shoal.elastic.resize_requests import ResizeRequests, SaveRequests
from shoal.events.events import SavedEvent, SaveFailedEvent
from shoal.plans.plan import Plan
from shoal.plans.resize import RunSize


def test_what_moves_is_counted_once_if_a_death_lets_servers_begin_again(tmp_path: Path) -> None:
    resizes = ResizeRequests(tmp_path, Plan.parse("data=2 sync=server servers=2 pieces=2"))
    try:
        for generation, num_bytes in ((3, 100), (4, 100), (3, 50), (4, 20)):
            resizes.add_moved_bytes(generation, num_bytes)
        told = resizes.finish(Resized(RunSize(2, 2), RunSize(2, 1), (), 0.0, 10), 0.0)
        assert (told["bytes"], told["step"]) == (120, 10)
    finally:
        resizes.close()


class Client:
    def __init__(self) -> None:
        self.told: list[ControlReply] = []

    def reply(self, reply: ControlReply) -> None:
        self.told.append(reply)

    def refuse(self, why: str) -> None:
        self.reply(ControlReply(refused=why))


def test_who_asks_for_a_checkpoint_gets_one_that_is_no_older() -> None:
    saves, early, late = SaveRequests(), Client(), Client()
    assert not saves.is_due(0)
    saves.add(early, 10)  # type: ignore[arg-type]
    assert saves.is_due(0) and not saves.is_due(0)
    saves.add(late, 15)  # type: ignore[arg-type]
    assert saves.is_due(0) and saves.is_due(1)  # a new group has not heard of it
    saves.take(SavedEvent(step=9, name="step-00000009", bytes=1, ms=1.0))
    assert not early.told
    saves.take(SavedEvent(step=12, name="step-00000012", bytes=1, ms=1.0))
    assert early.told == [ControlReply(saved="step-00000012")] and not late.told
    saves.take(SaveFailedEvent(step=15, why="the disk is full"))
    assert "the disk is full" in late.told[0].refused
    saves.close()
    assert len(early.told) == len(late.told) == 1 and not saves.is_due(2)


def test_who_asks_at_the_end_is_told_so() -> None:
    saves, client = SaveRequests(), Client()
    saves.add(client, 3)  # type: ignore[arg-type]
    saves.close()
    assert "over before it could be saved" in client.told[0].refused
