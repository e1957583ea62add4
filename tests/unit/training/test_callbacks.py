"""Callbacks in one process: when they are called, what they may do, what is refused."""

import dataclasses
import math
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F

import shoal
from shoal.callbacks import (
    EMA,
    BestCheckpoint,
    EarlyStopping,
    Freeze,
    LogEvery,
    ReduceOnPlateau,
    TorchScheduler,
    TrainingInfo,
)
from shoal.checkpoint.find import list_steps
from shoal.cli.checkpoint import checkpoint
from shoal.errors import RecipeError, UsageError
from shoal.numerics import schedules
from shoal.storage.object_store import open_store

X = torch.linspace(-1, 1, 32)[:, None]


def run_of(*callbacks: Any, **changes: Any) -> shoal.Run:
    run = shoal.Run(
        model=lambda: nn.Sequential(nn.Linear(1, 4), nn.ReLU(), nn.Linear(4, 1)),
        loss=F.mse_loss,
        optimizer=lambda named: torch.optim.AdamW(named, lr=0.1),
        data=shoal.data.tensors(X, 2 * X),
        batch_size=8,
        steps=12,
        callbacks=callbacks,
        evaluate=shoal.data.tensors(X, X),
        evaluate_every="epoch",
    )
    return dataclasses.replace(run, **changes)


def train(run: shoal.Run, **options: Any) -> list[shoal.StepInfo]:
    with shoal.trainer(run, **options) as trainer:
        return list(trainer)


class Notes(shoal.Callback):
    """What is called, in which order."""

    found: list[tuple[str, int]] = []

    def on_start(self, trainer: Any, info: TrainingInfo) -> None:
        Notes.found = [("start", info.step)]
        assert info.loss is None and not info.metrics and info.samples == 0

    def on_step(self, trainer: Any, info: TrainingInfo) -> None:
        self.found.append(("step", info.step))
        assert info.samples == 8 * info.step and info.epoch == info.step // 4
        assert info.num_steps == 12 and info.rate == pytest.approx(0.1)

    def on_evaluate(self, trainer: Any, info: TrainingInfo) -> None:
        self.found.append(("evaluate", info.step))
        assert info.metrics.keys() == {"loss"}

    def on_save(self, trainer: Any, info: TrainingInfo) -> None:
        self.found.append(("save", info.step))

    def on_end(self, trainer: Any, info: TrainingInfo) -> None:
        self.found.append(("end", info.step))


def test_methods_are_called_in_order(tmp_path: Path) -> None:
    train(run_of(Notes(), save_every=6), checkpoints=tmp_path)
    expected = [("start", 0)]
    for step in range(1, 13):
        expected += [("step", step)] + [("evaluate", step)] * (step % 4 == 0)
        expected += [("save", step)] * (step % 6 == 0)
    assert Notes.found == [*expected, ("end", 12)]


def test_a_run_can_be_trained_again_from_the_beginning() -> None:
    run = run_of(EMA(0.5), EarlyStopping(patience=1, min_delta=99.0))
    first, second = train(run), train(run)
    assert [info.loss for info in first] == [info.loss for info in second]
    assert first[-1].step == 8


class Once:
    """Has some of the methods, and inherits nothing."""

    def __init__(self, do: Any, at: int = 3):
        self.do, self.at = do, at

    def on_step(self, trainer: Any, info: TrainingInfo) -> None:
        if info.step == self.at:
            self.do(trainer)


def test_what_is_logged_is_in_the_step() -> None:
    def log(trainer: Any) -> None:
        trainer.log("gap", torch.tensor(0.5))
        trainer.log("count", np.int64(3))
        trainer.log_text("note", "x" * 20_000)

    infos = train(run_of(Once(log), LogEvery(4, lambda trainer, info: {"square": info.step**2})))
    assert infos[2].logged == {"gap": 0.5, "count": 3.0} and not infos[1].logged
    assert infos[3].logged == {"square": 16.0}
    assert len(infos[2].texts["note"]) == 10_003


@pytest.mark.parametrize(
    ("do", "said"),
    [
        (lambda trainer: trainer.log("gap", torch.ones(2)), "tensor of shape .2., and takes a num"),
        (lambda trainer: trainer.log("", 1), "no name to log under"),
        (lambda trainer: trainer.log_text("note", 1), "was given a int"),
        (lambda trainer: trainer.set_lr(), "a value or factor"),
        (lambda trainer: trainer.set_lr(-1), "was given -1"),
        (lambda trainer: trainer.set_lr(1, group=4), "has 1 groups"),
        (lambda trainer: trainer.freeze("1.*"), "No parameter has a name like '1"),
        (lambda trainer: trainer.save("a/b"), "a tag is letters"),
    ],
)
def test_what_cannot_be_done_is_said_with_the_callback(do: Any, said: str) -> None:
    where = "The callback Once failed in on_step on rank 0, after step 3: "
    with pytest.raises(RecipeError, match=where) as raised:
        train(run_of(Once(do)))
    raised.match(said)


