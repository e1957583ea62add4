"""How a run ended, by how the ranks that a launcher started did; which of them are unlike."""

import faulthandler
import logging
import os
import socket
import sys
import threading
import time
from pathlib import Path

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from shoal.elastic.messages import Failed
from shoal.errors import RUN_AGAIN, UsageError
from shoal.launch import rank_peers
from shoal.launch.rank import RankEnd, how_all_ended, train_as_rank
from shoal.launch.rank_peers import RankCard, RankPeers, refuse_unlike_cards
from shoal.launch.train import Options
from shoal.testing.ranks import Pool
from shoal.training.options import Recipe
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


def test_rank_0_stays_until_the_slow_ones_that_came_have_read_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a busy machine; else it would be taken for lost, and they would say so as well."""
    monkeypatch.setattr(rank_peers, "FAILING_S", 0.05)
    store = dist.HashStore()
    slow = RankPeers(store, WORLD._replace(rank=1))  # and rank 2 never came
    slow.tell("card", b"")
    first = RankPeers(store, WORLD)
    ending = threading.Thread(target=first.end_together, args=[2])
    ending.start()
    time.sleep(0.3)
    assert ending.is_alive()
    slow.end_together(2)
    ending.join(10.0)
    assert not ending.is_alive()


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


def test_clear_text_between_hosts_is_refused(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "192.0.2.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    with pytest.raises(UsageError, match="cross the network in clear"):
        train(tmp_path / "run", Options(), World(0, 2, 0, 1, "torchrun"))


def train(run_dir: Path, options: Options, world: World) -> int:
    tiny = Path(__file__).parents[2] / "system/tiny.py"
    return train_as_rank(
        Recipe.named(f"{tiny}:line", {"steps": "2"}),
        options,
        run_dir,
        world,
        watch=lambda event: None,
        prepared=lambda facts, run_dir: None,
        show=lambda outcome: outcome.exit_code,
    )


def test_a_program_that_is_a_rank_finds_its_log_as_it_was(pool: Pool, tmp_path: Path) -> None:
    errors = tmp_path / "errors"
    done = pool.start(
        embed_a_rank,
        str(tmp_path / "run"),
        environment={"OMP_NUM_THREADS": "1"},
        directory=tmp_path,
        output=tmp_path / "output",
        errors=errors,
    )
    assert done.wait() == 0, errors.read_text()
    assert "of the program" in errors.read_text()
    log = (tmp_path / "run/logs/rank-000.log").read_text()
    assert "of the program" not in log and "DEBUG" in log


def embed_a_rank(run_dir: str) -> int:
    """What a program does that logs and prints in its own way, and trains as a launched rank."""
    log, own, output = logging.getLogger("shoal"), logging.StreamHandler(), sys.stdout
    log.addHandler(own)
    log.setLevel(logging.ERROR)
    faulthandler.enable()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    code = train(Path(run_dir), Options(log_level="debug"), World(launcher="torchrun"))
    assert (log.handlers, log.level, log.propagate) == ([own], logging.ERROR, True)
    assert sys.stdout is output and faulthandler.is_enabled()
    log.error("of the program")
    return code
