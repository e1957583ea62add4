"""Fusing: which models are taken, what is written, and what is refused."""

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import shoal
from shoal.errors import ShoalError, UsageError
from shoal.formats.import_weights import import_weights, target_model
from shoal.formats.weights import ModelWeights
from shoal.slim.ensembles import Stack, choose_shares, mix, settings_of
from shoal.slim.fusing import FuseTable, check_weights, fuse
from shoal.slim.results import weights_in
from shoal.slim.statistics import refresh_statistics


def accuracy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output.argmax(1) == target).float().mean()


def recipe(width: int = 8, norm: bool = False) -> shoal.Run:
    generator = torch.Generator().manual_seed(0)
    target = torch.arange(64) % 4
    inputs = torch.randn(64, 6, generator=generator) + F.one_hot(target, 6) * 3.0
    return shoal.Run(
        model=lambda: nn.Sequential(
            nn.Linear(6, width),
            nn.BatchNorm1d(width) if norm else nn.Identity(),
            nn.ReLU(),
            nn.Linear(width, 4),
        ),
        loss=F.cross_entropy,
        optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
        data=shoal.data.tensors(inputs, target),
        evaluate=shoal.data.tensors(inputs[:32], target[:32]),
        metrics={"accuracy": accuracy},
        batch_size=16,
        steps=5,
    )


def trained(run: shoal.Run, num_steps: int, seed: int = 0) -> nn.Module:
    """A model after some steps on the whole data, in a plain loop."""
    model = run.make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    order = torch.randperm(64, generator=torch.Generator().manual_seed(seed))
    inputs = torch.stack([run.data[int(i)][0] for i in order])
    target = torch.stack([torch.as_tensor(run.data[int(i)][1]) for i in order])
    for step in range(num_steps):
        part = slice(16 * (step % 4), 16 * (step % 4) + 16)
        optimizer.zero_grad()
        F.cross_entropy(model(inputs[part]), target[part]).backward()
        optimizer.step()
    return model.eval()


def saved(model: nn.Module, place: Path) -> Path:
    weights = ModelWeights(weights_in(model))
    import_weights(weights, target_model(weights, model), place, "test")
    return place


@pytest.fixture
def places(tmp_path: Path) -> list[Path]:
    """Weights of three models of one start: two that learnt, and one that hardly did."""
    return [
        saved(trained(recipe(), steps, seed), tmp_path / name)
        for name, steps, seed in (("a", 30, 1), ("b", 30, 2), ("c", 1, 3))
    ]


def test_an_average_is_the_mean_of_the_weights(places: list[Path], tmp_path: Path) -> None:
    table = fuse(recipe, places[:2], how="average", out=tmp_path / "out")
    assert table.weights == [0.5, 0.5]
    a, b = (shoal.load(place, recipe).state_dict() for place in places[:2])
    for name, tensor in shoal.load(tmp_path / "out", recipe).state_dict().items():
        torch.testing.assert_close(tensor, (a[name] + b[name]) / 2)


def test_a_model_without_numbers_is_never_the_best(places: list[Path], tmp_path: Path) -> None:
    lost = recipe().make_model()
    with torch.no_grad():
        lost[0].weight.fill_(torch.nan)
    bad = saved(lost, tmp_path / "lost")
    found = fuse(recipe, [bad, *places[:2]], how="greedy", out=tmp_path / "out")
    assert found.weights[0] == 0 and found.best_single.checkpoint != str(bad)
    assert found.after.metrics["loss"] <= found.before.metrics["loss"]


def test_greedy_leaves_out_what_does_not_help(places: list[Path], tmp_path: Path) -> None:
    table = fuse(recipe, places, how="greedy", out=tmp_path / "out")
    assert table.weights[2] == 0.0 and sum(table.weights) == pytest.approx(1.0)
    assert table.after.metrics["loss"] <= table.best_single.metrics["loss"]
    assert table.best_single.checkpoint in map(str, places[:2])
    assert table.before.metrics == table.best_single.metrics


def test_one_model_alone_stays_as_it_was(tmp_path: Path) -> None:
    runs = [trained(recipe(norm=True), steps, seed) for steps, seed in ((30, 1), (1, 2))]
    places = [saved(model, tmp_path / name) for model, name in zip(runs, "ab")]
    table = fuse(lambda: recipe(norm=True), places, how="greedy", out=tmp_path / "out")
    assert table.weights == [1.0, 0.0] and "statistics" not in " ".join(table.notes)
    assert table.after.metrics == table.before.metrics and table.after.bytes == table.before.bytes


