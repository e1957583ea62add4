"""A run and its plan: what does not go together is refused before anything starts."""

import dataclasses
import os
import random
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import shoal
from shoal.comm.collectives import Group
from shoal.comm.mesh import Mesh
from shoal.data.transforms.quarantine import quarantine
from shoal.errors import PlanError, RecipeError, UsageError
from shoal.plans.plan import Plan
from shoal.training.evaluate import measure
from shoal.training.run import Run, resolve


class Broken:
    """Twelve samples, of which some cannot be read."""

    def __init__(self, bad: range):
        self.bad = bad

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if index in self.bad:
            raise ValueError("no good")
        return torch.full((2,), float(index)), torch.tensor(0.0)


def run_on(data: Any) -> Run:
    return Run(
        model=lambda: nn.Linear(2, 1),
        loss=lambda output, target: output.mean(),
        optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
        data=data,
        batch_size=4,
        steps=1,
    )


@pytest.mark.parametrize(
    ("plan", "setting", "evaluates"),
    [
        ("data=2 zero=3", "zero=3", False),
        ("pipeline=2", "pipeline", False),
        ("data=2 local_steps=2", "local_steps", True),
        ("data=2", None, True),
    ],
)
def test_quarantine_is_refused_where_every_rank_needs_samples(
    tmp_path: Path, plan: str, setting: str | None, evaluates: bool
) -> None:
    source = quarantine(Broken(range(0)), tmp_path / "bad.jsonl")
    run = run_on(source)
    if setting is None:
        resolve(run, plan, 2)
    else:
        with pytest.raises(PlanError, match=f"{setting} does not go with quarantine.*data build"):
            resolve(run, plan, 2)
    run = dataclasses.replace(run, data=Broken(range(0)), evaluate=source)
    if evaluates:
        resolve(run, plan, 2)
    else:
        with pytest.raises(PlanError, match="source to evaluate is in quarantine"):
            resolve(run, plan, 2)


def test_a_generator_is_refused_where_it_is_given() -> None:
    pairs = ((torch.zeros(2), torch.tensor(0.0)) for _ in range(12))
    with pytest.raises(UsageError, match=r"data is a generator.*function that makes it"):
        run_on(pairs)
    with pytest.raises(UsageError, match=r"evaluate is a generator"):
        dataclasses.replace(run_on(Broken(range(0))), evaluate=pairs)


def evaluated(source: Any, plan: str = "data=1", loaders: int = 0) -> dict[str, float]:
    """What one rank alone finds, whose model gives back the first number of a sample."""

    def output(inputs: torch.Tensor) -> torch.Tensor:
        return inputs[:, 0]

    alone = Group()
    mesh = Mesh(alone, alone, alone, alone, "cpu")
    compute: Any = SimpleNamespace(
        plan=Plan.parse(plan),
        model=nn.Linear(2, 1),
        output=output,
        arithmetic=nullcontext,
    )
    run = dataclasses.replace(run_on(source), loaders=loaders)
    return measure(run, compute, source, mesh)


class Pids:
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([float(os.getpid()), 0]), torch.tensor(0.0)


def test_an_evaluation_loads_ahead_as_training_does() -> None:
    assert evaluated(Pids())["loss"] == os.getpid()
    assert evaluated(Pids(), loaders=1)["loss"] != os.getpid()


def test_pieces_in_quarantine_are_left_out_of_an_evaluation(tmp_path: Path) -> None:
    def source(bad: range) -> Any:
        return quarantine(Broken(bad), tmp_path / "bad.jsonl")

    assert evaluated(source(range(0))) == {"loss": 5.5}
    assert evaluated(source(range(3, 8))) == {"loss": (0 + 1 + 2 + 8 + 9 + 10 + 11) / 7}
    with pytest.raises(RecipeError, match=r"all 12 samples .* by quarantine\. .*bad\.jsonl says"):
        evaluated(source(range(12)))
    with pytest.raises(PlanError, match="pipeline does not go with quarantine"):
        evaluated(source(range(0)), "pipeline=2")


def test_nothing_to_evaluate_is_told_before_the_run() -> None:
    with pytest.raises(UsageError, match=r"evaluate is empty: len\(evaluate\) is 0"):
        dataclasses.replace(run_on(Broken(range(0))), evaluate=[])


@pytest.mark.parametrize("loaders", [-1, 1.5, True, 1000])
def test_a_number_of_loaders_that_no_machine_bears_is_refused(loaders: Any) -> None:
    with pytest.raises(UsageError, match=rf"loaders={loaders} must be a whole number from 0"):
        dataclasses.replace(run_on(Broken(range(0))), loaders=loaders)


def test_a_model_is_the_same_whatever_was_drawn_before() -> None:
    """Some libraries take first weights from Python's or numpy's generator."""

    def model() -> nn.Module:
        made = nn.Linear(2, 1)
        made.weight.data.fill_(random.random())
        made.bias.data.fill_(float(np.random.rand()))
        return made

    run = dataclasses.replace(run_on(Broken(range(0))), model=model)
    first = run.make_model()
    drawn = random.getstate(), np.random.rand()
    second = run.make_model()
    assert torch.equal(first.weight, second.weight) and torch.equal(first.bias, second.bias)
    assert drawn[0] == random.getstate() and drawn[1] != np.random.rand()


@pytest.mark.parametrize("every", [-1, 1.5, True, None])
def test_steps_in_which_all_is_compared_are_a_number(every: Any) -> None:
    with pytest.raises(UsageError, match=f"check_every={every} must be a whole number of steps"):
        dataclasses.replace(run_on(Broken(range(0))), check_every=every)


