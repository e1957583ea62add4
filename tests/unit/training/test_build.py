"""What a plan asks of a model and its optimizer is found out before a rank starts."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal.errors import PlanError, RecipeError
from shoal.plans.plan import Plan
from shoal.training.build import build_model
from shoal.training.run import Run, resolve
from tests import zoo


def resolved(run: Run, plan: str) -> Plan:
    return resolve(run, plan, None)


class Lion(torch.optim.SGD):
    """An optimizer of one's own that says what it looks at."""

    element_wise = True


@pytest.mark.parametrize("plan", ["data=2 zero=3", "tensor=2", "data=2 offload=optimizer"])
def test_an_optimizer_that_looks_at_whole_tensors_is_refused(plan: str) -> None:
    run = dataclasses.replace(zoo.mlp(), optimizer=lambda named: torch.optim.Adafactor(named))
    with pytest.raises(PlanError, match="Adafactor may look at a whole tensor"):
        build_model(run, resolved(run, plan))
    own = dataclasses.replace(run, optimizer=lambda named: Lion(named, lr=0.1))
    build_model(own, resolved(own, plan)).seeds.close()


@pytest.mark.parametrize(
    "key", ["combine=median", "local_steps=4", "local_steps=4 codec=int8", "codec=fp16"]
)
def test_complex_parameters_are_not_left_apart_nor_halved(key: str) -> None:
    """Nobody would have averaged them, and rounding would have dropped their imaginary parts."""
    run = dataclasses.replace(
        zoo.mlp(), model=lambda: nn.Linear(32, zoo.KINDS, dtype=torch.complex64)
    )
    with pytest.raises(PlanError, match=f"weight is complex, and {key.split()[0]}"):
        build_model(run, resolved(run, f"data=4 sync=server {key}"))


def test_a_norm_that_talks_to_other_ranks_is_refused() -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(32, zoo.KINDS), nn.SyncBatchNorm(zoo.KINDS))

    run = dataclasses.replace(zoo.mlp(), model=model)
    with pytest.raises(PlanError, match=r"^1 is a SyncBatchNorm, which takes its statistics over"):
        build_model(run, resolved(run, "data=2"))
    build_model(run, resolved(run, "data=1")).seeds.close()


@pytest.mark.parametrize("plan", ["data=2 zero=3", "tensor=2", "pipeline=2", "recompute=blocks"])
def test_a_scripted_model_is_refused_where_its_modules_count(plan: str) -> None:
    run = dataclasses.replace(
        zoo.mlp(), model=lambda: torch.jit.trace(nn.Linear(32, zoo.KINDS), torch.ones(2, 32))
    )
    with pytest.raises(PlanError, match=r"^The model is scripted or traced \(torch.jit\), and"):
        build_model(run, resolved(run, plan))
    build_model(run, resolved(run, "data=2 zero=2")).seeds.close()


@pytest.mark.parametrize(
    "plan", ["codec=int8", "zero=1 codec=topk:0.1", "codec=powersgd:8", "codec=auto"]
)
def test_a_codec_that_packs_nothing_is_refused(plan: str) -> None:
    run = dataclasses.replace(zoo.mlp(), model=lambda: nn.Linear(32, zoo.KINDS))
    with pytest.raises(PlanError, match=r"has no effect: it makes no gradient.* largest is weight"):
        build_model(run, resolved(run, f"data=2 {plan}"))
    run = dataclasses.replace(run, model=lambda: nn.Linear(32, 64))
    build_model(run, resolved(run, f"data=2 {plan}")).seeds.close()


def test_servers_do_not_round_what_stages_share() -> None:
    """The servers of each part would round it in other blocks, and its copies would part."""

    def model() -> nn.Module:
        wide = [nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32)]
        made = nn.Sequential(nn.Linear(32, 32), *wide, nn.Linear(32, 32), nn.Linear(32, zoo.KINDS))
        made[4].weight = made[0].weight
        return made

    run = dataclasses.replace(zoo.mlp(), model=model)
    plan = "data=2 pipeline=2 sync=server servers=2 local_steps=3"
    with pytest.raises(PlanError, match=r"share 0\.weight, and the servers of each would round"):
        build_model(run, resolved(run, f"{plan} codec=int8"))
    build_model(run, resolved(run, plan)).seeds.close()


