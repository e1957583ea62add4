"""The bottleneck is what the figures say, and comes with what to try."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.plans.keys import KEYS
from shoal.ui.findings import compression_in_words, find_bottleneck, settings_differences
from shoal.ui.records import Totals
from shoal.ui.run_reader import read_view
from tests.unit.ui.made_runs import make_run

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
    told = find_bottleneck(found, {"codec": "int8", "local_steps": "8", "sums": "ring"}, 2).tries
    assert told == ["More work between two exchanges: a larger batch_size, with accumulate=4."]


def test_one_rank_waits_for_nobody() -> None:
    assert find_bottleneck(totals(compute=5, exchange=5), {}, 1).kind == "compute"


@given(SHARES, SHARES, SHARES, SHARES, st.integers(0, 10), st.integers(1, 64))
def test_there_is_always_a_sentence(
    data: float, compute: float, exchange: float, waiting: float, steps: int, ranks: int
) -> None:
    seconds = {"data": data, "compute": compute, "exchange": exchange, "waiting": waiting}
    found = Totals(steps=steps, seconds=seconds, bytes_sent=7, wall_s=2 * sum(seconds.values()))
    assert find_bottleneck(found, {}, ranks).sentence.endswith(".")


def test_advice_names_keys_that_there_are() -> None:
    kinds = [totals(compute=1, **{kind: 9.0}) for kind in ("exchange", "waiting")]
    kinds.append(totals(compute=9))
    for found in kinds:
        for words in find_bottleneck(found, {}, 2).tries:
            keys = [word.split("=")[0] for word in words.replace(",", " ").split() if "=" in word]
            assert all(key in {*KEYS, "batch_size"} for key in keys), words


def test_what_a_codec_saves_is_said(tmp_path: Path) -> None:
    found = Totals(steps=10, bytes_sent=10 * 1000, seconds={})
    assert compression_in_words(found, {"data": "1"}, 1000) == ""
    told = compression_in_words(found, {"data": "2", "codec": "int8"}, 1000)
    assert (
        told
        == "1 kB a step and rank; a ring all-reduce of fp32 gradients sends 4 kB, 4.0 times that"
    )


def test_only_settings_that_differ_are_listed(tmp_path: Path) -> None:
    one = read_view(make_run(tmp_path / "one", steps=10, ranks=2))
    other = read_view(make_run(tmp_path / "other", steps=20, ranks=2, settings={"width": "<b>"}))
    found = {row.name: row.values for row in settings_differences([one, other])}
    assert found == {"steps": ["10", "20"], "width": [None, "<b>"]}