def test_a_rate_is_set_and_multiplied() -> None:
    run = run_of(Once(lambda t: t.set_lr(0.01)), Once(lambda t: t.set_lr(factor=0.5), at=6))
    rates = [info.rate for info in train(run)]
    assert rates[2:4] == [0.1, 0.01] and rates[6:] == [0.005] * 6


def test_with_a_schedule_both_factors_count() -> None:
    run = run_of(Once(lambda t: t.set_lr(factor=0.5)), schedule=schedules.linear())
    plain = dataclasses.replace(run, callbacks=())
    own, other = ([info.rate for info in train(one)] for one in (run, plain))
    assert own[:3] == other[:3] and own[3:] == [rate / 2 for rate in other[3:]]


def test_a_layer_is_trained_from_a_step_on() -> None:
    weights = []

    class Look(shoal.Callback):
        def on_step(self, trainer: Any, info: TrainingInfo) -> None:
            weights.append(trainer.model[0].weight.detach().clone())

    train(run_of(Freeze("0.*", until=5), Look()))
    assert all(torch.equal(weights[0], one) for one in weights[:5])
    assert not torch.equal(weights[4], weights[5])


@pytest.mark.parametrize("dampening", [0.0, 0.5])
def test_a_layer_that_joins_later_has_the_momentum_of_a_first_step(dampening: float) -> None:
    """As plain torch, whose kernel that is not fused takes parameters without momentum."""

    def optimizer(fused: bool | None) -> Any:
        return lambda named: torch.optim.SGD(
            named, lr=0.1, momentum=0.9, dampening=dampening, fused=fused
        )

    losses = [
        [info.loss for info in train(run_of(Freeze("0.*", until=5), optimizer=optimizer(fused)))]
        for fused in (None, False)
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_stopping_is_a_success_and_is_saved(tmp_path: Path) -> None:
    infos = train(run_of(Once(lambda trainer: trainer.stop("enough"))), checkpoints=tmp_path)
    assert infos[-1].step == 3
    assert list_steps(open_store(tmp_path)) == ["step-00000003"]


def follow(callback: Any, values: list[float]) -> list[bool]:
    info = TrainingInfo(0, 9, 0, 0, None, {}, {}, 0.1, None)
    return [
        callback.is_improved(info._replace(step=step, metrics={"loss": value}))
        for step, value in enumerate(values, start=1)
    ]


def test_the_best_is_smaller_or_larger_by_enough() -> None:
    assert follow(EarlyStopping("loss", 9), [3, 2, 2, math.nan, 1]) == [
        True,
        True,
        False,
        False,
        True,
    ]
    best = EarlyStopping("loss", 9, "max", min_delta=0.5)
    assert follow(best, [math.nan, 1, 1.4, 1.6]) == [False, True, False, True]
    assert (best.best, best.best_step, best.num_bad) == (1.6, 4, 0)


def test_a_plateau_lowers_the_rate_to_a_floor() -> None:
    callback = ReduceOnPlateau("loss", factor=0.1, patience=1, min_delta=99, min_lr=5e-3)
    rates = [info.rate for info in train(run_of(callback, steps=20))]
    assert rates[8] == pytest.approx(0.01) and rates[12:] == pytest.approx([5e-3] * 8)


def test_the_best_checkpoint_is_kept(tmp_path: Path) -> None:
    class Worse(shoal.Callback):
        """From the second evaluation on, nothing improves; and each is saved."""

        def on_evaluate(self, trainer: Any, info: TrainingInfo) -> None:
            trainer.metrics["score"] = 10.0 if info.step == 8 else 1.0
            trainer.save()

    train(run_of(Worse(), BestCheckpoint("score", "max"), steps=40), checkpoints=tmp_path)
    steps = [8, 36, 40]  # the best, and the last two
    assert list_steps(open_store(tmp_path)) == [f"step-{step:08d}" for step in steps[::-1]]


def test_an_average_is_that_of_the_formula(tmp_path: Path) -> None:
    run = run_of(EMA(0.75, evaluate=True), evaluate_every=3)
    with shoal.trainer(run, checkpoints=tmp_path) as trainer:
        average = [p.detach().clone() for p in trainer.model.parameters()]
        for info in trainer:
            for own, p in zip(average, trainer.model.parameters()):
                own.mul_(0.75).add_(p.detach() * 0.25)
            if info.evaluation:
                scores = info.evaluation
    model = shoal.load(tmp_path, run, weights="ema")
    assert all(map(torch.equal, average, (p.detach() for p in model.parameters())))
    with torch.no_grad():
        assert scores["ema_loss"] == pytest.approx(F.mse_loss(model(X), X).item())
        assert scores["loss"] == pytest.approx(F.mse_loss(trainer.model(X), X).item())
    out, words = tmp_path / "averaged.safetensors", ["export", str(tmp_path)]
    words += [str(out), "--to", "safetensors", "--weights", "ema"]
    checkpoint.main(words, standalone_mode=False)
    exported = load_file(out)
    assert all(torch.equal(exported[name], p) for name, p in model.named_parameters())
    with pytest.raises(UsageError, match="no weights named 'mean'"):
        shoal.load(tmp_path, run, weights="mean")


@pytest.mark.parametrize("until", [2, 5])
def test_a_scheduler_of_torch_goes_on_where_it_was(tmp_path: Path, until: int) -> None:
    def callbacks() -> list[Any]:
        return [
            TorchScheduler(lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)),
        ]

    whole = [info.rate for info in train(run_of(*callbacks()))]
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    plain, expected = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5), []
    for _ in range(12):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        plain.step()
    assert whole == expected
    run = run_of(*callbacks(), Once(lambda trainer: trainer.stop(), until))
    first = train(run, checkpoints=tmp_path)
    rest = train(run_of(*callbacks()), checkpoints=tmp_path, resume=True)
    assert [info.rate for info in (*first, *rest)] == whole


