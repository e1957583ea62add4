"""Masks: how many elements stay and which, how the sparsity grows, and what is trained."""

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

from shoal.errors import UsageError
from shoal.slim import masks
from shoal.slim.masks import Pattern, Ramp
from shoal.slim.pruning import check_sparsity, zero_smallest


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(64, 8), nn.Linear(8, 2)
    )


@given(st.lists(st.integers(-3, 3), min_size=1, max_size=40), st.data())
def test_as_many_stay_as_asked_for_and_none_smaller_than_one_that_goes(
    values: list[int], data: st.DataObject
) -> None:
    num_kept = data.draw(st.integers(0, len(values)))
    ranks = torch.tensor(values, dtype=torch.float32)
    mask = masks.keep_largest(ranks, num_kept)
    assert mask.sum() == num_kept and set(mask.tolist()) <= {0.0, 1.0}
    if 0 < num_kept < len(values):
        assert ranks[mask == 1].min() >= ranks[mask == 0].max()


@given(st.integers(1, 4), st.integers(1, 3))
def test_a_pattern_keeps_the_largest_of_each_group(num_kept: int, num_groups: int) -> None:
    pattern = Pattern(num_kept, num_kept + 2)
    weight = torch.randn(3, num_groups * pattern.num_neighbours, 1)
    mask = masks.keep_pattern(weight.abs(), pattern)
    groups = mask.view(-1, pattern.num_neighbours)
    assert (groups.sum(1) == num_kept).all()
    assert masks.keep_pattern(mask, pattern).equal(mask)


@given(st.floats(0.01, 0.99), st.integers(0, 50), st.integers(0, 50))
@example(0.5, 1, 0)
def test_the_ramp_grows_from_nothing_to_all(sparsity: float, begin: int, length: int) -> None:
    ramp = Ramp(sparsity, begin, begin + length)
    values = [ramp.at(step) for step in range(begin + length + 2)]
    assert values == sorted(values) and values[-1] == sparsity
    assert all(value == 0 for value in values[:begin])


def test_all_layers_are_ranked_together() -> None:
    model = network()
    with torch.no_grad():
        model[3].weight.mul_(100)
    zero_smallest(model, 0.03)
    assert masks.sparsity_of({"conv": model[0], "head": model[4]}) > 0.2
    layers = masks.find_layers(model).prunable
    assert masks.sparsity_of(layers) == pytest.approx(0.03, abs=0.002)
    assert (model[3].weight != 0).float().mean() > 0.99


def test_scores_get_the_gradient_of_the_mask() -> None:
    """A score grows where the weight and its gradient have unlike signs: where it moves away."""
    model = nn.Sequential(nn.Linear(6, 5, bias=False))
    plain = model[0].weight.detach().clone()
    masks.add_masks(model, Ramp(0.5), None, has_scores=True)
    scores = model.get_parameter("0.parametrizations.weight.0.scores")
    with torch.no_grad():
        scores.copy_(torch.randn(5, 6))
    inputs = torch.randn(3, 6)
    model(inputs).square().sum().backward()
    mask = masks.keep_largest(scores.detach(), 15)
    weight = (plain * mask).requires_grad_()
    (inputs @ weight.T).square().sum().backward()
    assert torch.allclose(scores.grad, weight.grad * plain)
    original = model.get_parameter("0.parametrizations.weight.original")
    assert torch.allclose(original.grad, weight.grad * mask)
    assert masks.bake_masks(model)[0].weight.equal(plain * mask)
    assert set(model.state_dict()) == {"0.weight"}


def test_steps_are_counted_in_training_only() -> None:
    model = network()
    masks.add_masks(model, Ramp(0.5, 1, 3), None, has_scores=False)
    inputs = torch.randn(2, 1, 6, 6)
    found = []
    for _ in range(4):
        model.eval()(inputs)
        found.append(masks.sparsity_of({"": model[3]}))
        model.train()(inputs)
    assert found[:2] == [0, 0] and found[2] == pytest.approx(0.4375) and found[3] == 0.5


def test_weights_of_two_layers_and_tables_stay() -> None:
    model = network()
    model[4] = nn.Linear(64, 8)
    model[4].weight = model[3].weight
    model.add_module("table", nn.Embedding(5, 4))
    layers = masks.find_layers(model)
    assert list(layers.prunable) == ["0"] and layers.kept == ["3", "4", "table"]
    with pytest.raises(UsageError, match="no layer that can be pruned"):
        masks.find_layers(nn.Sequential(nn.Embedding(3, 4), nn.LayerNorm(4)))
    with pytest.raises(UsageError, match="a multiple of 4 weights for each output"):
        masks.find_layers(nn.Sequential(nn.Linear(6, 4)), masks.Pattern(2, 4))


def test_matrices_that_are_no_layers_weight_are_named() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.places = nn.Parameter(torch.zeros(4, 8))
            self.lstm, self.head = nn.LSTM(8, 8), nn.Linear(8, 2)
            self.attention = nn.MultiheadAttention(8, 2)

    kept = masks.find_layers(Mixed()).kept
    assert kept == ["places", "lstm", "attention", "attention.out_proj"]
    assert masks.find_layers(nn.Linear(8, 2)).kept == [], "a model may be one layer"


@pytest.mark.parametrize(
    ("sparsity", "how", "words"),
    [
        (0, "magnitude", "above 0 and below 1"),
        (1.0, "movement", "above 0 and below 1"),
        (2, "structured", "above 0 and below 1"),
        (float("nan"), "magnitude", "above 0 and below 1"),
        (None, "magnitude", "Say with --sparsity"),
        (0.9, "2:4", "contradicts"),
        (0.5, "magic", "no such way"),
        (None, "4:4", "fewer than all"),
    ],
)
def test_what_makes_no_sense_is_refused(sparsity: float | None, how: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        check_sparsity(sparsity, how)
    assert check_sparsity(None, "2:4") == (0.5, Pattern(2, 4))
