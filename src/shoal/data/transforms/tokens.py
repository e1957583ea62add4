"""Augmentation of text as token ids: dropout, masking as in BERT, a span at random.

    from shoal.data.transforms import tokens
    mask = partial(tokens.mask, mask=103, vocabulary=30522, special=(0, 101, 102))
    data = shoal.data.mapped(texts, mask)                # a pair: ids with masks, and labels

Tokens are a 1-D array or tensor of whole numbers; what comes out is of the same kind and type.
Each function is pure in the tokens and the generator that it is given.

Not for text as characters: tokenise first, once. Paper: Devlin et al., "BERT", 2018.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shoal.data.transforms.randomness import Random, require_probability
from shoal.errors import RecipeError, UsageError

Tokens = TypeVar("Tokens", NDArray[Any], Tensor)


def drop(
    tokens: Tokens,
    random: Random,
    *,
    replacement: int,
    chance: float = 0.1,
    special: Sequence[int] = (),
) -> Tokens:
    """Replace each token by another (an unknown word, say) with this chance; the length stays."""
    require_probability(chance)

    def change(ids: NDArray[Any]) -> NDArray[Any]:
        chosen = (random.random(len(ids)) < chance) & ~np.isin(ids, special)
        return np.where(chosen, np.asarray(replacement, ids.dtype), ids)

    return _changed(tokens, change)


def mask(
    tokens: Tokens,
    random: Random,
    *,
    mask: int,
    vocabulary: int,
    chance: float = 0.15,
    special: Sequence[int] = (),
    ignore: int = -100,
) -> tuple[Tokens, Tokens]:
    """Inputs and labels for masked language modelling: a pair, so a sample.

    Each token that is not `special` is chosen with this chance. Of those chosen 80 % become `mask`,
    10 % a token drawn from the vocabulary, 10 % stay. Labels are int64: the token where it was
    chosen, `ignore` elsewhere.
    """
    require_probability(chance)
    ids = _array(tokens)
    # All draws are made for every token, so that one choice does not move the others.
    draws, fates = random.random(len(ids)), random.random(len(ids))
    others = random.integers(vocabulary, size=len(ids))
    chosen = (draws < chance) & ~np.isin(ids, special)
    labels = np.where(chosen, ids, ignore).astype(np.int64)
    masked = np.where(chosen & (fates < 0.8), mask, ids)
    masked = np.where(chosen & (fates >= 0.9), others, masked).astype(ids.dtype)
    if isinstance(tokens, Tensor):
        return torch.from_numpy(masked), torch.from_numpy(labels)
    return masked, labels


def span(tokens: Tokens, random: Random, *, length: int, fill: int | None = None) -> Tokens:
    """So many neighbouring tokens, from anywhere; a shorter text is filled up, or refused."""
    if length < 1:
        raise UsageError(f"length={length}. A span has at least 1 token.")

    def change(ids: NDArray[Any]) -> NDArray[Any]:
        if len(ids) >= length:
            start = int(random.integers(len(ids) - length + 1))
            return ids[start : start + length].copy()
        if fill is None:
            raise RecipeError(
                f"a text of {len(ids)} tokens has no span of {length}. Give fill=, a token to fill "
                "it up with, or leave short texts out"
            )
        result = np.full(length, fill, ids.dtype)
        result[: len(ids)] = ids
        return result

    return _changed(tokens, change)


def _changed(tokens: Tokens, change: Callable[[NDArray[Any]], NDArray[Any]]) -> Tokens:
    result = change(_array(tokens))
    return torch.from_numpy(result) if isinstance(tokens, Tensor) else result


def _array(tokens: Any) -> NDArray[Any]:
    ids = tokens.detach().numpy() if isinstance(tokens, Tensor) else tokens
    if not isinstance(ids, np.ndarray) or ids.ndim != 1 or ids.dtype.kind not in "iu":
        shown = f"{ids.dtype} {list(ids.shape)}" if isinstance(ids, np.ndarray) else type(tokens)
        raise RecipeError(f"{shown} are no tokens. They must be a 1-D array of whole numbers")
    return ids
