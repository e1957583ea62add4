"""What all ranks of a host share: the model with its first weights, and how it will be cut.

Made once, in the process that forks the ranks, so a host holds the whole model once however many
ranks it has, and a plan that does not suit the model is refused before any of them starts.
"""

from collections.abc import Callable, Mapping
from functools import partial
from itertools import islice
from typing import Any, NamedTuple, TypeVar

import msgspec
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from shoal.data.batches import Batches
from shoal.errors import PlanError, RecipeError
from shoal.logs import warn_on_screen
from shoal.numerics.codecs import packs
from shoal.numerics.compiled import compiled_in
from shoal.numerics.optimizers import is_element_wise, unfit_for_rows
from shoal.numerics.precision import PrecisionSchedule
from shoal.numerics.randomness import PieceSeeds
from shoal.parallel.apply import Survey, survey
from shoal.parallel.pipeline.stages import rank_of_stage
from shoal.parallel.recompute import blocks_to_recompute
from shoal.parallel.striping import EmbeddingModule, tables_of
from shoal.plans.keys import AUTO
from shoal.plans.measured import GAINS
from shoal.plans.plan import Plan
from shoal.plans.resize import RunSize, with_size
from shoal.sync.outer import averaged_parameters
from shoal.training.callbacks import has_callbacks
from shoal.training.diagnostics import NotedParameter, refuse_writes, written_in_forward
from shoal.training.run import Run, call_model, make_batches

T = TypeVar("T")

# In torch's words: a gradient was asked for in a forward that is run without them.
_OWN_GRADIENT = ("does not require grad and does not have a grad_fn", "_will_engine_execute_node")


class BuiltModel(NamedTuple):
    model: nn.Module
    seeds: PieceSeeds
    survey: Survey


class _TablesOnRanks(PlanError):
    """Several ranks would exchange sparse gradients."""


def with_fit_plan(
    run: Run, plan: str | None, ranks: int | None, use: Callable[[str | None], T]
) -> T:
    """`use` with the plan; with data=1 if it was open and the model has tables, which several
    ranks cannot exchange."""
    try:
        return use(plan)
    except _TablesOnRanks as error:
        chosen = Plan.parse(run.plan if plan is None else plan)
        if chosen.data is not None or ranks is not None:
            raise
        alone = str(msgspec.structs.replace(chosen, data=1))
        warn_on_screen(f"The plan is {alone}, since more ranks do not work: {error}")
        return use(alone)


def build_model(run: Run, plan: Plan) -> BuiltModel:
    """Build the model and look at what the plan will do to it."""
    batches = make_batches(run, plan.num_pieces)  # says what is wrong with the data
    model = run.make_model()
    refuse_unfit(run, plan, model)
    _lay_flat(plan, model)
    model.train()
    seeds = PieceSeeds(model, run.seed, by_block=run.step is None)

    def forward(inputs: Any) -> Any:
        precision = PrecisionSchedule.parse(plan.precision).lowest
        with refuse_writes(model, plan, looks_inside=False), precision.autocast("cpu"):
            try:
                return call_model(model, inputs)
            except RuntimeError as error:
                if not any(words in str(error) for words in _OWN_GRADIENT):
                    raise
                raise _takes_a_gradient(plan) from None

    places = _examples(batches, plan) if plan.cuts_model else []
    # Loaded before a forward is watched: a collate may run a model of its own.
    forwards = [partial(forward, batches.at(at).piece(piece).inputs) for at, piece in places]
    # What looks at functions in a forward is not to see this.
    noted = {n: NotedParameter.of(p) for n, p in model.named_parameters()} if forwards else {}
    found = survey(model, plan, forwards, seeds, run.cuts)
    _refuse_codec_of_shared(plan, found)
    _undo_writes(run, plan, noted)
    batches.close()  # a stream may have threads, and ranks are forked from here
    return BuiltModel(model, seeds, found)


def _undo_writes(run: Run, plan: Plan, noted: Mapping[str, NotedParameter]) -> None:
    """Give parameters that forwards have written to since their first values again."""
    written = [name for name, known in noted.items() if known.is_changed()]
    if written and plan.num_replicas > 1:
        raise written_in_forward(written[0], plan)
    first = dict(run.make_model().named_parameters()) if written else {}
    with torch.no_grad():
        for name in written:
            noted[name].parameter.copy_(first[name])


