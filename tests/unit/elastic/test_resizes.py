"""What is told of a resize."""

from pathlib import Path

from shoal.elastic.actions import Resized
from shoal.elastic.resizes import Resizes
from shoal.plans.plan import Plan
from shoal.plans.size import Size


def test_what_moves_is_counted_once_if_a_death_lets_servers_begin_again(tmp_path: Path) -> None:
    resizes = Resizes(tmp_path, Plan.parse("data=2 sync=server servers=2 pieces=2"))
    try:
        for generation, num_bytes in ((3, 100), (4, 100), (3, 50), (4, 20)):
            resizes.parted(generation, num_bytes)
        told = resizes.done(Resized(Size(2, 2), Size(2, 1), (), 0.0, 10))
        assert (told["bytes"], told["step"]) == (120, 10)
    finally:
        resizes.close()
