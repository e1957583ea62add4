"""The Run: what is trained, and nothing about where.

A recipe returns one. It holds functions and numbers only; models, optimizers and ranks are made
from it later, under a plan. What is wrong with it is said when it is made.
"""

import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from shoal.data.batches import Batches, LoadOptions, Piece
from shoal.data.orders import order_of
from shoal.data.permutation import batches_per_epoch, check_end
from shoal.data.sources import SkipsBad, as_source, stream_of
from shoal.data.validate import require_function, require_whole
from shoal.errors import PlanError, RecipeError, UsageError
from shoal.numerics.optimizers import refuse_closures, use_fused_kernels
from shoal.numerics.schedules import Schedule, as_schedule
from shoal.parallel.striping import tables_of, weights_of
from shoal.plans.keys import AUTO
from shoal.plans.plan import Plan
from shoal.sync.named_parts import LossPart
from shoal.training.callbacks import check_callbacks, check_plan, has_callbacks
from shoal.world import cores_of_run

MOST_LOADERS = 256  # of a rank
MINIMISED = "loss"  # the name of what is minimised, where a loss has named parts
EPOCH = "epoch"  # how often something is done: after each of them


class DataPlace(NamedTuple):
    """Where in the data a run is."""

    samples: int  # taken so far
    epoch: int  # of the next batch
    batch: int  # of that epoch, the next one


