"""Names that differ by a prefix are found to, from either side; others are left alone."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

from shoal.errors import UsageError
from shoal.formats.prefix import AS_THEY_ARE, PrefixRule, find_prefix
from shoal.training.pretrained import find_initial_weights

words = st.sampled_from(["bert", "layer", "0", "1", "weight", "bias", "model", "_orig_mod"])
names = st.lists(words, min_size=1, max_size=4).map(".".join)
shapes = st.sampled_from([(2,), (3, 4), ()])
models = st.dictionaries(names, shapes, min_size=1, max_size=8)
prefixes = st.lists(words, min_size=1, max_size=2).map(lambda parts: ".".join(parts) + ".")


def matches(source: dict, model: dict, rule: PrefixRule) -> int:
    renamed = {rule.rename(name, model): shape for name, shape in source.items()}
    return sum(model.get(name) == shape for name, shape in renamed.items())


@given(models, prefixes)
def test_a_prefix_of_all_names_is_cut_off_or_put_before_them(model: dict, prefix: str) -> None:
    longer = {prefix + name: shape for name, shape in model.items()}
    for source, target in ((longer, model), (model, longer)):
        rule = find_prefix(source, target)
        plain = matches(source, target, AS_THEY_ARE)
        assert matches(source, target, rule) == len(model) or plain >= len(model)


@given(models)
def test_names_that_agree_stay(model: dict) -> None:
    assert find_prefix(model, model) == AS_THEY_ARE


@given(models, models)
def test_a_rule_never_matches_less(source: dict, model: dict) -> None:
    rule = find_prefix(source, model)
    assert matches(source, model, rule) >= matches(source, model, AS_THEY_ARE)
    assert not (rule.cut and rule.add)


def test_more_than_the_model_in_the_source_and_the_other_way_round() -> None:
    bert = {"embed.weight": (3,), "layer.0.weight": (2, 2)}
    whole = {"bert.embed.weight": (3,), "bert.layer.0.weight": (2, 2), "head.weight": (5,)}
    cut, add = find_prefix(whole, bert), find_prefix(bert, whole)
    assert (cut, add) == (PrefixRule(cut="bert."), PrefixRule(add="bert."))
    assert cut.rename("head.weight", bert) == "head.weight"
    assert str(cut) == "'bert.' was cut off its names"
    assert str(add) == "'bert.' was put before its names"


def test_a_run_begins_with_a_part_of_another_model_and_says_so(tmp_path: Path) -> None:
    """As BertModel does with weights of BertForPreTraining."""
    tensors = {"bert.weight": torch.ones(2, 3), "bert.bias": torch.ones(2), "head": torch.ones(4)}
    save_file(tensors, tmp_path / "whole.safetensors")
    where, model = tmp_path / "whole.safetensors", nn.Linear(3, 2)
    with pytest.raises(UsageError, match=r"'bert\.' was cut off its names; not in the model: head"):
        find_initial_weights(where, model, everything=False, partial=False)
    found = find_initial_weights(where, model, everything=False, partial=True)
    assert found.match.source_names == {"weight": "bert.weight", "bias": "bert.bias"}
    assert "2 tensors of" in str(found) and "'bert.' was cut off its names" in str(found)


def test_shapes_count() -> None:
    assert find_prefix({"a.weight": (3,)}, {"weight": (4,)}) == AS_THEY_ARE