def test_a_parameter_with_a_hook_is_refused_under_zero_3() -> None:
    def model() -> nn.Module:
        made = nn.Sequential(nn.Linear(32, 8), nn.Linear(8, zoo.KINDS))
        made[0].weight.register_hook(lambda gradient: 2 * gradient)
        return made

    run = dataclasses.replace(zoo.mlp(), model=model)
    with pytest.raises(PlanError, match=r"0\.weight has a hook of its own"):
        build_model(run, resolved(run, "data=2 zero=3"))
    build_model(run, resolved(run, "data=2 zero=2")).seeds.close()


def test_examples_of_one_form_are_chosen_where_lengths_differ() -> None:
    """Texts padded to the longest of a piece: the second example is one as long as the first."""
    texts = [(torch.ones(length, dtype=torch.long), length % 3) for length in [3, 5, 3, 4] * 8]

    def collate(samples: list[tuple[torch.Tensor, int]]) -> tuple[torch.Tensor, torch.Tensor]:
        padded = nn.utils.rnn.pad_sequence([text for text, _ in samples], batch_first=True)
        return padded, torch.tensor([kind for _, kind in samples])

    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.wide = nn.Embedding(4, 16), nn.Linear(16, 16)
            self.head = nn.Linear(16, 3)

        def forward(self, text: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.head(self.wide(self.embed(text)).tanh().mean(1))
            return out

    run = dataclasses.replace(
        zoo.mlp(), model=Reads, data=texts, collate=collate, batch_size=8, clip=None
    )
    prepared = build_model(run, resolved(run, "pipeline=2"))
    assert prepared.survey.stages is not None and len(prepared.survey.stages.stages) == 2
    prepared.seeds.close()


class Broken:
    """A source whose first samples cannot be loaded."""

    def __init__(self, source: Any, num_bad: int):
        self.source, self.num_bad = source, num_bad

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> Any:
        if index < self.num_bad:
            raise ValueError("no good")
        return self.source[index]


def test_a_first_piece_that_quarantine_emptied_is_no_example(tmp_path: Path) -> None:
    run, file = zoo.mlp(), tmp_path / "bad.jsonl"

    def broken(num_bad: int) -> Run:
        left_out = shoal.data.quarantine(Broken(run.data, num_bad), file)
        return dataclasses.replace(run, data=shoal.data.in_order(left_out))

    for num_bad in (1, 3 * run.batch_size):
        prepared = build_model(broken(num_bad), resolved(broken(num_bad), "tensor=2"))
        assert prepared.survey.tensor is not None
        prepared.seeds.close()
    with pytest.raises(RecipeError, match="Quarantine leaves out all samples"):
        build_model(broken(len(run.data)), resolved(run, "tensor=2"))


@pytest.mark.parametrize("plan", ["tensor=2", "pipeline=2", "data=2 recompute=blocks"])
@pytest.mark.parametrize("whole", [True, False])
def test_a_compiled_model_is_refused_where_its_modules_count(plan: str, whole: bool) -> None:
    def model() -> nn.Module:
        made = nn.Sequential(nn.Linear(32, 8), nn.Linear(8, zoo.KINDS))
        if whole:
            return torch.compile(made, backend="eager")  # type: ignore[return-value]
        made[1].compile(backend="eager")
        return made

    run = dataclasses.replace(zoo.mlp(), model=model)
    who = "The model is compiled" if whole else "1 is compiled"
    with pytest.raises(PlanError, match=rf"^{who} \(torch.compile\), and {plan.split()[-1]} works"):
        build_model(run, resolved(run, plan))
    build_model(run, resolved(run, "data=2 zero=1")).seeds.close()