@dataclass(frozen=True, kw_only=True)
class Run:
    model: Callable[[], nn.Module]
    loss: Callable[[Any, Any], Any] | None = None  # a mean, (sum, weight), or named parts
    step: Callable[[Any], None] | None = None  # step(batch): one of your own, instead of loss
    optimizer: Callable[[Any], torch.optim.Optimizer]  # of (name, parameter) pairs
    data: Any  # anything with len() and indexing, or a stream; a sample is (inputs, target)
    batch_size: int  # of the whole job
    steps: int | None = None
    epochs: int | None = None
    seed: int = 0
    schedule: Callable[..., float] | None = None
    clip: float | None = None
    collate: Callable[[list[Any]], Any] | None = None
    end: str = "drop"
    loaders: int = 0  # processes beside each rank that load ahead (`data/loader_processes.py`)
    evaluate: Any = None
    evaluate_every: int | str | None = None  # steps, or "epoch"
    metrics: Mapping[str, Callable[[Any, Any], Any]] = field(default_factory=dict)
    save_every: int | str | None = None  # steps, or "epoch"
    check_every: int = 10  # steps in which all that replicas hold is compared; 0 for never
    plan: str = ""
    cuts: Mapping[str, str] = field(default_factory=dict)  # of modules over `tensor`, by name
    tokenizer: Any = None  # of a language model: encode(text) to token ids, decode(ids) to text
    callbacks: Sequence[Any] = ()  # objects with on_step and others, or functions of a StepInfo

    def __post_init__(self) -> None:
        given = [name for name in ("loss", "step") if getattr(self, name) is not None]
        if not given:
            raise UsageError(
                "A run needs loss, a function of (output, target), or step, one of your own."
            )
        for name in ("model", *given, "optimizer"):
            made = name == "model" and isinstance(self.model, nn.Module)
            if made or not callable(getattr(self, name)):
                raise UsageError(
                    f"Run.{name} is a {type(getattr(self, name)).__name__}. It must be a function"
                    f"{': write model=lambda: MyModel()' if name == 'model' else ''}."
                )
        if self.collate is not None:
            require_function(self.collate, "Run(collate=...)")
            _refuse_own_seed(self.collate)
        if not isinstance(self.metrics, Mapping):
            raise UsageError(
                f"Run.metrics is a {type(self.metrics).__name__}. It maps names to functions of "
                "(output, target)."
            )
        for name in self.metrics:
            require_function(self.metrics[name], f"Run(metrics={{{name!r}: ...}})")
        self._check_counts()
        check_end(self.end)
        object.__setattr__(self, "data", as_source(self.data, streams=True))
        if self.evaluate is not None and not len(as_source(self.evaluate, "evaluate")):
            raise UsageError(
                "evaluate is empty: len(evaluate) is 0. Give at least 1 sample, or leave it out."
            )
        for name in ("encode", "decode") if self.tokenizer is not None else ():
            if not callable(getattr(self.tokenizer, name, None)):
                raise UsageError(
                    f"Run.tokenizer is a {type(self.tokenizer).__name__} without {name}(). It has "
                    "encode(text), which gives token ids, and decode(ids), which gives text."
                )
        if self.evaluate_every is not None and self.evaluate is None:
            raise UsageError(
                "evaluate_every has no effect without evaluate. Give evaluate=a source of samples."
            )
        _refuse_on_stream(self)
        if self.evaluate is not None and not self.measures():
            raise UsageError(
                "evaluate has nothing to measure. An evaluation calls model(inputs), also with a "
                "step of your own, and loss(output, target) or metrics judge it. Give one of them."
            )
        if self.schedule is not None:
            as_schedule(self.schedule)
        check_callbacks(self)

    def _check_counts(self) -> None:
        for name in ("batch_size", "steps", "epochs", "evaluate_every", "save_every"):
            value = getattr(self, name)
            if name.endswith("_every") and value == EPOCH:
                continue
            if value is not None and (type(value) is not int or value < 1):
                or_epoch = f", or {EPOCH!r}" if name.endswith("_every") else ""
                raise UsageError(
                    f"{name}={value!r} must be a whole number of at least 1{or_epoch}."
                )
        if type(self.check_every) is not int or self.check_every < 0:
            raise UsageError(
                f"check_every={self.check_every!r} must be a whole number of steps, or 0 to "
                "compare nothing."
            )
        if type(self.loaders) is not int or not 0 <= self.loaders <= MOST_LOADERS:
            raise UsageError(
                f"loaders={self.loaders!r} must be a whole number from 0, for none, to "
                f"{MOST_LOADERS}: each rank forks as many processes."
            )
        if (self.steps is None) == (self.epochs is None):
            given = "both are" if self.steps else "neither is"
            raise UsageError(f"A run needs steps or epochs, one of them; {given} given.")
        require_whole(self.seed, "Run(seed=...)")
        is_number = isinstance(self.clip, int | float)
        if self.clip is not None and not (is_number and self.clip > 0):
            raise UsageError(f"clip={self.clip!r} must be above 0. Leave it out to clip nothing.")

    def num_steps(self) -> int:
        if self.steps is not None:
            return self.steps
        assert self.epochs is not None
        if (stream := stream_of(self.data)) is not None:  # passes follow without a gap
            return self.epochs * int(stream.length) // self.batch_size
        return self.epochs * self._steps_per_epoch()

    def _steps_per_epoch(self) -> int:
        return batches_per_epoch(len(order_of(self.data)), self.batch_size, self.end)

    def _in_steps(self, every: int | str | None) -> int | None:
        """How often something is done, with an epoch counted in steps."""
        if not isinstance(every, str):
            return every
        stream = stream_of(self.data)
        return self._steps_per_epoch() if stream is None else int(stream.length) // self.batch_size

    @property
    def saves_every(self) -> int | None:
        """`save_every` in steps."""
        return self._in_steps(self.save_every)

    @property
    def evaluates_every(self) -> int | None:
        """`evaluate_every` in steps."""
        return self._in_steps(self.evaluate_every)

    def place_after(self, step: int) -> DataPlace:
        """Where in the data the run is after so many steps."""
        epoch, batch = divmod(step, self._steps_per_epoch())
        of_epoch = len(order_of(self.data))
        if self.end != "pad":
            of_epoch = self._steps_per_epoch() * self.batch_size
        return DataPlace(epoch * of_epoch + batch * self.batch_size, epoch, batch)

    def meets_after(self, step: int) -> bool:
        """Whether the whole state is wanted after `step`: to be evaluated, to be saved."""
        saves = self.saves_every is not None and next_due(step - 1, self.saves_every) == step
        return saves or self.evaluates_after(step) or step == self.num_steps()

    @property
    def writes_weights(self) -> str:
        """What of the recipe may write to weights between two updates, in words; or ""."""
        if self.callbacks or self.step is not None:
            found = "callbacks" if self.callbacks else "a step of the recipe's own"
            return f"{found} may write to them"
        return "" if self.check_every else "check_every=0 would find nothing that writes to them"

    @property
    def meets_every(self) -> list[int]:
        """After how many steps each time, beside the last, the whole state is wanted."""
        evaluates = None if self.evaluate is None else self.evaluates_every
        return [every for every in (self.saves_every, evaluates) if every is not None]

    def evaluates_after(self, step: int) -> bool:
        """Whether `step` is one to evaluate after: as often as the run says, and the last."""
        if self.evaluate is None:
            return False
        every = self.evaluates_every
        often = every is not None and step % every == 0
        return often or step == self.num_steps()

    def measures(self) -> list[str]:
        """The names of what is measured: of each step its loss, of evaluations the metrics too."""
        return ["loss"] if self.evaluate is None else self.judges()

    def judges(self) -> list[str]:
        """The names of what an evaluation measures: the loss, if there is one, and the metrics."""
        return [*(["loss"] if self.loss is not None else []), *self.metrics]

    def make_schedule(self) -> Schedule | None:
        return as_schedule(self.schedule) if self.schedule is not None else None

    def make_model(self) -> nn.Module:
        """The model with its first weights: the same for every plan."""
        with _as_the_first(self.seed):
            model = self.model()
        if not isinstance(model, nn.Module):
            raise RecipeError(f"Run.model returned a {type(model).__name__}, not an nn.Module.")
        for name, value in (*model.named_parameters(), *model.named_buffers()):
            if is_lazy(value):
                raise RecipeError(
                    f"{name} has no shape yet: its module is a lazy one. Let Run.model call the "
                    "model once on an example, or give the sizes."
                )
            if value.layout != torch.strided:
                raise RecipeError(
                    f"{name} is a sparse tensor, which ranks can neither compare nor save. Keep "
                    "its indices and values and make it in the forward, or keep it dense."
                )
        if not any(p.requires_grad for p in model.parameters()):
            raise RecipeError("The model has no parameter that requires a gradient.")
        return model

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """The recipe's optimizer over the true parameters, fused where it leaves the choice."""
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        optimizer = self.optimizer(named)
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise RecipeError(
                f"Run.optimizer returned a {type(optimizer).__name__}, not a torch optimizer."
            )
        refuse_closures(optimizer)
        known = {id(p) for p in model.parameters()}
        if any(id(p) not in known for group in optimizer.param_groups for p in group["params"]):
            raise RecipeError(
                "The optimizer has a parameter that is not the model's, which replicas could not "
                "agree on. Make it part of the model (a learnable loss, say, as a submodule)."
            )
        use_fused_kernels(optimizer, weights_of(tables_of(model).values()))
        return optimizer


