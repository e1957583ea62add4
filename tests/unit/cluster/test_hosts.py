"""Which hosts are taken."""

import pytest

from shoal.cluster.host_links import comparable_facts, describe_difference

FACTS = {"plan": "data=2", "num_samples": 5, "cuts": "words", "run": {"seed": {"value": 1}}}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_samples": 6}, "num_samples is 5 on the first host and 6 on this one"),
        ({"run": {"seed": {"value": 2}}}, "seed is 1 on the first host and 2 on this one"),
        ({"first_weights": "ab"}, "first_weights is None on the first host and ab on this one"),
        ({"plan": "x" * 1000}, f"plan is data=2 on the first host and {'x' * 200} on this one"),
    ],
)
def test_what_differs_is_named(change: dict[str, object], words: str) -> None:
    assert words in describe_difference(comparable_facts(FACTS), comparable_facts(FACTS | change))


def test_words_for_people_may_differ() -> None:
    assert (
        describe_difference(
            comparable_facts(FACTS), comparable_facts(FACTS | {"cuts": "other words"})
        )
        == ""
    )
    assert {"shoal", "torch", "python", "numpy"} <= {*comparable_facts(FACTS)}