def with_parts(output: torch.Tensor, target: torch.Tensor) -> dict[str, Any]:
    error = (output[:, 0] - target).square()
    return {"loss": error.mean(), "mse": error.mean(), "far": (error.gt(1).sum(), 4), "one": 1}


def test_named_parts_are_recorded_and_only_the_loss_is_minimised() -> None:
    run = dataclasses.replace(
        run_on([(torch.ones(2) * i, torch.tensor(1.0)) for i in range(8)]),
        loss=with_parts,
        evaluate=[(torch.ones(2), torch.tensor(1.0))],
        metrics={"mean": lambda output, target: output.mean()},
    )
    plain = dataclasses.replace(run, loss=lambda *given: with_parts(*given)["loss"])
    found = []
    for one in (run, plain):
        with shoal.trainer(one) as trainer:
            (info,) = list(trainer)
            found.append((info, [p.detach() for p in trainer.model.parameters()]))
    (info, weights), (without, same) = found
    assert info.loss == without.loss and all(map(torch.equal, weights, same))
    assert info.parts.keys() == {"mse", "far", "one"} and not without.parts
    assert info.parts["mse"] == pytest.approx(info.loss) and info.parts["one"] == 1
    assert info.evaluation is not None and info.evaluation.keys() >= {"loss", "mean", "mse", "far"}


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ({"mse": 1.0}, "a dict of mse, without 'loss'"),
        ({}, "a dict of nothing, without 'loss'"),
        ({"loss": None}, "The loss is not a single number .NoneType."),
        ({1: 2.0}, "a part named 1"),
        ({"kl": torch.ones(3)}, "The part 'kl' of the loss is not a single number .shape .3,.."),
        ({"kl": "much"}, "The part 'kl' of the loss is not a single number .str."),
        ({"kl": (1.0, 2.0, 3.0)}, "The part 'kl'"),
    ],
)
def test_parts_that_are_no_numbers_are_named(answer: Any, said: str) -> None:
    def loss(output: torch.Tensor, target: torch.Tensor) -> Any:
        return {"loss": output.mean(), **answer} if {1, "kl"} & answer.keys() else answer

    run = dataclasses.replace(run_on([(torch.ones(2), torch.tensor(1.0))] * 8), loss=loss)
    with pytest.raises(RecipeError, match=said), shoal.trainer(run) as trainer:
        list(trainer)


def test_a_part_with_the_name_of_a_metric_is_refused() -> None:
    run = dataclasses.replace(
        run_on([(torch.ones(2), torch.tensor(1.0))] * 8),
        loss=with_parts,
        metrics={"mse": lambda output, target: output.mean()},
        evaluate=[(torch.ones(2), torch.tensor(1.0))],
    )
    with pytest.raises(RecipeError, match="'mse' is a metric"), shoal.trainer(run) as trainer:
        list(trainer)


def with_step(**changes: Any) -> Run:
    def step(batch: shoal.StepBatch) -> None:
        batch.minimize(lambda model, inputs, target: model(inputs).mean())

    run = run_on([(torch.ones(2) * i, torch.tensor(1.0)) for i in range(8)])
    return dataclasses.replace(run, **{"loss": None, "step": step} | changes)


@pytest.mark.parametrize(
    ("plan", "key"),
    [
        ("tensor=2", "tensor=2"),
        ("pipeline=2", "pipeline=2"),
        ("data=2 zero=3", "zero=3"),
        ("data=2 local_steps=2", "local_steps=2"),
        ("data=2 sync=server", "sync=server"),
        ("precision=fp16", "precision=fp16"),
    ],
)
def test_plans_that_cannot_make_a_custom_step_refuse_it(plan: str, key: str) -> None:
    with pytest.raises(PlanError, match=f"^{key} does not go with a step of the recipe's own"):
        resolve(with_step(), plan, None)


@pytest.mark.parametrize("plan", ["data=2", "data=2 zero=1", "data=2 zero=2", "precision=bf16"])
def test_plans_that_make_a_custom_step(plan: str) -> None:
    assert resolve(with_step(), plan, None).num_pieces >= 1


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"step": None}, "A run needs loss, a function of .output, target., or step"),
        ({"step": 3}, "Run.step is a int. It must be a function"),
        ({"evaluate": [(torch.ones(2), torch.tensor(1.0))]}, "evaluate has nothing to measure"),
    ],
)
def test_a_custom_step_that_says_too_little_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        with_step(**changes)


def test_a_custom_step_is_evaluated_by_metrics_alone() -> None:
    held_out = [(torch.ones(2), torch.tensor(1.0))]
    run = with_step(evaluate=held_out, metrics={"mean": lambda output, target: output.mean()})
    assert run.measures() == ["mean"]
    with shoal.trainer(run) as trainer:
        (info,) = list(trainer)
    assert info.evaluation is not None and info.evaluation.keys() == {"mean"}
    assert info.parts == {"loss": info.loss}
    with shoal.trainer(with_step()) as trainer:
        list(trainer)
        with pytest.raises(UsageError, match="There is nothing to measure"):
            trainer.evaluate(held_out)


def test_a_sparse_buffer_is_refused() -> None:
    def model() -> nn.Module:
        made = nn.Linear(2, 2)
        made.register_buffer("adjacency", torch.eye(2).to_sparse(), persistent=False)
        return made

    with pytest.raises(RecipeError, match=r"^adjacency is a sparse tensor"):
        with_step(model=model).make_model()


def test_a_lazy_module_is_called_before_the_model_is_given() -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.LazyLinear(2), nn.LazyBatchNorm1d())

    def called() -> nn.Module:
        made = model()
        made(torch.ones(2, 2))
        return made

    run = with_step(model=model)
    with pytest.raises(RecipeError, match=r"^0\.weight has no shape yet: its module is a lazy one"):
        run.make_model()
    assert dataclasses.replace(run, model=called).make_model()
