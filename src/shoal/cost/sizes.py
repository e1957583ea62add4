"""The least that a plan must hold, from the sizes of a model alone: what is surely too large.

A model is made without its weights, in a fork that ends with it, so a recipe that keeps the model
it has made is not disturbed, and one that does not fit takes no memory. Activations, messages and
what a rank cannot cut are left out: a run holds more, never less. For a real estimate there must be
a profile (`profiler.py`).

Cost: a fork and the making of the modules, some milliseconds for each hundred of them.
"""

import msgspec
import torch
from torch import nn

from shoal.cost.model_facts import optimizer_state_of
from shoal.parallel.striping import tables_of, weights_of
from shoal.plans.plan import Plan
from shoal.system.processes import result_of_fork
from shoal.training.run import Run


class ModelSizes(msgspec.Struct, frozen=True):
    """Bytes of a whole model: its parameters, their gradients, the optimizer's state of them."""

    parameters: int
    gradients: int
    optimizer: int


def sizes_of(run: Run, model: nn.Module) -> ModelSizes:
    """Without tables, whose rows may take memory only as they are touched."""
    tables = weights_of(tables_of(model).values())
    parameters = {name: p for name, p in model.named_parameters() if p not in tables}
    trained = [p for p in parameters.values() if p.requires_grad]
    state = optimizer_state_of(run.make_optimizer(model), model, tables)
    held = ((parameters[name].shape, kept) for name, kept in state.items() if name in parameters)
    kept = [one.num_bytes(shape) for shape, kept in held for one in kept]
    return ModelSizes(
        sum(p.nbytes for p in parameters.values()), sum(p.nbytes for p in trained), sum(kept)
    )


def sizes_without_memory(run: Run) -> ModelSizes | None:
    """None of a model that cannot be made without weights."""

    def make() -> ModelSizes:
        with torch.device("meta"):
            model = run.make_model()
        return sizes_of(run, model)

    content = result_of_fork(lambda: msgspec.msgpack.encode(make()))
    return msgspec.msgpack.decode(content, type=ModelSizes) if content else None


def rank_sizes(sizes: ModelSizes, plan: Plan) -> ModelSizes:
    """What a rank of a resolved plan holds of each at the least."""
    cut, shards = plan.tensor * plan.pipeline, plan.num_within
    once = plan.num_replicas if plan.shares else 1  # all hold one copy, on one host at the best
    optimizer = sizes.optimizer // cut // (shards if plan.zero else once)
    if plan.offload != "none" or (plan.sync == "server" and plan.local_steps == 1):
        optimizer = 0
    return ModelSizes(
        parameters=sizes.parameters // cut // once // (shards if plan.zero == 3 else 1),
        gradients=sizes.gradients // cut // (shards if plan.zero >= 2 and once == 1 else 1),
        optimizer=optimizer,
    )


def least_host_bytes(sizes: ModelSizes, plan: Plan) -> int:
    """What all ranks hold on one host, with the model that they are forked from."""
    own = rank_sizes(sizes, plan)
    served = sizes.parameters + (sizes.optimizer if plan.local_steps == 1 else 0)
    servers = served if plan.num_servers else 0
    return (
        sizes.parameters
        + plan.num_ranks * (own.parameters + own.gradients + own.optimizer)
        + servers
    )
