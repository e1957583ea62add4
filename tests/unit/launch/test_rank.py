"""How a run ended, by how the ranks that a launcher started did; which of them are unlike."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.elastic.messages import Failed
from shoal.errors import RUN_AGAIN, UsageError
from shoal.launch.rank import RankEnd, how_all_ended
from shoal.launch.rank_peers import RankCard, refuse_unlike_cards
from shoal.world import World

WORLD = World(0, 3, 0, 3, "mpirun")
DONE = RankEnd(8, {"steps": 8, "checkpoint": 8, "stopped": False})
FAILED = RankEnd(4, failed=Failed(4, "KeyError: 'x'", "trace", 1))
LOST = RankEnd(4, lost="connection closed")


def stopped(saved: int) -> RankEnd:
    return RankEnd(5, {"steps": 5, "checkpoint": saved, "stopped": True})


def test_all_done() -> None:
    result = how_all_ended(dict.fromkeys(range(3), DONE), [], WORLD)
    assert (result.exit_code, result.cause, result.step) == (0, "", 8)
    assert sorted(result.summaries) == [0, 1, 2]


@pytest.mark.parametrize(("saved", "code"), [(5, RUN_AGAIN), (3, 143)])
def test_a_stop_is_to_be_gone_on_from_if_it_was_saved(saved: int, code: int) -> None:
    result = how_all_ended(dict.fromkeys(range(3), stopped(saved)), [], WORLD)
    assert (result.exit_code, result.stopped_by, result.cause) == (code, 15, "")


def test_an_error_counts_before_what_it_caused() -> None:
    result = how_all_ended({0: LOST, 1: FAILED, 2: LOST}, [], WORLD)
    assert result.cause == "rank 1 failed at step 5: KeyError: 'x'"
    assert (result.exit_code, result.trace) == (1, "trace")
    every = how_all_ended(dict.fromkeys(range(3), FAILED), [], WORLD)
    assert every.cause.startswith("every rank failed")


def test_a_rank_that_ended_without_a_word_is_named() -> None:
    result = how_all_ended({0: LOST, 2: LOST}, [1], WORLD)
    assert "rank 1 was lost after step 4: its process has ended" in result.cause
    elsewhere = how_all_ended({0: LOST, 1: LOST}, [], WORLD)
    assert "rank 2 was lost" in elsewhere.cause and "connection closed" in elsewhere.cause
    assert "a rank was lost" in how_all_ended(dict.fromkeys(range(3), LOST), [], WORLD).cause


@given(
    ends=st.dictionaries(st.integers(0, 2), st.sampled_from([DONE, FAILED, LOST, stopped(5)])),
    gone=st.sets(st.integers(0, 2)),
)
def test_what_is_not_whole_never_counts_as_done(ends: dict[int, RankEnd], gone: set[int]) -> None:
    ends = {0: ends.get(0, DONE), **{r: e for r, e in ends.items() if r not in gone}}
    silent = sorted(rank for rank in gone if rank not in ends)
    result = how_all_ended(ends, silent, WORLD)
    is_whole = len(ends) == 3 and all(end == DONE for end in ends.values())
    assert (result.exit_code == 0) == is_whole
    assert is_whole or result.cause or result.stopped_by


def test_unlike_commands_are_named() -> None:
    usual = RankCard(2, "host", 1, {"the recipe": "a.py:b", "--set lr": "1"})
    refuse_unlike_cards({0: usual, 1: usual})
    other = RankCard(2, "host", 2, {"the recipe": "a.py:b"})
    with pytest.raises(UsageError, match="rank 1 was started with no --set lr, and rank 0 with"):
        refuse_unlike_cards({0: usual, 1: other})
    with pytest.raises(UsageError, match="Rank 1 was told of 3 ranks, and rank 0 of 2"):
        refuse_unlike_cards({0: usual, 1: RankCard(3, "host", 2, dict(usual.given))})
