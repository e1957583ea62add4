"""Who did not come, from where ranks say that they stand."""

import msgspec
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from shoal.comm import mesh
from shoal.comm.flight_recorder import FlightRecorder, OpenCollective, Standing
from shoal.comm.hangs import explain_hang
from shoal.world import World


def waits(group: str, number: int, ranks: tuple[int, ...], op: str = "all-reduce") -> Standing:
    at = OpenCollective(op, "bucket 3 of 8", 41, "_agree (a.py:7)", group, number, ranks, 75.2)
    return Standing((at,), {group: number})


def computes(line: str, **reached: int) -> Standing:
    return Standing((), reached, line)


def test_the_rank_that_is_behind_is_named() -> None:
    all_ranks = (0, 1, 2)
    stands = {0: waits("w", 9, all_ranks), 1: computes("loss (recipe.py:3)", w=8)}
    stands[2] = waits("w", 9, all_ranks)
    hang = explain_hang(stands, 3, 40)
    assert hang is not None
    assert (hang.waiting, hang.missing, hang.seconds, hang.step) == ([0, 2], [1], 75, 41)
    assert hang.text == (
        "ranks 0, 2 wait in all-reduce (bucket 3 of 8) of step 41, begun at _agree (a.py:7), and "
        "rank 1 did not come; rank 1 is at loss (recipe.py:3)"
    )


def test_ranks_that_wait_for_one_that_waits_are_not_named() -> None:
    """A pipeline: 0 waits for 1, 1 for 2, and 2 hangs, though it has begun to receive."""
    stands = {
        0: waits("p:1>0", 5, (1, 0), "receive from rank 1"),
        1: waits("p:2>1", 5, (2, 1), "receive from rank 2"),
        2: Standing(waits("p:1>2", 6, (1, 2)).open, {"p:1>2": 6}, "loss (recipe.py:3)"),
    }
    hang = explain_hang(stands, 3, 40)
    assert hang is not None and hang.missing == [2]


def test_a_rank_that_says_nothing_did_not_come() -> None:
    hang = explain_hang({0: waits("w", 9, (0, 1))}, 2, 40)
    assert hang is not None and hang.missing == [1] and hang.lines == {}


def test_ranks_in_unlike_collectives_are_told_apart() -> None:
    hang = explain_hang({0: waits("a", 3, (0, 1)), 1: waits("b", 2, (0, 1), "broadcast")}, 2, 40)
    assert hang is not None and hang.missing == []
    assert "while others wait elsewhere: rank 1 in broadcast" in hang.text


def test_all_have_come_and_it_does_not_end() -> None:
    hang = explain_hang({r: waits("w", 3, (0, 1)) for r in (0, 1)}, 2, 40)
    assert hang is not None and "the transport does not end it" in hang.text


def test_a_server_waits_for_those_that_do_not_ask_it() -> None:
    asks = waits("server:0", 4, (), "request to server 0")
    hang = explain_hang({0: asks, 1: computes("loss (recipe.py:3)")}, 2, 40)
    assert hang is not None and hang.missing == [1]


def test_ranks_that_only_compute_are_no_hang() -> None:
    assert explain_hang({0: computes("a"), 1: computes("b")}, 2, 1) is None
    assert explain_hang({}, 2, 1) is None


@given(st.lists(st.integers(0, 3), min_size=2, max_size=6), st.data())
def test_whoever_is_named_waits_for_nothing(reached: list[int], data: st.DataObject) -> None:
    ranks = tuple(range(len(reached)))
    furthest = max(reached)
    stands = {
        rank: waits("w", number, ranks) if number == furthest else computes("x", w=number)
        for rank, number in enumerate(reached)
        if number == furthest or data.draw(st.booleans())
    }
    hang = explain_hang(stands, len(ranks), 0)
    assert hang is not None
    assert hang.missing == [r for r in ranks if reached[r] < furthest]


def test_ranks_without_a_supervisor_find_out_by_themselves(monkeypatch) -> None:
    """Rank 0 asks; rank 2 has said that it waits for the same, rank 1 says nothing."""
    monkeypatch.setattr(mesh, "ANSWER_S", 0.1)
    store, recorder = dist.HashStore(), FlightRecorder()
    monkeypatch.setattr(mesh, "RECORDER", recorder)
    recorder.step, recorder.what = 7, "bucket 0 of 2"
    recorder.begin("all-reduce", "w", (0, 1, 2), 84)
    other = recorder.standing(0.0)
    assert other is not None
    store.set("2", msgspec.json.encode(other).decode())
    told = mesh._explain_wait(store, World(0, 3))
    assert told.startswith("ranks 0, 2 wait in all-reduce (bucket 0 of 2, 84 bytes) of step 7")
    assert told.endswith("rank 1 did not come")
