"""Unlike models that answer together: by a weighted mean, or by a layer that was trained to weigh.

The members are models of one recipe with the settings of their runs, which `run.json` beside a
checkpoint names; the recipe itself is the one that the caller gives, so no code that a directory
names is run. An ensemble's shares are chosen greedily with repetition (Caruana et al. 2004): the
member joins that helps most, again and again, and its share is how often it did. The members are
asked once about each sample; their answers are kept meanwhile.

A stack is a Run: the members are frozen in it, a linear layer over their answers is trained. Train
it on samples that the members have not seen, or it trusts the one that remembers most.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from shoal.api import recipe_of
from shoal.data.batches import LoadOptions
from shoal.data.pieces import pieces_in_order
from shoal.errors import UsageError
from shoal.slim.figures import evaluate, first_piece, load_trained
from shoal.slim.retraining import Given, Training, train_changed, trained_model
from shoal.storage.run_dir import read_description
from shoal.training.evaluate import PIECE_SIZE, evaluating
from shoal.training.run import Run, call_model

NUM_ROUNDS = 20  # in which a member may join
MOST_BYTES = 1 << 30  # of answers that are kept to choose with

Scored = Callable[[Mapping[str, float]], float]


class Ensemble(nn.Module):
    """Answers with the weighted mean of what its members answer."""

    def __init__(self, members: Sequence[nn.Module], shares: Sequence[float]):
        super().__init__()
        self.members, self.shares = nn.ModuleList(members), list(shares)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return mix([member(*args, **kwargs) for member in self.members], self.shares)


class Stack(nn.Module):
    """Frozen members, and a layer over all that they answer, which begins as their mean."""

    def __init__(self, members: Sequence[nn.Module], widths: Sequence[int]):
        super().__init__()
        self.members, self.widths = nn.ModuleList(members).requires_grad_(False), list(widths)
        self.combine = nn.Linear(sum(widths), widths[0])
        with torch.no_grad():
            same = torch.eye(widths[0]) / len(widths)
            self.combine.weight.copy_(torch.cat([same] * len(widths), dim=1))
            self.combine.bias.zero_()

    def train(self, mode: bool = True) -> "Stack":
        super().train(mode)
        self.members.eval()  # what they were trained to be
        return self

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            answers = [member(*args, **kwargs) for member in self.members]
        combined = self.combine(torch.cat([_columns(one) for one in answers], dim=-1))
        if answer_tensor(answers[0]).dim() == 1:
            combined = combined.squeeze(-1)
        if isinstance(answers[0], Tensor):
            return combined
        answers[0].logits = combined  # in the form that the recipe's loss knows
        return answers[0]


def load_members(
    recipe: Given, places: Sequence[str], settings: Mapping[str, Any]
) -> list[nn.Module]:
    """The models of a recipe, each with the settings of its run, unless `settings` says else."""
    members = []
    for place in places:
        run, _ = recipe_of(recipe, {**settings_of(place), **settings}).load()
        members.append(load_trained(run, place).model)
    return members


def settings_of(place: str) -> Mapping[str, str]:
    """The settings of the run that a checkpoint is of; none if no record lies beside it."""
    path = Path(place)
    for directory in (path, path.parent, path.parent.parent):
        if (directory / "run.json").is_file():
            return read_description(directory).settings
    return {}


def choose_shares(run: Run, members: Sequence[nn.Module], score: Scored) -> list[float]:
    """How much each member counts, by the evaluation."""
    asked = [_answers(run, member) for member in members]
    counts, best = [0] * len(members), float("-inf")
    for _ in range(NUM_ROUNDS):
        tried = []
        for index in range(len(members)):
            more = [count + (index == other) for other, count in enumerate(counts)]
            tried.append(score(evaluate(run, _Recorded(asked, more))))
        if max(tried) <= best:  # at once, if no model's figure is a number
            break
        best = max(tried)
        counts[tried.index(best)] += 1
    if not any(counts):
        raise UsageError(
            "The evaluation of every model gives what is not a number, so nothing can be chosen by "
            "it. Give --weights, or other checkpoints."
        )
    return [count / sum(counts) for count in counts]


def stack(run: Run, recipe: Given, places: Sequence[str], settings: Mapping[str, Any]) -> Run:
    """The run with a layer over the frozen models at `places` in the place of its own model."""
    return replace(run, model=_StackModel(recipe, settings, places, run))


def train_stack(
    recipe: Given, settings: Mapping[str, Any], places: Sequence[str], training: Training
) -> tuple[nn.Module, list[float]]:
    """A trained stack, and how much of its layer is of each member."""
    change = partial(stack, recipe=recipe, places=places, settings=settings)
    model = trained_model(train_changed(recipe, settings, change, training))
    assert isinstance(model, Stack)
    parts = model.combine.weight.detach().abs().sum(0).split(model.widths)
    sizes = [float(part.sum()) for part in parts]
    return model, [size / sum(sizes) for size in sizes]


def mix(answers: Sequence[Any], shares: Sequence[float]) -> Any:
    """The weighted mean of answers of one structure, tensor by tensor; what cannot be averaged (a
    cache, a count) is the first one's."""
    leaves, structures = zip(*(pytree.tree_flatten(answer) for answer in answers), strict=True)
    if len({len(own) for own in leaves}) > 1:
        raise UsageError("The models answer with unlike structures, which have no mean.")
    mixed, num_mixed = [], 0
    for values in zip(*leaves, strict=True):
        first = values[0]
        if not isinstance(first, Tensor) or not first.is_floating_point():
            mixed.append(first)
            continue
        if any(value.shape != first.shape for value in values):
            shapes = " and ".join(str(list(value.shape)) for value in values)
            raise UsageError(f"The models answer with tensors of the shapes {shapes}: no mean.")
        mixed.append(sum(v * share for v, share in zip(values, shares, strict=True)))
        num_mixed += 1
    if not num_mixed:
        raise UsageError("The models answer with no floating-point tensor that has a mean.")
    return pytree.tree_unflatten(mixed, structures[0])


