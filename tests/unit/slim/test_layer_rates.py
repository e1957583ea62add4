"""Name patterns, depths of layers and factors of learning rates."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import UsageError
from shoal.slim.layer_rates import check_rates, layer_depths, names_matching, rate_factors

BERT = [
    "embeddings.word.weight",
    "embeddings.norm.weight",
    "encoder.layer.0.query.weight",
    "encoder.layer.0.output.bias",
    "encoder.layer.1.query.weight",
    "encoder.layer.10.query.weight",
    "pooler.weight",
    "classifier.weight",
]


def matching(pattern: str) -> list[str]:
    found = names_matching(pattern, BERT, "freeze")
    return [name for name in BERT if name in found]


def test_a_pattern_is_a_name_a_module_or_a_text_with_stars() -> None:
    assert matching("pooler.weight") == ["pooler.weight"]
    assert matching("embeddings") == matching("embeddings.*") == BERT[:2]
    assert matching("encoder.layer.1") == ["encoder.layer.1.query.weight"]  # not 10
    assert matching("*.query") == [name for name in BERT if "query" in name]
    assert matching("encoder.layer.[01].*") == BERT[2:5]
    assert matching("*") == BERT


def test_a_pattern_that_matches_nothing_is_misspelt() -> None:
    with pytest.raises(UsageError, match=r"freeze: 'embedings\.\*' matches no .*'embeddings'\?"):
        matching("embedings.*")
    with pytest.raises(UsageError, match=r"Parameters: embeddings\.word\.weight, "):
        matching("xyzzy")


def test_layers_count_from_below() -> None:
    depths = layer_depths(BERT)
    assert [depths[name] for name in BERT] == [0, 0, 1, 1, 2, 3, 4, 4]


def test_a_sequential_of_layers_has_no_more_above_the_last() -> None:
    assert layer_depths(["0.weight", "0.bias", "2.weight", "2.bias"]) == {
        "0.weight": 1,
        "0.bias": 1,
        "2.weight": 2,
        "2.bias": 2,
    }


def test_stacks_are_counted_one_after_the_other_and_experts_with_their_layer() -> None:
    names = ["stem.w", "a.0.w", "a.1.experts.3.w", "between.w", "b.0.w", "b.1.w", "head.w"]
    assert list(layer_depths(names).values()) == [0, 1, 2, 2, 3, 4, 5]


def test_numbers_of_parameters_are_no_layers() -> None:
    assert layer_depths(["weights.0", "weights.1"]) == {"weights.0": 0, "weights.1": 0}


def test_factors_are_those_of_the_last_pattern_times_the_layers() -> None:
    factors = rate_factors(BERT, {"*": 2.0, "encoder": 0.5, "*.bias": 3.0}, 0.9)
    assert factors["classifier.weight"] == 2.0
    assert factors["encoder.layer.10.query.weight"] == pytest.approx(0.5 * 0.9)
    assert factors["encoder.layer.0.query.weight"] == pytest.approx(0.5 * 0.9**3)
    assert factors["encoder.layer.0.output.bias"] == pytest.approx(3.0 * 0.9**3)
    assert factors["embeddings.word.weight"] == pytest.approx(2.0 * 0.9**4)


def test_a_model_without_numbers_has_no_layer_decay() -> None:
    with pytest.raises(UsageError, match=r"layer_decay=0\.9: the model has no numbered layers"):
        rate_factors(["head.weight"], {}, 0.9)


@given(
    st.lists(
        st.lists(st.sampled_from(["a", "b", "0", "1", "2", "w"]), min_size=1, max_size=4).map(
            ".".join
        ),
        unique=True,
    )
)
def test_depths_only_grow_for_layers_that_are_met_first(names: list[str]) -> None:
    depths = layer_depths(names)
    assert set(depths) == set(names)
    highest = max(depths.values(), default=0)
    assert set(depths.values()) >= set(range(1, highest))  # no depth between is left out
    if any(part.isdecimal() for name in names for part in name.split(".")[:-1]):
        factors = rate_factors(names, {}, 0.5)
        assert max(factors.values()) == 1.0
        for name in names:
            assert factors[name] == 0.5 ** (highest - depths[name])


@pytest.mark.parametrize("factor", [0, -1.0, math.nan, math.inf, "0.1", True])
def test_what_is_no_factor_is_refused(factor: object) -> None:
    with pytest.raises(UsageError, match="is no factor of a learning rate"):
        check_rates({"*": factor}, None)  # type: ignore[dict-item]


@pytest.mark.parametrize("decay", [0, -0.1, 1.5, math.nan, "0.9"])
def test_what_is_no_decay_is_refused(decay: object) -> None:
    with pytest.raises(UsageError, match="must be above 0 and at most 1"):
        check_rates({}, decay)  # type: ignore[arg-type]
