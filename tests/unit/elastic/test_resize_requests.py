"""What is told of a resize."""

from pathlib import Path

from shoal.elastic.actions import Resized
from shoal.elastic.resize_requests import ResizeRequests
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