def refuse_unfit(run: Run, plan: Plan, model: nn.Module) -> None:
    """Refuse what a model says of a plan before a forward runs."""
    _refuse_whole_tensors(run, plan, model)
    _refuse_tables_that_shrink(plan, model)
    _refuse_tables(run, plan, model)
    _refuse_too_many_fragments(plan, model)
    _refuse_complex(plan, model)
    _refuse_compiled(plan, model)
    _refuse_own_groups(plan, model)
    _refuse_idle_codec(plan, model)
    _refuse_cut_weights(plan, model)


def _examples(batches: Batches, plan: Plan) -> list[tuple[int, int]]:
    """Steps and numbers of two pieces of one form, if there are two among the first that have
    samples: texts may differ in length, and all of a piece may be left out by quarantine."""

    def shapes(step: int, piece: int) -> list[Any]:
        found = batches.at(step).piece(piece)
        inputs = tree_leaves(found.inputs) if found.num_samples else []
        return [getattr(leaf, "shape", None) for leaf in inputs]

    steps, pieces = range(batches.steps_per_epoch), range(plan.num_pieces)
    places = ((step, piece) for step in steps for piece in pieces)
    loaded = ((place, form) for place in places if (form := shapes(*place)))
    some = list(islice(loaded, 2 * plan.num_pieces))
    if not some:
        raise RecipeError(
            "Quarantine leaves out all samples of the data, so there is nothing to train on. Its "
            "file says why, sample by sample."
        )
    (first, form), *others = some
    return [first, *[place for place, other in others if other == form][-1:]]


def _refuse_complex(plan: Plan, model: nn.Module) -> None:
    names = [name for name, p in model.named_parameters() if p.requires_grad and p.is_complex()]
    unfit = {
        "combine": ("mean", "puts gradients in order, which complex numbers have none of"),
        "local_steps": (1, "brings weights of real numbers together"),
        "codec": ("none", "rounds real numbers"),
    }
    for key, (usual, why) in unfit.items():
        if names and getattr(plan, key) != usual:
            raise PlanError(
                f"{names[0]} is complex, and {key}={getattr(plan, key)} {why}. Leave out {key}, or "
                "train real and imaginary parts as two parameters."
            )


def _refuse_codec_of_shared(plan: Plan, found: Survey) -> None:
    """A parameter that several stages use is on the servers of each, which pack in other blocks."""
    if plan.sync != "server" or plan.codec == "none" or found.stages is None:
        return
    for name, stages in found.stages.holders.items():
        if len({rank_of_stage(s, plan.pipeline, plan.schedule) for s in stages}) > 1:
            raise PlanError(
                f"codec={plan.codec} does not go with pipeline={plan.pipeline} and sync=server "
                f"here: stages on several ranks share {name}, and the servers of each would round "
                "it in another way. Leave one of the three out."
            )


def _refuse_idle_codec(plan: Plan, model: nn.Module) -> None:
    """A codec that makes no gradient smaller has no effect. Servers and outer steps pack all
    parameters together, so small ones too."""
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    codecs = GAINS if plan.codec == AUTO else (plan.packed_codec,)
    if "none" in codecs or any(
        packs(codec, p.shape, p.itemsize) for codec in codecs for p in trained.values()
    ):
        return
    name, largest = max(
        trained.items(), key=lambda item: item[1].numel(), default=("nothing", None)
    )
    shape = "" if largest is None else f", of the shape {list(largest.shape)}"
    raise PlanError(
        f"codec={plan.codec} has no effect: it makes no gradient of this model smaller. Tensors "
        f"below 1,024 elements are sent as they are, and so is what would take as many bytes "
        f"packed; the largest is {name}{shape}. Leave codec out."
    )


def _refuse_compiled(plan: Plan, model: nn.Module) -> None:
    """What a plan does between the modules of a model would be lost in a compiled graph."""
    _refuse_scripted(plan, model)
    name = next(compiled_in(model), None)
    unfit = {"tensor": 1, "pipeline": 1, "recompute": "none"}
    for key, usual in unfit.items():
        if name is not None and getattr(plan, key) != usual:
            who = f"{name} is compiled" if name else "The model is compiled"
            raise PlanError(
                f"{who} (torch.compile), and {key}={getattr(plan, key)} works between the modules "
                "of a model, which a compiled graph does not show. Compiled models train under "
                "data and zero. Leave out the compilation, or use such a plan."
            )