@pytest.mark.parametrize("how", ["task", "ties", "slerp"])
def test_the_evaluation_chooses_how_far_to_go(places: list[Path], tmp_path: Path, how: str) -> None:
    chosen = fuse(recipe, places[:2], how=how, out=tmp_path / "chosen")
    for weights in ([0.2, 0.2], [0.5, 0.5]):
        fixed = fuse(recipe, places[:2], how=how, weights=weights, out=tmp_path / str(weights[0]))
        assert chosen.after.metrics["loss"] <= fixed.after.metrics["loss"] + 1e-6


def test_unlike_models_become_a_program_that_asks_them_all(
    places: list[Path], tmp_path: Path
) -> None:
    wide = tmp_path / "runs" / "wide"
    saved(trained(recipe(width=16), 30), wide / "checkpoints" / "step-30")
    record = {"recipe": "mine.py:recipe", "settings": {"width": "16"}}
    (wide / "run.json").write_text(json.dumps(record))
    table = fuse(
        recipe,
        [places[0], wide / "checkpoints" / "step-30"],
        how="ensemble",
        weights=[0.25, 0.75],
        out=tmp_path / "both.pt2",
    )
    inputs = torch.randn(5, 6)
    one = shoal.load(places[0], recipe)(inputs)
    other = shoal.load(wide / "checkpoints" / "step-30", recipe, settings={"width": 16})(inputs)
    found = shoal.load(tmp_path / "both.pt2")(inputs)
    torch.testing.assert_close(found, 0.25 * one + 0.75 * other)
    assert isinstance(table, FuseTable) and table.weights == [0.25, 0.75]


def test_shares_are_chosen_by_the_evaluation(places: list[Path]) -> None:
    run = recipe()
    members = [shoal.load(place, recipe) for place in places]
    shares = choose_shares(run, members, lambda metrics: -metrics["loss"])
    assert sum(shares) == pytest.approx(1.0) and shares[2] < min(shares[0] + shares[1], 0.5)


@pytest.mark.full
@pytest.mark.timeout(200)
def test_a_stack_is_trained(places: list[Path], tmp_path: Path) -> None:
    table = fuse(recipe, places[:2], how="stack", out=tmp_path / "stack.pt2")
    assert table.after.metrics["loss"] < table.best_single.metrics["loss"]
    assert shoal.load(tmp_path / "stack.pt2")(torch.randn(5, 6)).shape == (5, 4)


def test_statistics_are_those_of_the_merged_weights() -> None:
    run = recipe(norm=True)
    model = run.make_model()
    inputs = torch.stack([run.data[i][0] for i in range(64)])
    assert "on 4 batches" in refresh_statistics(run, model)
    norm = next(m for m in model.modules() if isinstance(m, nn.BatchNorm1d))
    hidden = model[0](inputs)
    torch.testing.assert_close(norm.running_mean, hidden.mean(0))
    assert norm.momentum == 0.1 and not model.training


def test_answers_of_unlike_shapes_have_no_mean() -> None:
    with pytest.raises(UsageError, match=r"\[2, 3\] and \[2, 4\]"):
        mix([torch.zeros(2, 3), torch.zeros(2, 4)], [0.5, 0.5])
    mixed = mix([{"logits": torch.ones(2), "n": 3}, {"logits": torch.zeros(2), "n": 4}], [0.5, 0.5])
    assert mixed["n"] == 3 and mixed["logits"].tolist() == [0.5, 0.5]


def test_settings_come_from_the_record_beside_a_checkpoint(tmp_path: Path) -> None:
    assert settings_of(str(tmp_path / "nothing")) == {}
    (tmp_path / "run.json").write_text('{"recipe": "a.py:b", "settings": {"width": "3"}}')
    assert settings_of(str(tmp_path / "checkpoints" / "step-1")) == {"width": "3"}
    (tmp_path / "run.json").write_text("not json")
    with pytest.raises(ShoalError, match=r"run\.json"):
        settings_of(str(tmp_path))


def test_a_stack_answers_in_the_form_of_its_members() -> None:
    class Wrapped(nn.Linear):
        def forward(self, x: torch.Tensor) -> SimpleNamespace:
            return SimpleNamespace(logits=super().forward(x))

    members = [Wrapped(4, 3), Wrapped(4, 3)]
    inputs = torch.randn(5, 4)
    found = Stack(members, [3, 3])(inputs).logits
    mean = sum(member(inputs).logits for member in members) / 2
    torch.testing.assert_close(found, mean)  # as it begins
    assert found.requires_grad and not members[0].weight.requires_grad