def test_a_scheduler_that_follows_a_metric() -> None:
    def make(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.ReduceLROnPlateau(
            optimizer, factor=0.5, patience=0, threshold=99.0
        )

    rates = [info.rate for info in train(run_of(TorchScheduler(make, metric="loss")))]
    assert rates[::4] == [0.1, 0.05, 0.025]


class Misspelt:
    def on_stpe(self, trainer: Any, info: Any) -> None: ...


class Short:
    def on_step(self, trainer: Any) -> None: ...


class Half:
    def on_step(self, trainer: Any, info: Any) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        return {}


@pytest.mark.parametrize(
    ("callbacks", "said"),
    [
        ([Misspelt()], "Misspelt has the method on_stpe, which nothing calls. Did you mean 'on_s"),
        ([Short()], r"Short.on_step cannot be called with .trainer, info."),
        ([Half()], "Half has state_dict alone"),
        ([object()], "has none of the methods on_start, on_step"),
        ([EarlyStopping], "EarlyStopping is a class. Give an object of it"),
        (EarlyStopping(), "callbacks is a EarlyStopping. Give a list"),
        ([EarlyStopping()], "EarlyStopping follows 'loss' of evaluations, and this run has none"),
    ],
)
def test_what_nothing_would_call_is_refused(callbacks: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        run_of(evaluate=None, evaluate_every=None, callbacks=callbacks)


@pytest.mark.parametrize(
    "make",
    [
        lambda: EarlyStopping(patience=0),
        lambda: EarlyStopping(mode="least"),  # type: ignore[arg-type]
        lambda: ReduceOnPlateau(factor=2),
        lambda: EMA(1.0),
        lambda: EMA(name="model"),
        lambda: Freeze([]),
        lambda: Freeze("0.*", until=3, since=3),
        lambda: LogEvery(0, print),
        lambda: TorchScheduler(print, every="day"),  # type: ignore[arg-type]
    ],
)
def test_settings_of_callbacks_are_checked(make: Any) -> None:
    with pytest.raises(UsageError):
        make()


class Keeps(shoal.Callback):
    def __init__(self, value: Any = 1):
        self.value = value

    def on_start(self, trainer: Any, info: Any) -> None:
        if self.value == "lock":
            self.value = threading.Lock()

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


def test_state_that_cannot_be_kept_is_named() -> None:
    said = r"trainer.state\['callbacks'\]\['Keeps'\]\['value'\] is of the type lock"
    with pytest.raises(RecipeError, match=said):
        train(run_of(Keeps("lock")))
    with pytest.raises(UsageError, match="Keeps cannot be copied"):
        train(run_of(Keeps(threading.Lock())))


def test_a_callback_that_is_gone_when_a_run_goes_on_is_named(tmp_path: Path) -> None:
    train(run_of(Keeps(), Once(lambda trainer: trainer.stop())), checkpoints=tmp_path)
    with pytest.raises(UsageError, match="The state of the callback Keeps was kept"):
        train(run_of(EMA()), checkpoints=tmp_path, resume=True)


def test_a_torch_scheduler_is_no_schedule() -> None:
    kinds = torch.optim.lr_scheduler
    for given in (kinds.ReduceLROnPlateau, lambda optimizer: kinds.StepLR(optimizer, 3)):
        with pytest.raises(UsageError, match=r"shoal.callbacks.TorchScheduler"):
            run_of(schedule=given)
    with pytest.raises(UsageError, match="Give one of them"):
        run_of(TorchScheduler(print), schedule=schedules.linear())


@pytest.mark.parametrize("field", ["evaluate_every", "save_every"])
def test_every_epoch_is_a_number_of_steps(field: str) -> None:
    run = run_of(**{field: "epoch"})
    assert (run.evaluates_every if field == "evaluate_every" else run.saves_every) == 4
    halved = dataclasses.replace(run, batch_size=16)
    assert 2 in halved.meets_every, "it follows the batch size"
    with pytest.raises(UsageError, match=f"{field}='day' must be a whole number .*, or 'epoch'"):
        run_of(**{field: "day"})


def test_plain_functions_are_called_with_each_step() -> None:
    seen: list[shoal.StepInfo] = []
    train(run_of(seen.append))
    assert [info.step for info in seen] == [*range(1, 13)]