def _refuse_scripted(plan: Plan, model: nn.Module) -> None:
    for name, module in model.named_modules():
        inside = plan.zero == 3 or plan.cuts_model or plan.recompute != "none"
        if inside and isinstance(module, torch.jit.ScriptModule):
            raise PlanError(
                f"{name or 'The model'} is scripted or traced (torch.jit), and {plan} works inside "
                "of modules, where such a one cannot be reached. It trains under data, zero=1 and "
                "zero=2. Leave out torch.jit while the model is trained, or use such a plan."
            )


def _refuse_own_groups(plan: Plan, model: nn.Module) -> None:
    """What would talk to other ranks by itself, of pieces that they need not have."""
    for name, module in model.named_modules() if plan.num_ranks > 1 else ():
        if isinstance(module, nn.SyncBatchNorm):
            raise PlanError(
                f"{name or 'The model'} is a SyncBatchNorm, which takes its statistics over all "
                "processes by itself. Here each piece of a batch has its own, whatever rank "
                "computes it, and their mean is kept, so that any number of ranks trains the same. "
                "Use BatchNorm, with fewer pieces if they are too small for it; or GroupNorm."
            )


def _refuse_cut_weights(plan: Plan, model: nn.Module) -> None:
    """A parametrization may say that it works on whole weights only (`slim/masks.py`)."""
    if plan.tensor == 1:
        return
    for name, module in model.named_modules():
        if why := getattr(module, "needs_whole_weights", ""):
            raise PlanError(
                f"{name.split('.parametrizations')[0]}: {why}, and tensor={plan.tensor} cuts "
                "weights. Use data, zero or pipeline."
            )


def _lay_flat(plan: Plan, model: nn.Module) -> None:
    """Shards know elements by their numbers, so they must stand in that order."""
    if plan.zero == 3:
        for p in model.parameters():
            p.data = p.data.contiguous()


def _refuse_whole_tensors(run: Run, plan: Plan, model: nn.Module) -> None:
    """An optimizer that looks at a whole tensor cannot step on a rank's part of it."""
    if plan.tensor == 1 and plan.zero < 3 and plan.offload == "none":
        return
    optimizer = run.make_optimizer(model)
    if not is_element_wise(optimizer):
        key = f"tensor={plan.tensor}" if plan.tensor > 1 else "zero=3"
        if plan.tensor == 1 and plan.zero < 3:
            key = "offload=optimizer"
        raise PlanError(
            f"{type(optimizer).__name__} may look at a whole tensor at once, and {key} lets a rank "
            "step on a part. Use data, pipeline, zero=1 or zero=2, or an optimizer that works "
            "element by element, such as AdamW; one of your own may say that it does with an "
            "attribute, element_wise = True."
        )


def _refuse_tables_that_shrink(plan: Plan, model: nn.Module) -> None:
    """What is known of a parameter written in forward before one runs."""
    for name, module in model.named_modules():
        is_table = isinstance(module, nn.Embedding | nn.EmbeddingBag)
        if is_table and module.max_norm is not None and plan.num_pieces > 1:
            raise written_in_forward(f"{name}.weight".lstrip("."), plan)


def why_not_resizable(run: Run, plan: Plan, model: nn.Module) -> str:
    """Why a run can take in no other rank; empty if it can, or has others."""
    if plan.local_steps > 1 and has_callbacks(run):
        return (
            f"A run with callbacks does not grow under local_steps={plan.local_steps}: a rank that "
            "joins would not get what they keep. Stop it, and resume it with another plan."
        )
    if plan.num_ranks > 1 or plan.num_pieces == 1:
        return ""
    try:
        _refuse_tables(run, with_size(plan, RunSize(2, plan.num_servers)), model)
    except PlanError as error:
        return str(error)
    return ""