def next_due(step: int, every: int) -> int:
    """The first step after `step` at which what is done every so many steps is due. Pure."""
    return step - step % every + every


def _refuse_on_stream(run: Run) -> None:
    """What a Run cannot have if its data is a stream."""
    stream = stream_of(run.data)
    if stream is None:
        return
    if run.steps is None and stream.length is None:
        raise UsageError(
            f"epochs={run.epochs} does not go with a stream whose length is not known. Give "
            "the Run steps=, or tell the length of a pass: shoal.data.stream(data, length=...)."
        )
    for name in ("evaluate_every", "save_every"):
        if getattr(run, name) == EPOCH and stream.length is None:
            raise UsageError(
                f"{name}='epoch' does not go with a stream whose length is not known. Give a "
                "number of steps, or tell the length: shoal.data.stream(data, length=...)."
            )
    if run.loaders:
        raise UsageError(
            f"loaders={run.loaders} does not go with a stream: each of them would read all of "
            "it. Leave loaders out; what is slow for a sample belongs into shoal.data.mapped("
            "stream, function), and then each rank does it for its own samples alone."
        )
    if not run.num_steps():
        raise UsageError(
            f"A pass of the stream has {stream.length} samples, and batch_size is "
            f"{run.batch_size}, so no step can be made. Use a smaller batch."
        )


def _refuse_own_seed(collate: Callable[..., Any]) -> None:
    """A collator of transformers may have a generator, which goes on from batch to batch."""
    seed = getattr(collate, "seed", None)
    if seed is not None and hasattr(collate, "create_rng"):
        raise UsageError(
            f"{type(collate).__name__}(seed={seed}) draws from a generator of its own, so its "
            "draws would depend on how many batches a process has made, and with that on the plan. "
            "Leave its seed out: what it draws then follows from the Run's seed and the samples."
        )