def answer_tensor(answer: Any) -> Tensor:
    """The tensor of an answer: itself, or `logits`."""
    found = getattr(answer, "logits", answer)
    if isinstance(found, Tensor) and found.is_floating_point() and found.dim():
        return found
    raise UsageError(
        f"A model answers with {type(answer).__name__}. A stack takes models that answer with one "
        "tensor of numbers, or with `logits`."
    )


def _columns(answer: Any) -> Tensor:
    """What a model answers about samples, with the numbers of one in the last dim."""
    found = answer_tensor(answer)
    return found.unsqueeze(-1) if found.dim() == 1 else found


class _StackModel:
    """Makes the model of a stack's run."""

    def __init__(self, recipe: Given, settings: Mapping[str, Any], places: Sequence[str], run: Run):
        self._given, self._places, self._run = (recipe, settings), list(places), run
        self.__qualname__ = f"Stack of {len(places)}"  # which records keep

    def __call__(self) -> nn.Module:
        recipe, settings = self._given
        members = load_members(recipe, self._places, settings)
        inputs = first_piece(self._run, 2).inputs  # of one sample a dim might be squeezed away
        widths = []
        for member in members:
            with evaluating(member):
                widths.append(_columns(call_model(member, inputs)).shape[-1])
        if len(set(widths)) > 1:
            numbers = " and ".join(map(str, widths))
            raise UsageError(
                f"The models answer with {numbers} numbers about a sample. A stack begins as their "
                "mean, so they must be as many."
            )
        return Stack(members, widths)


class _Recorded(nn.Module):
    """Answers in turn what an ensemble with these shares would have answered."""

    def __init__(self, answers: Sequence[Sequence[Any]], counts: Sequence[int]):
        super().__init__()
        used = [(own, count) for own, count in zip(answers, counts, strict=True) if count]
        self._answers = [own for own, _ in used]
        self._shares = [count / sum(counts) for _, count in used]
        self._next = 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        answers = [own[self._next] for own in self._answers]
        self._next += 1
        return mix(answers, self._shares)


def _answers(run: Run, member: nn.Module) -> list[Any]:
    """A member's answers to all pieces of the evaluation, in order."""
    size = min(PIECE_SIZE, run.batch_size)
    pieces = pieces_in_order(run.evaluate, size, LoadOptions(run.collate))
    kept, num_bytes = [], 0
    with evaluating(member):
        for index in range(len(pieces)):
            if pieces[index].num_samples:
                kept.append(call_model(member, pieces[index].inputs))
                num_bytes += sum(t.nbytes for t in _tensors(kept[-1]))
            if num_bytes > MOST_BYTES:
                raise UsageError(
                    "The answers to the evaluation take more than 1 GiB for each model, too much "
                    "to choose with. Give --weights, or evaluate fewer samples."
                )
    return kept


def _tensors(answer: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(answer) if isinstance(leaf, Tensor)]