def _refuse_tables(run: Run, plan: Plan, model: nn.Module) -> None:
    """Embeddings with sparse gradients: on servers, or in one process; and not with everything."""
    tables = tables_of(model)
    if not tables:
        return
    name = next(iter(tables))
    if plan.num_ranks > 1 and plan.sync != "server":
        raise _TablesOnRanks(
            f"{name} is a table, an embedding with sparse gradients, and {plan.num_ranks} ranks "
            "exchange dense ones. Add sync=server, and its rows are on parameter servers; or make "
            "the embedding with sparse=False; or train on one rank (data=1)."
        )
    optimizer = run.make_optimizer(model)
    for name, module in tables.items():
        if plan.sync == "server":
            _refuse_on_servers(plan, model, name, module)
            _refuse_second_lookups(plan, model, name, module)
        if why := unfit_for_rows(optimizer, module.weight):
            raise PlanError(
                f"{name} is a table, an embedding with sparse gradients, and {why}. Use SGD "
                "without momentum and weight_decay, Adagrad, SparseAdam or RowwiseAdagrad for "
                "it (shoal.Optimizers makes one of several optimizers), or make the embedding with "
                "sparse=False."
            )


def _refuse_on_servers(plan: Plan, model: nn.Module, name: str, module: EmbeddingModule) -> None:
    uses = [n for n, p in model.named_parameters(remove_duplicate=False) if p is module.weight]
    others = [other for other in uses if other != name]
    if others:
        raise PlanError(
            f"{name} is a table whose rows are on servers, and the model uses it as {others[0]} "
            "too, as a whole. Make the embedding with sparse=False: then it is trained as any "
            "other parameter is."
        )
    if module.max_norm is not None:
        raise PlanError(
            f"{name} is a table on servers, and max_norm={module.max_norm} changes rows where they "
            "are looked up. Leave max_norm out, or scale what was looked up."
        )
    if plan.combine != "mean":
        raise PlanError(
            f"combine={plan.combine} does not go with the table {name}: workers touch different "
            "rows, and there is no middle of one. Leave combine out, or make the embedding with "
            "sparse=False."
        )
    if plan.num_ranks_apart > 1:
        raise PlanError(
            f"The table {name}, whose rows are on servers, does not go with replicas of "
            f"{plan.num_ranks_apart} ranks yet: each rank looks up and pushes rows of its own. "
            "Leave tensor, pipeline and replicas out, or make the embedding with sparse=False."
        )
    for key, usual in {"local_steps": 1, "codec": "none", "hosts": 1}.items():
        if getattr(plan, key) != usual:
            raise PlanError(
                f"{key}={getattr(plan, key)} does not go with the table {name} yet: its rows go to "
                f"the servers on every batch, and as they are. Leave {key} out, or make the "
                "embedding with sparse=False."
            )


def _refuse_second_lookups(
    plan: Plan, model: nn.Module, name: str, module: EmbeddingModule
) -> None:
    """A block that is run again in backward looks rows up again, and must find the same ones."""
    if plan.recompute == "none" or plan.staleness_bound == 0:
        return
    for block in blocks_to_recompute(model):
        if block is not module and module in block.modules():
            raise PlanError(
                f"recompute={plan.recompute} does not go with staleness={plan.staleness} and "
                f"the table {name}, which is inside a block: backward would look its rows up again "
                "after others have changed them. Leave one of the two out, or look the rows up "
                "outside of the blocks."
            )


def _refuse_too_many_fragments(plan: Plan, model: nn.Module) -> None:
    count = len(averaged_parameters(model))
    if plan.fragments > max(1, count):
        raise PlanError(
            f"fragments={plan.fragments} does not go with a model that trains {count} parameters: "
            f"a fragment is one of them at least. Use fragments={count} or fewer."
        )


def _takes_a_gradient(plan: Plan) -> PlanError:
    if plan.pipeline > 1:
        key, way_out = f"pipeline={plan.pipeline}", "Use data, tensor or zero."
    else:
        key = f"tensor={plan.tensor}"
        way_out = "Put it under torch.enable_grad(), with inputs that require a gradient."
    return PlanError(
        f"The model takes a gradient in its own forward (torch.autograd.grad, for a penalty say), "
        f"and {key} first runs the forward without gradients, to see where it can be cut. {way_out}"
    )