@contextmanager
def _as_the_first(seed: int) -> Iterator[None]:
    """Whatever a process made before, a model gets the same weights and names.

    Keras draws from Python and numpy as well, and numbers its layers for a whole process.
    """
    naming = sys.modules.get("keras.src.utils.naming")
    if naming is not None:
        naming.reset_uids()
    states = random.getstate(), np.random.get_state()
    random.seed(seed)
    np.random.seed(seed % (1 << 32))
    torch.manual_seed(seed)
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


def resolve(run: Run, plan: str | Plan | None, ranks: int | None) -> Plan:
    """The plan with every count fixed for this run, or an error that says what does not fit."""
    chosen = plan if isinstance(plan, Plan) else Plan.parse(run.plan if plan is None else plan)
    waiting = _waiting_for_all(chosen)
    if chosen.local_steps > 1:
        waiting = waiting or "local_steps"
    if chosen.sync == "server":
        waiting = waiting or "sync=server"
    if waiting and run.end == "pad":
        raise PlanError(
            f"{waiting} does not go with end='pad': the short batch at the end of an epoch may "
            "leave a rank without samples. Use end='drop' or end='wrap'."
        )
    if waiting and isinstance(run.data, SkipsBad):
        raise PlanError(_left_out(waiting, "data"))
    _refuse_between_windows(chosen, run)
    _refuse_custom_step(chosen, run)
    _refuse_callbacks(chosen, run)
    check_evaluated(chosen, run.evaluate)
    return chosen.resolve(ranks=ranks, cores=cores_of_run(), batch_size=run.batch_size)


def _refuse_between_windows(plan: Plan, run: Run) -> None:
    """Through servers replicas are at different steps of a window, and meet at its end only."""
    if plan.sync != "server":
        return
    found = {"save_every": run.saves_every, "evaluate_every": run.evaluates_every}
    for name, every in found.items():
        if every is not None and every % plan.local_steps:
            raise PlanError(
                f"{name}={every} does not go with local_steps={plan.local_steps} and sync=server: "
                f"replicas meet only after every {plan.local_steps} steps. Use {name}="
                f"{-(-every // plan.local_steps) * plan.local_steps}, or leave sync=server out."
            )


def _refuse_custom_step(plan: Plan, run: Run) -> None:
    """A step of the recipe's own calls parts of the model as it likes, and updates in phases."""
    unfit = {
        "tensor": (1, "runs layers as parts that it finds in the model's own forward"),
        "pipeline": (1, "runs the model's own forward as stages"),
        "local_steps": (1, "updates between agreements of replicas"),
        "sync": ("allreduce", "steps on servers, once for each batch"),
    }
    found = {k: why for k, (usual, why) in unfit.items() if getattr(plan, k) != usual}
    for key in ("codec", "bucket"):
        if getattr(plan, key) == AUTO:
            found[key] = "rehearses a step as a whole before it is made"
    if plan.zero == 3:
        found["zero"] = "gathers a block's parameters only while its own forward runs"
    if "fp16" in plan.precision:
        found["precision"] = "tries a step again when its gradient overflows"
    for key, why in found.items() if run.step is not None else ():
        raise PlanError(
            f"{key}={getattr(plan, key)} does not go with a step of the recipe's own "
            f"(Run(step=...)): it {why}, and such a step uses the model as it likes, in phases. "
            "Use data=N, with zero=1 or zero=2, precision=bf16, pieces and recompute as you like."
        )


def _refuse_callbacks(plan: Plan, run: Run) -> None:
    """Callbacks act after a step that all ranks have made."""
    check_plan(run, plan)
    if plan.sync != "server" or not has_callbacks(run):
        return
    unfit = {"staleness": 0, "local_steps": 1, "deadline": "none"}
    for key, usual in unfit.items():
        if getattr(plan, key) != usual:
            raise PlanError(
                f"{key}={getattr(plan, key)} with sync=server does not go with callbacks: ranks "
                "are at different steps, and callbacks act alike on all of them after the same "
                f"one. Leave {key} out, or the callbacks."
            )


def check_evaluated(plan: Plan, source: Any) -> None:
    """Refuse to evaluate a source in quarantine where a rank without samples stops the others."""
    waiting = _waiting_for_all(plan)
    if waiting and isinstance(source, SkipsBad):
        raise PlanError(_left_out(waiting, "the source to evaluate"))


def _waiting_for_all(plan: Plan) -> str:
    """What makes ranks wait for each other in every forward, so that each needs samples; or ""."""
    if plan.zero == 3:
        return "zero=3"
    return "pipeline" if plan.pipeline > 1 else ""


