"""The bottleneck is what the figures say, and comes with what to try."""

import re
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.plans.plan import Plan
from shoal.ui.findings import compression_in_words, find_bottleneck, settings_differences
from shoal.ui.records import Totals
from shoal.ui.run_reader import plan_keys, read_view
from tests.unit.ui.made_runs import make_run

_CHANGES = re.compile(r"\w+=\w+(?: \w+=\w+)*")
SHARES = st.floats(0, 1000)


def totals(**seconds: float) -> Totals:
    whole = {"data": 0.0, "compute": 0.0, "exchange": 0.0, "waiting": 0.0} | seconds
    return Totals(
        steps=100, samples=6400, bytes_sent=10**8, seconds=whole, wall_s=sum(whole.values())
    )


@pytest.mark.parametrize(
    ("found", "kind", "words"),
    [
        (totals(compute=9, data=1), "compute", "compute 90%"),
        (totals(compute=5, data=5), "data", "loading takes 50%"),
        (totals(compute=6, exchange=4), "exchange", "takes 40%"),
        (totals(compute=6, waiting=4), "waiting", "slowest of them 40%"),
        (
            Totals(
                steps=100,
                seconds={"compute": 50.0, "data": 0, "exchange": 0, "waiting": 0},
                wall_s=100,
            ),
            "lost",
            "50%",
        ),
        (Totals(steps=2, seconds={"compute": 1.0}), "none", "too few"),
    ],
)
def test_what_takes_the_time_is_named(found: Totals, kind: str, words: str) -> None:
    bottleneck = find_bottleneck(found, {"data": "2"}, 2)
    assert bottleneck.kind == kind and words in bottleneck.sentence
    assert bool(bottleneck.tries) == (kind != "none")


def test_what_the_plan_has_is_not_advised() -> None:
    found = totals(compute=5, exchange=5)
    told = find_bottleneck(found, {"data": "2", "codec": "int8", "local_steps": "8"}, 2).tries
    assert told == ["More work between two exchanges: a larger batch_size, accumulate=4."]


def test_ranks_that_run_ahead_are_held_by_the_slow_one_and_by_no_link() -> None:
    slow = {"slowest": "rank 1", "slowest_times": 3.0}
    found = msgspec.structs.replace(totals(compute=5, exchange=5), **slow)
    plan = {"data": "2", "sync": "server", "staleness": "2"}
    assert "rank 1 takes 3.0x" in find_bottleneck(found, plan, 2).sentence
    assert find_bottleneck(found, {"data": "2"}, 2).kind == "exchange"


def test_stages_that_wait_are_told_of_microbatches() -> None:
    found = find_bottleneck(totals(compute=5, waiting=5), {"data": "1", "pipeline": "2"}, 2)
    assert "another stage" in found.sentence and "microbatches" in found.tries[0]


def test_a_packed_gradient_does_not_help_who_sends_next_to_nothing() -> None:
    """Ranks of one host pass theirs through memory."""
    found = msgspec.structs.replace(totals(compute=5, exchange=5), bytes_sent=54_000)
    told = find_bottleneck(found, {"data": "2"}, 2)
    assert "little is sending (540 B a rank)" in told.sentence
    assert not any("codec" in text for text in told.tries)


def test_one_rank_waits_for_nobody() -> None:
    assert find_bottleneck(totals(compute=5, exchange=5), {}, 1).kind == "compute"


@given(SHARES, SHARES, SHARES, SHARES, st.integers(0, 10), st.integers(1, 64))
def test_there_is_always_a_sentence(
    data: float, compute: float, exchange: float, waiting: float, steps: int, ranks: int
) -> None:
    seconds = {"data": data, "compute": compute, "exchange": exchange, "waiting": waiting}
    found = Totals(steps=steps, seconds=seconds, bytes_sent=7, wall_s=2 * sum(seconds.values()))
    assert find_bottleneck(found, {}, ranks).sentence.endswith(".")


PLANS = (
    *("", "data=2 pieces=2", "data=2 sync=server servers=2 staleness=2", "data=4 zero=1"),
    *("data=2 zero=3", "data=1 pipeline=2 pieces=8", "data=2 tensor=2", "data=2 local_steps=4"),
    *("data=2 codec=int8", "data=2 sums=ring", "data=2 precision=bf16", "data=2 pieces=16"),
)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("kind", ["compute", "exchange", "waiting"])
def test_advice_is_what_a_run_of_this_plan_can_take(plan: str, kind: str) -> None:
    keys = plan_keys(plan)
    tries = find_bottleneck(totals(**{"compute": 1.0, kind: 9.0}), keys, 2).tries
    assert tries
    for words in _CHANGES.findall("\n".join(tries)):
        changed = keys | dict(word.split("=") for word in words.split())
        if "pieces" not in words:
            changed.pop("pieces", None)
        Plan.parse(" ".join(f"{key}={value}" for key, value in changed.items()))


def test_what_a_run_paused_for_is_not_lost() -> None:
    seconds = {"compute": 50.0, "data": 0.0, "exchange": 0.0, "waiting": 0.0}
    found = Totals(steps=100, seconds=seconds, wall_s=5000, paused_s=4945)
    assert find_bottleneck(found, {"data": "2"}, 2).kind == "compute"


def test_what_a_codec_saves_is_said(tmp_path: Path) -> None:
    found = Totals(steps=10, bytes_sent=10 * 1000, seconds={})
    assert compression_in_words(found, {"data": "1"}, 1000) == ""
    told = compression_in_words(found, {"data": "2", "codec": "int8"}, 1000)
    assert (
        told
        == "1 kB a step and rank; a ring all-reduce of fp32 gradients sends 4 kB, 4.0 times that"
    )
    told = compression_in_words(found, {"data": "2"}, 1000)
    assert told.endswith("what ranks of one host pass through shared memory is not sent")


def test_only_settings_that_differ_are_listed(tmp_path: Path) -> None:
    one = read_view(make_run(tmp_path / "one", steps=10, ranks=2))
    other = read_view(make_run(tmp_path / "other", steps=20, ranks=2, settings={"width": "<b>"}))
    found = {row.name: row.values for row in settings_differences([one, other])}
    assert found == {"steps": ["10", "20"], "width": [None, "<b>"]}
