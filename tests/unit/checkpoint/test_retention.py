"""Retention keeps what was asked for, never nothing, and never changes its mind."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.checkpoint.retention import CheckpointSummary, RetentionPolicy, find_expired
from shoal.errors import UsageError

keeps = st.builds(
    RetentionPolicy,
    last=st.integers(1, 5),
    every=st.none() | st.integers(1, 50),
    best=st.none() | st.sampled_from(["loss", "accuracy"]),
    is_large_best=st.booleans(),
).map(lambda keep: keep if keep.best else keep._replace(is_large_best=False))
values = st.floats(allow_nan=True, allow_infinity=True) | st.sampled_from([0.5, 0.25])
metrics = st.dictionaries(st.sampled_from(["loss", "accuracy"]), values)


@st.composite
def known(draw: st.DrawFn) -> list[CheckpointSummary]:
    steps = sorted(draw(st.sets(st.integers(0, 300), max_size=20)))
    tags = st.lists(st.sampled_from(["best", "half-way"]), max_size=2)
    return [
        CheckpointSummary(f"step-{step:08d}", step, draw(metrics), draw(tags)) for step in steps
    ]


def names(some: list[CheckpointSummary]) -> list[str]:
    return [one.name for one in some]


@given(keeps)
def test_what_is_printed_is_read(keep: RetentionPolicy) -> None:
    assert RetentionPolicy.parse(str(keep)) == keep


@given(known(), keeps)
def test_the_newest_stay_and_the_rest_is_accounted_for(
    some: list[CheckpointSummary], keep: RetentionPolicy
) -> None:
    go = names(find_expired(some, keep))
    assert set(go) <= set(names(some)) and go == sorted(go)
    assert not set(go) & set(names(some)[-keep.last :])
    if some:
        assert len(go) < len(some)


@given(known(), keeps)
def test_every_and_best_stay(some: list[CheckpointSummary], keep: RetentionPolicy) -> None:
    stay = [one for one in some if one not in find_expired(some, keep)]
    if keep.every is not None:
        for bucket in {one.step // keep.every for one in some} - {0}:
            assert min(o.step for o in some if o.step // keep.every == bucket) in [
                one.step for one in stay
            ]
    for tag in {tag for one in some for tag in one.tags}:
        assert [one for one in some if tag in one.tags][-1] in stay
    measured = [one.metrics[keep.best] for one in some if keep.best in one.metrics]
    measured = [value for value in measured if not math.isnan(value)]
    if measured:
        best = max(measured) if keep.is_large_best else min(measured)
        assert best in [one.metrics.get(keep.best) for one in stay]


@given(known(), keeps)
def test_one_after_another_or_all_at_once_is_the_same(
    some: list[CheckpointSummary], keep: RetentionPolicy
) -> None:
    there: list[CheckpointSummary] = []
    for one in some:
        there.append(one)
        there = [old for old in there if old not in find_expired(there, keep)]
    assert there == [one for one in some if one not in find_expired(some, keep)]


@given(known(), keeps, st.randoms())
def test_the_order_given_does_not_matter(
    some: list[CheckpointSummary], keep: RetentionPolicy, random
) -> None:
    mixed = random.sample(some, len(some))
    assert find_expired(mixed, keep) == find_expired(some, keep)


def test_an_example() -> None:
    losses = [0.9, 0.4, 0.7, 0.6, 0.5, 0.8]
    some = [
        CheckpointSummary(f"s{i}", 300 * (i + 1), {"loss": loss}) for i, loss in enumerate(losses)
    ]
    keep = RetentionPolicy.parse("last=1, every=1000 best=loss")
    # Steps 300 to 1800: 600 is the best, 1200 the first after 1000, 1800 the last.
    assert [one.step for one in find_expired(some, keep)] == [300, 900, 1500]
    assert [o.step for o in find_expired(some, RetentionPolicy())] == [300, 600, 900, 1200]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("lsat=3", "Did you mean 'last'?"),
        ("keep", "Known: best, every, last."),
        ("", "does not say what to keep"),
        ("last", "last needs a value, as in last=3"),
        ("last=0", "at least 1"),
        ("last=-1", "at least 1"),
        ("last=2.5", "whole number"),
        ("every=x", "whole number"),
        ("last=1 last=2", "given twice"),
        ("best=:max", "names no metric"),
        ("best=loss:mni", "min, which is the default, or max"),
        ("best=loss:", "min, which is the default, or max"),
    ],
)
def test_what_cannot_be_a_rule_is_refused(text: str, words: str) -> None:
    with pytest.raises(UsageError) as refused:
        RetentionPolicy.parse(text)
    assert words in str(refused.value)


def test_rules_are_read() -> None:
    assert RetentionPolicy.parse("best=accuracy:max") == RetentionPolicy(2, None, "accuracy", True)
    assert RetentionPolicy.parse("best=loss:min,every=10") == RetentionPolicy(2, 10, "loss", False)
