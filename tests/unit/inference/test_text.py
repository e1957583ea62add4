"""Tokens are chosen by their likelihood; models of others write by their own `generate`."""

from importlib.util import find_spec

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

import shoal
from shoal.errors import RecipeError, UsageError
from shoal.inference.text import Sampling, next_token
from tests.system import used

logits = st.lists(st.floats(-5, 5), min_size=1, max_size=12).map(torch.tensor)


def drawn(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@given(logits, st.integers(0, 5), st.integers(1, 15), st.floats(0.01, 1))
def test_a_token_is_among_the_likely_ones(
    given_logits: torch.Tensor, seed: int, top_k: int, top_p: float
) -> None:
    likely = given_logits.double().softmax(0)
    best = float(likely.max())
    by_k = next_token(given_logits, Sampling(temperature=1.0, top_k=top_k), drawn(seed))
    assert int((likely > likely[by_k]).sum()) < top_k
    by_p = next_token(given_logits, Sampling(temperature=1.0, top_p=top_p), drawn(seed))
    assert float(likely[likely > likely[by_p]].sum()) < top_p + 1e-9
    assert float(likely[next_token(given_logits, Sampling(temperature=0.0), drawn(0))]) == best


def test_draws_follow_the_likelihood() -> None:
    found = torch.tensor([0.0, 1.0, float("-inf")])
    draws = drawn(0)
    tokens = [next_token(found, Sampling(temperature=1.0), draws) for _ in range(2000)]
    share = tokens.count(1) / len(tokens)
    assert abs(share - float(found.softmax(0)[1])) < 0.04 and 2 not in tokens
    with pytest.raises(RecipeError, match="not finite"):
        next_token(torch.tensor([float("nan")]), Sampling(), draws)


@pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")
def test_a_model_of_transformers_writes_by_itself(tmp_path) -> None:
    run = used.llama()
    model = run.make_model().eval()
    save_file(dict(model.state_dict()), tmp_path / "llama.safetensors")
    from_, prompt = tmp_path / "llama.safetensors", "she sells"
    greedy = shoal.generate(run, from_, prompt, tokens=12, temperature=0)
    known = run.tokenizer.encode(prompt)
    with torch.no_grad():
        for _ in range(12):  # without a cache
            known.append(int(model(torch.tensor([known])).logits[0, -1].argmax()))
    assert greedy.text == run.tokenizer.decode(known) and greedy.tokens == 12
    state = torch.get_rng_state()
    warm = [
        shoal.generate(run, from_, prompt, tokens=12, temperature=2.0, seed=seed)
        for seed in (1, 1, 2)
    ]
    assert warm[0] == warm[1] and warm[0] != warm[2]
    assert torch.equal(state, torch.get_rng_state())
    with pytest.raises(UsageError, match="the model has 64 positions"):
        shoal.generate(run, from_, prompt, tokens=60)


def test_arguments_that_do_not_exist_are_named() -> None:
    with pytest.raises(TypeError, match="'temperature'"):
        shoal.generate(used.characters, "x", "she", temprature=1.0)  # type: ignore[call-arg]
    with pytest.raises(UsageError, match="tokens"):
        shoal.generate(used.characters, "x", "she", tokens=0)