def _left_out(waiting: str, what: str) -> str:
    return (
        f"{waiting} does not go with quarantine, and {what} is in quarantine: when all samples of "
        "a piece are left out, a rank has none, and the others would wait for it. Take them out "
        "before: shoal.data.clean(source, quarantine=...), or `shoal data build` of this source "
        "and train on the shards. Or use another plan."
    )


def make_batches(run: Run, num_pieces: int, device: str = "cpu", ahead: bool = False) -> Batches:
    """The run's batches, cut into pieces; says what is wrong with its data.

    With `ahead` they are loaded by processes of their own, if the run asks for some.
    """
    return Batches(
        run.data,
        batch_size=run.batch_size,
        num_pieces=num_pieces,
        seed=run.seed,
        end=run.end,
        loading=LoadOptions(run.collate, device, run.loaders if ahead else 0),
    )


class Objective(NamedTuple):
    """The loss of a piece. `tensor` is what backward starts from."""

    tensor: Tensor
    weight: float | Tensor
    is_mean: bool  # over `weight`; otherwise it is the sum
    parts: Mapping[str, LossPart] = {}  # by name: measured beside it, and not minimised


def objective(run: Run, output: Any, piece: Piece) -> Objective:
    """Ask the run's loss and check what it says."""
    assert run.loss is not None, "a plain step and an evaluation with a loss have one"
    return objective_of(run.loss(output, piece.target), piece)


def objective_of(given: Any, piece: Piece) -> Objective:
    """What a loss said of a piece, checked."""
    answer, parts = _named_parts(given, piece)
    is_mean = not isinstance(answer, tuple)
    loss, weight = (answer, float(piece.num_samples)) if is_mean else answer
    if not isinstance(loss, Tensor) or loss.dim():
        loss = _scalar(loss)
    if not loss.requires_grad and torch.is_grad_enabled():
        raise RecipeError("The loss does not depend on the model's parameters: nothing to train.")
    weight = weight.detach() if isinstance(weight, Tensor) else weight
    return Objective(loss, weight, is_mean, parts)


def _named_parts(answer: Any, piece: Piece) -> tuple[Any, dict[str, LossPart]]:
    """What is minimised, and the named parts beside it if the loss answers with a dict."""
    if isinstance(answer, Tensor) or not isinstance(answer, Mapping):
        return answer, {}
    if MINIMISED not in answer:
        known = ", ".join(map(str, answer)) or "nothing"
        raise RecipeError(
            f"The loss returned a dict of {known}, without {MINIMISED!r}. That one is minimised, "
            "and the others are recorded under their names."
        )
    parts = {}
    for name, value in answer.items():
        if not isinstance(name, str) or not name:
            raise RecipeError(f"The loss returned a part named {name!r}. A name is text.")
        if name != MINIMISED:
            parts[name] = _part(name, value, float(piece.num_samples))
    return answer[MINIMISED], parts


def _part(name: str, value: Any, num_samples: float) -> LossPart:
    """Like a loss: a mean over the samples, or a pair (sum, weight); a tensor or a number."""
    is_mean = not isinstance(value, tuple)
    found = (value, num_samples) if is_mean else value
    if len(found) != 2 or not all(map(_is_single_number, found)):
        what = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise RecipeError(
            f"The part {name!r} of the loss is not a single number ({what}). It must be a number "
            "or a scalar tensor, the mean over the samples it was given, or a pair (sum, weight)."
        )
    kept = [part.detach() if isinstance(part, Tensor) else float(part) for part in found]
    return LossPart(kept[0], kept[1], is_mean)


def _is_single_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1 and not value.is_complex()
    return isinstance(value, int | float)


def _scalar(loss: Any) -> Tensor:
    if isinstance(loss, Tensor) and loss.numel() == 1:
        return loss.reshape(())
    what = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
    raise RecipeError(
        f"The loss is not a single number ({what}). It must be a scalar tensor, the mean over "
        "the samples it was given, a pair (sum, weight), or a dict of these with 'loss' in it."
    )


def call_model(model: nn.Module, inputs: Any) -> Any:
    """A tensor goes in as model(x), a tuple as model(*x), a dict as model(**x)."""
    if isinstance(inputs, Tensor):
        return model(inputs)
    if isinstance(inputs, tuple | list):
        return model(*inputs)
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(inputs)
