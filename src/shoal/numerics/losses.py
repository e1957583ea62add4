"""Losses for models whose output has `logits`, and whose target may hold places that do not count.

    Run(loss=shoal.losses.labels)        classes, tokens that were masked, tags of tokens
    Run(loss=shoal.losses.next_token)    causal language models: the target is the text itself

Each returns a pair (sum, weight) over the labels that are not -100, so the mean of a batch is over
its labels, however it was cut and padded. `output.loss` of transformers is a mean over the labels
of a piece: pieces with few labels would count as much as those with many. An output may be a tensor
of logits, a dict or a ModelOutput with `logits`, or a tuple that begins with them.

Cost: that of a cross entropy.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from shoal.errors import RecipeError

IGNORED = -100  # a label that does not count, as in torch and transformers


def labels(output: Any, target: Tensor) -> tuple[Tensor, Tensor]:
    """Cross entropy of logits [..., classes] and labels [...], where they are not -100."""
    logits = _logits(output)
    if logits.shape[:-1] != target.shape:
        raise RecipeError(
            f"losses.labels was given logits {list(logits.shape)} and labels {list(target.shape)}. "
            "Logits have one more dimension than labels, the classes, and it is the last."
        )
    total = F.cross_entropy(
        logits.flatten(0, -2).float(), target.flatten(), ignore_index=IGNORED, reduction="sum"
    )
    return total, (target != IGNORED).sum()


def next_token(output: Any, target: Tensor) -> tuple[Tensor, Tensor]:
    """The same for logits [samples, tokens, vocabulary] at each token and the token after it."""
    return labels(_logits(output)[:, :-1], target[:, 1:])


def _logits(output: Any) -> Tensor:
    if isinstance(output, Tensor):
        return output
    found = output.get("logits") if isinstance(output, Mapping) else None
    if found is None:
        found = getattr(output, "logits", None)
    if found is None and isinstance(output, tuple) and output:
        found = output[0]
    if not isinstance(found, Tensor):
        raise RecipeError(
            f"losses need logits, and the model returned a {type(output).__name__} without them."
        )
    return found