class Guess(nn.Linear):
    """Answers with one number about a sample, without a dim for it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)[:, 0]


def guessing(kinds: int = 1) -> shoal.Run:
    run = recipe()
    inputs = torch.stack([run.data[i][0] for i in range(64)])
    data = shoal.data.tensors(inputs, inputs.sum(1))
    return dataclasses.replace(
        run,
        model=lambda: Guess(6, 1) if kinds == 1 else nn.Linear(6, kinds),
        loss=lambda output, target: F.mse_loss(output.reshape(len(target), -1)[:, 0], target),
        data=data,
        evaluate=data,
        metrics={},
    )


def test_a_stack_of_models_that_answer_with_one_number(tmp_path: Path) -> None:
    places = [saved(guessing().make_model(), tmp_path / name) for name in "ab"]
    table = fuse(guessing, places, how="stack", out=tmp_path / "stack.pt2")
    assert table.after.metrics["loss"] < table.best_single.metrics["loss"]
    assert shoal.load(tmp_path / "stack.pt2")(torch.randn(5, 6)).shape == (5,)


def test_a_stack_of_unlike_answers_is_refused(tmp_path: Path) -> None:
    places = []
    for kinds in (2, 3):
        (tmp_path / str(kinds)).mkdir()
        record = {"recipe": "a.py:b", "settings": {"kinds": str(kinds)}}
        (tmp_path / str(kinds) / "run.json").write_text(json.dumps(record))
        places.append(saved(guessing(kinds).make_model(), tmp_path / str(kinds) / "weights"))
    with pytest.raises(UsageError, match="answer with 2 and 3 numbers about a sample"):
        fuse(guessing, places, how="stack", out=tmp_path / "stack.pt2")
    assert not (tmp_path / "stack.pt2").exists()


class Tagger(nn.Module):
    """Goes through a sequence of any length, which torch.export fixes; with a tied head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lstm = nn.Embedding(9, 4), nn.LSTM(4, 4, batch_first=True)
        self.head = nn.Linear(4, 9, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        tagged: torch.Tensor = self.head(self.lstm(self.embed(words))[0])
        return tagged


def tagging() -> shoal.Run:
    words = [torch.arange(length) % 9 for length in (3, 3, 3, 5, 5, 5)]
    return dataclasses.replace(
        recipe(),
        model=Tagger,
        loss=lambda output, target: F.cross_entropy(output.mT, target),
        metrics={},
        data=[(one, one) for one in words],
        evaluate=[(one, one) for one in words],
        collate=shoal.data.pad(),
        batch_size=3,
    )


def test_a_program_that_takes_one_length_alone_is_written_and_said(tmp_path: Path) -> None:
    one, other = (saved(Tagger(), tmp_path / name) for name in "ab")
    table = fuse(tagging, [one, other], how="ensemble", weights="1,1", out=tmp_path / "out")
    assert table.after.metrics and "torch.export could not" in table.notes[0]
    assert shoal.load(tmp_path / "out")(torch.zeros(3, 3, dtype=torch.long)).shape == (3, 3, 9)
    held = {id(p): p for p in Tagger().parameters()}.values()
    assert table.before.bytes == sum(p.nbytes for p in held), "a tied weight counts once"


def test_nothing_can_be_chosen_where_no_figure_is_a_number(tmp_path: Path) -> None:
    lost = recipe().make_model()
    with torch.no_grad():
        lost[0].weight.fill_(torch.nan)
    places = [saved(lost, tmp_path / name) for name in "ab"]
    with pytest.raises(UsageError, match="not a number"):
        fuse(recipe, places, how="ensemble", out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_statistics_are_taken_in_batches_of_two_at_least() -> None:
    run = dataclasses.replace(recipe(norm=True), batch_size=1)
    assert "on 32 batches" in refresh_statistics(run, run.make_model())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"how": "blend"}, "no such way"),
        ({"how": "soup", "weights": "1,2"}, "weighs by itself"),
        ({"weights": "1,2,3"}, "3 numbers for 2"),
        ({"weights": "1,-1"}, "not 0"),
        ({"weights": "nan,1"}, "finite"),
        ({"weights": "a,b"}, "ema:0.9"),
        ({"weights": "ema:2"}, "ema:0.9"),
    ],
)
def test_weights_that_make_no_sense(words: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        check_weights(["a", "b"], words.get("how", "average"), words.get("weights"))


def test_what_cannot_be_fused(places: list[Path], tmp_path: Path) -> None:
    other = saved(trained(recipe(width=16), 1), tmp_path / "other")
    for given, options, message in (
        (places[:1], {}, "nothing to fuse"),
        (places, {"how": "slerp"}, "3 are given"),
        ([places[0], other], {}, "--how ensemble"),
        ([places[0], tmp_path / "none"], {}, "There is no"),
        (places[:2], {"metric": "acuracy"}, "accuracy"),
        (places[:2], {"base": places[2]}, "no effect"),
    ):
        with pytest.raises(ShoalError, match=message) as raised:
            fuse(recipe, given, out=tmp_path / "out", **options)
        assert raised.value.exit_code == 2
        assert not (tmp_path / "out").exists()
