"""The rules between the keys of a plan: keys without effect, and contradictions.

Pure, and without torch. A key that is written must have an effect, and a plan that contradicts
itself is refused with the rule and a way out. Rules that need the model belong to the module that
cuts it.
"""

import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, NamedTuple

from shoal.errors import PlanError
from shoal.plans.fit import refuse_pieces
from shoal.plans.keys import AUTO, HALF_CODECS

if TYPE_CHECKING:
    from shoal.plans.plan import Plan


class Requirement(NamedTuple):
    """When a key has an effect. `without` completes the sentence "... has no effect ..."."""

    met: Callable[["Plan"], bool]
    without: str
    way_out: str


# The fewest and most stages of a rank under each schedule; the first is the default.
STAGES_OF: dict[str, tuple[int, float]] = {
    "1f1b": (1, 1),
    "gpipe": (1, 1),
    "interleaved": (2, math.inf),
    "zero-bubble": (1, math.inf),
    "zbv": (2, 2),
}

_PIPELINE = Requirement(
    lambda plan: plan.pipeline > 1, "without a pipeline", "add pipeline=2 or more"
)
_SERVER = Requirement(lambda plan: plan.sync == "server", "without servers", "add sync=server")
_STALE = Requirement(
    lambda plan: plan.sync == "server" and plan.staleness != 0,
    "in lockstep: all replicas step together, on parameters of now",
    "add sync=server and staleness=1 or more",
)

# A key that is written, even with its default value, must have an effect.
_NEEDS = {
    "zero": Requirement(
        lambda plan: plan.zero == 0 or plan.data != 1,
        "with data=1: it shards over the data axis",
        "use data=2 or more",
    ),
    "schedule": _PIPELINE,
    "microbatches": _PIPELINE,
    "stages": _PIPELINE,
    "servers": _SERVER,
    "hosts": _SERVER,
    "staleness": Requirement(
        lambda plan: (
            plan.sync == "server" and (plan.staleness == 0 or 1 not in (plan.data, plan.replicas))
        ),
        "without servers and several replicas: there is no other replica to be ahead of",
        "add sync=server and data=2 or more",
    ),
    "combine": Requirement(
        lambda plan: plan.combine == "mean" or (plan.sync == "server" and plan.staleness == 0),
        "without servers in lockstep: no process sees the gradients of all replicas",
        "add sync=server, and leave staleness out",
    ),
    "damping": _STALE,
    "rates": _STALE,
    "copies": _SERVER,
    "replicas": Requirement(
        lambda plan: plan.is_loose,
        "in lockstep: all ranks are one replica, which makes each step together",
        "add local_steps=2 or more, or sync=server",
    ),
    "deadline": Requirement(
        lambda plan: (
            plan.deadline == "none"
            or (plan.sync == "server" and plan.local_steps > 1 and plan.data != 1)
        ),
        "without servers and local steps of several replicas: there are no rounds to close",
        "add sync=server, local_steps=2 and data=2 or more",
    ),
    "local_steps": Requirement(
        lambda plan: (
            plan.local_steps == 1
            or 1 not in (plan.data, plan.replicas)
            or plan.outer != "average"
            or plan.sync == "server"
        ),
        "with one replica: there is no other to average with",
        "use data=2 or more, and no replicas=1",
    ),
    "outer": Requirement(
        lambda plan: plan.local_steps > 1,
        "with local_steps=1: replicas agree on every step",
        "add local_steps=2 or more",
    ),
    "fragments": Requirement(
        lambda plan: (
            plan.fragments == 1 or (plan.local_steps > 1 and 1 not in (plan.data, plan.replicas))
        ),
        "without local steps of several replicas: nothing is sent that could be cut",
        "use local_steps=2 and data=2 or more",
    ),
    "sums": Requirement(
        lambda plan: plan.sums == "exact" or not plan.zero,
        "with zero: the owner of a shard sums it, in one order, at no extra cost",
        "leave zero out",
    ),
    "memory": Requirement(
        lambda plan: plan.may_share,
        "here: only ranks that each train the whole model and agree on every step share memory",
        "use data=2 or more, without tensor, pipeline, zero=3, sync, local_steps, codec or offload",
    ),
    "codec": Requirement(
        lambda plan: plan.codec == "none" or plan.data != 1 or plan.sync == "server",
        "with data=1: no gradient is sent",
        "use data=2 or more",
    ),
    "bucket": Requirement(
        lambda plan: (
            plan.data != 1 and plan.sync == "allreduce" and plan.local_steps == 1 and plan.zero < 3
        ),
        "where ranks send each other no buckets of gradients: with data=1, servers, local steps "
        "and zero=3",
        "use data=2 or more, with zero=2 at the most",
    ),
}


def refuse_without_effect(plan: "Plan", keys: Iterable[str]) -> None:
    for key in keys:
        need = _NEEDS.get(key)
        if need is not None and not need.met(plan):
            raise PlanError(
                f"{key}={getattr(plan, key)} has no effect {need.without}. "
                f"Leave {key} out, or {need.way_out}."
            )


def refuse_contradictions(plan: "Plan") -> None:
    _refuse_schedule(plan)
    _refuse_servers(plan)
    _refuse_replicas(plan)
    _refuse_local_steps(plan)
    _refuse_codec(plan)
    if plan.copies > plan.servers:
        raise PlanError(
            f"copies={plan.copies} does not fit on servers={plan.servers}. Each copy of a shard "
            f"lives on a server of its own. Use servers={plan.copies} or copies={plan.servers}."
        )
    if plan.zero == 3 and plan.schedule in ("zero-bubble", "zbv"):
        raise PlanError(
            f"schedule={plan.schedule} does not go with zero=3. It computes the gradients of "
            "weights after those of inputs, and FSDP2 has let go of the weights by then. "
            "Use zero=1 or zero=2, or schedule=1f1b or interleaved."
        )
    if plan.pipeline > 1 and "@" in plan.precision:
        raise PlanError(
            f"precision={plan.precision} does not go with pipeline={plan.pipeline}: what stages "
            "send each other has one type in all steps. Leave the steps out of precision, or use "
            "another plan."
        )
    if plan.pieces is not None:
        refuse_pieces(plan.counts, plan.pieces)
        _refuse_uneven_pieces(plan, plan.pieces)


def _refuse_servers(plan: "Plan") -> None:
    if plan.sync != "server":
        return
    if plan.offload != "none" or (plan.zero and plan.local_steps == 1):
        key, value = ("zero", plan.zero) if plan.zero else ("offload", plan.offload)
        raise PlanError(
            f"{key}={value} does not go with sync=server: optimizer state lives on the servers, "
            f"and no rank holds any to spare. Leave {key} out, or sync=server."
        )
    _refuse_served_meshes(plan)
    if plan.local_steps > 1 and plan.fragments > 1:
        raise PlanError(
            f"fragments={plan.fragments} does not go with sync=server: servers bring whole windows "
            "together. Leave one of them out."
        )
    if plan.local_steps > 1 and plan.combine != "mean":
        raise PlanError(
            f"combine={plan.combine} does not go with local_steps={plan.local_steps} yet: servers "
            "take the mean of the outer gradients. Leave one of them out."
        )
    _refuse_hosts(plan)
    _refuse_deadline(plan)
    if plan.sums != "exact":
        raise PlanError(
            f"sums={plan.sums} does not go with sync=server, whose servers add up the pieces in "
            "one order at no extra cost. Leave sums out."
        )
    count = plan.replicas or plan.data
    if count is not None and plan.rates != "even" and len(plan.rate_factors) != count:
        raise PlanError(
            f"rates={plan.rates} does not go with {'replicas' if plan.replicas else 'data'}="
            f"{count}. Each replica has a rate of its own. Give {count} of them, separated by "
            "colons, or leave rates out."
        )
    if plan.rates != "even" and all(float(rate) == 1 for rate in plan.rates.split(":")):
        raise PlanError(
            f"rates={plan.rates} has no effect: each replica's learning rate is multiplied with 1. "
            "Leave rates out, or give one that is not 1."
        )
    if plan.combine != "mean" and count is not None and count < 3:
        key = "replicas" if plan.replicas else "data"
        raise PlanError(
            f"combine={plan.combine} does not go with {key}={count}. Of fewer than three "
            f"replicas it is not known which one is wrong. Use {key}=3 or more, or leave combine "
            "out."
        )


def _refuse_served_meshes(plan: "Plan") -> None:
    """Refuse what servers cannot do for workers of several ranks."""
    cut = plan.tensor * plan.pipeline
    if cut == 1 and plan.replicas in (None, plan.data):
        return
    keys = {"tensor": plan.tensor > 1, "pipeline": plan.pipeline > 1, "replicas": True}
    key = next(key for key, is_set in keys.items() if is_set)
    about = f"{key}={getattr(plan, key)} does not go with"
    if plan.copies > 1:
        raise PlanError(
            f"copies={plan.copies} has no effect with {key}={getattr(plan, key)}: the ranks of a "
            "replica need one another, so a death takes all back to the newest checkpoint, "
            "and no server is replaced alone. Leave copies out, and give a save_every."
        )
    if plan.hosts > 1:
        raise PlanError(
            f"{about} hosts={plan.hosts} yet: a host's server adds up what single ranks push. "
            f"Leave hosts out: with replicas=R each replica adds up its own, and pushes once."
        )
    if plan.zero == 3:
        raise PlanError(
            "zero=3 does not go with sync=server: its ranks hold shards, and servers have whole "
            "parameters of a rank. Use zero=2, or leave sync=server out."
        )
    if plan.servers % cut:
        raise PlanError(
            f"servers={plan.servers} cannot be shared out to tensor={plan.tensor} x pipeline="
            f"{plan.pipeline}. Each part of a replica has servers of its own. "
            f"Use servers={cut * (plan.servers // cut + 1)}, or another multiple of {cut}."
        )
    if plan.local_steps == 1:
        _refuse_pushing_meshes(plan, about)


def _refuse_pushing_meshes(plan: "Plan", about: str) -> None:
    """Refuse replicas of several ranks that push in every step, where a sum would have no bits."""
    if plan.codec not in ("none", *HALF_CODECS) or (plan.codec != "none" and plan.tensor > 1):
        why = "servers of each part round in other blocks than those of the whole"
        if plan.tensor > 1:
            why = "its ranks add up in an order of their own, which rounding makes large"
        raise PlanError(
            f"{about} codec={plan.codec} and a push in every step yet: {why}, so shoal verify "
            "could not prove it. Leave codec out."
        )
    if plan.data is None:
        return
    rounds, rest = divmod(plan.pieces or plan.data, plan.data * plan.num_microbatches)
    if plan.staleness != 0 and plan.pieces is not None and rest:
        raise PlanError(
            f"pieces={plan.pieces} does not go with staleness={plan.staleness}: replicas of "
            "several ranks that step apart need equally many. Use a multiple of data x "
            "microbatches."
        )
    if plan.replicas in (None, plan.data):
        return
    within, num_replicas = plan.data // plan.replicas, plan.replicas
    if within & (within - 1):
        raise PlanError(
            f"data={plan.data} replicas={num_replicas} makes replicas of {within} ranks on the "
            "data axis, which cannot add up their gradients as one subtree of the batch's. Use "
            f"data={num_replicas * (1 << within.bit_length())}, or as many for each replica as "
            "1, 2, 4, 8, ..., or add local_steps=2 or more."
        )
    if plan.pieces is None:
        return
    if rest or rounds & (rounds - 1):
        good = plan.data * plan.num_microbatches
        raise PlanError(
            f"pieces={plan.pieces} do not make subtrees for replicas={num_replicas}: each of "
            f"data={plan.data} ranks needs 1, 2, 4, 8, ... rounds. Use pieces={good} or "
            f"{2 * good}, or an accumulate that is a power of two."
        )


def _refuse_deadline(plan: "Plan") -> None:
    if plan.deadline == "none":
        return
    if plan.staleness != 0:
        raise PlanError(
            f"deadline={plan.deadline} does not go with staleness={plan.staleness}, under which "
            "replicas do not wait and there are no rounds. Leave one of them out."
        )
    if plan.copies > 1:
        raise PlanError(
            f"deadline={plan.deadline} does not go with copies={plan.copies} yet: the members "
            "of a round are in a journal. Leave copies out; a journal repairs a server that dies."
        )


def _refuse_hosts(plan: "Plan") -> None:
    if plan.hosts == 1:
        return
    unlike = {"staleness": 0, "combine": "mean", "local_steps": 1, "codec": "none"}
    for key, value in unlike.items():
        if getattr(plan, key) != value:
            raise PlanError(
                f"{key}={getattr(plan, key)} does not go with hosts={plan.hosts} yet, whose "
                "servers add up the gradients of every step, in lockstep and as they are. "
                f"Leave {key} or hosts out."
            )
    if plan.data is not None and plan.data % plan.hosts:
        raise PlanError(
            f"data={plan.data} cannot be spread evenly over hosts={plan.hosts}. "
            f"Use data={2 * plan.hosts}, or another multiple of {plan.hosts} above that."
        )
    if plan.data == plan.hosts:
        raise PlanError(
            f"hosts={plan.hosts} has no effect with data={plan.data}. A host's server adds up the "
            f"gradients of several ranks. Use data={2 * plan.hosts}, or another multiple of "
            f"{plan.hosts} above that, or leave hosts out."
        )
    if plan.data is None or plan.pieces is None:
        return
    pieces, rest = divmod(plan.pieces, plan.hosts)
    if rest or pieces & (pieces - 1):
        raise PlanError(
            f"pieces={plan.pieces} do not make subtrees for hosts={plan.hosts}. Each host adds up "
            "its own pieces in the order of one process, so it needs 1, 2, 4, 8, ... of them. "
            f"Use pieces={plan.hosts * (1 << pieces.bit_length())}, or data, accumulate and hosts "
            "that are powers of two."
        )


def _refuse_schedule(plan: "Plan") -> None:
    """Refuse what PyTorch's schedules cannot run."""
    fewest, most = STAGES_OF[plan.schedule]
    if not fewest <= plan.num_stages <= most:
        allowed = str(fewest) if fewest == most else f"{fewest} or more"
        raise PlanError(
            f"stages={plan.stages} does not go with schedule={plan.schedule}, which needs "
            f"{allowed} on each rank. Leave stages out, or use another schedule."
        )
    if plan.pipeline == 1:
        return
    count = plan.num_microbatches
    if not fits_schedule(plan.schedule, plan.pipeline, count):
        near = max(1, count // plan.pipeline) * plan.pipeline
        rule = (
            "one for each rank at least"
            if plan.schedule == "1f1b"
            else f"a number that falls into {count // plan.pipeline} equal rounds"
        )
        raise PlanError(
            f"microbatches={count} does not go with schedule={plan.schedule} over "
            f"pipeline={plan.pipeline}, which needs {rule}. Use microbatches={near} or "
            f"{near + plan.pipeline}, or schedule=gpipe."
        )


def fits_schedule(schedule: str, num_ranks: int, num_microbatches: int) -> bool:
    """Whether a schedule can run so many microbatches in one round."""
    if schedule == "1f1b":
        return num_microbatches >= num_ranks
    if schedule in ("interleaved", "zero-bubble"):
        return num_microbatches % max(1, num_microbatches // num_ranks) == 0
    return True


def _refuse_local_steps(plan: "Plan") -> None:
    if plan.local_steps == 1:
        return
    parts = {"tensor": plan.tensor > 1, "zero": plan.zero == 3, "pipeline": plan.pipeline > 1}
    cut = next((key for key, is_cut in parts.items() if is_cut), "")
    if cut in ("tensor", "zero") and plan.codec != "none":
        raise PlanError(
            f"codec={plan.codec} does not go with {cut}={getattr(plan, cut)} and local_steps="
            f"{plan.local_steps} yet: a replica's ranks sum in an order of their own, which "
            "rounding to few bits makes large, so shoal verify could not prove it. Leave one of "
            "them out, or cut with pipeline."
        )
    if plan.fragments > plan.local_steps:
        raise PlanError(
            f"fragments={plan.fragments} does not go with local_steps={plan.local_steps}. Each "
            "fragment is sent after a step of its own, once in that many steps. "
            f"Use fragments={plan.local_steps} or fewer, or more local_steps."
        )


def _refuse_replicas(plan: "Plan") -> None:
    """Refuse replicas that do not divide the data axis, and ZeRO with nothing to shard over."""
    if plan.replicas and plan.data is not None and plan.data % plan.replicas:
        counts = [str(n) for n in range(1, plan.data + 1) if plan.data % n == 0]
        raise PlanError(
            f"replicas={plan.replicas} does not divide data={plan.data}. Each replica takes an "
            f"equal part of the data axis. Use replicas={' or '.join(counts)}."
        )
    if plan.zero and plan.is_loose and plan.replicas in (None, plan.data):
        way = f"local_steps={plan.local_steps}" if plan.local_steps > 1 else "sync=server"
        raise PlanError(
            f"zero={plan.zero} does not go with {way} and a replica for each of data="
            f"{plan.data or 'auto'}: they step apart, so none can hold a part of another's state. "
            "zero shards over data/replicas: add replicas=R below data, or leave zero out."
        )


def _refuse_codec(plan: "Plan") -> None:
    """Refuse a codec that could not do what it says."""
    name, _, number = plan.codec.partition(":")
    if plan.codec == "none":
        return
    if plan.sums == "ring":
        raise PlanError(
            f"sums=ring does not go with codec={plan.codec}. Rounding to a few bits makes whole "
            "steps of last bits, so results in another order could not be compared. Leave sums "
            "out: with a codec sums cost nothing more."
        )
    if name == "topk" and not number.endswith("+int8") and float(number) * 6 >= 4:
        raise PlanError(
            f"codec={plan.codec} has no effect: an element that is sent takes six bytes with its "
            "place, and four without. Use codec=topk:0.1 or less, or leave codec out."
        )
    if plan.combine != "mean":
        raise PlanError(
            f"codec={plan.codec} does not go with combine={plan.combine}: a replica that is "
            "not trusted could hide behind rounding. Leave one of them out."
        )
    if plan.codec == AUTO and (plan.sync == "server" or plan.local_steps > 1):
        way = "sync=server" if plan.sync == "server" else f"local_steps={plan.local_steps}"
        raise PlanError(
            f"codec=auto does not go with {way}: it compares steps in which ranks exchange their "
            f"gradients, and here they do not. Name a codec (codec=int8), or leave {way} out."
        )
    if plan.codec == AUTO or plan.packed_codec != "none":
        _refuse_packed_gradients(plan)
    elif name == "powersgd" or (name == "onebit" and plan.local_steps == 1):
        way = "local_steps" if plan.local_steps > 1 else "sync=server"
        value = plan.local_steps if plan.local_steps > 1 else ""
        why = "a bit has no zero for what no worker touched"
        if name == "powersgd":
            why = "it adds up factors that all replicas hold, and here each packs for itself"
        raise PlanError(
            f"codec={plan.codec} does not go with {way}{value and f'={value}'}: {why}. Use "
            f"codec=int8 or codec=topk:0.01, or leave {way} out."
        )
    elif plan.sync == "server" and plan.staleness != 0 and plan.local_steps == 1:
        _refuse_stale_residuals(plan)


def _refuse_stale_residuals(plan: "Plan") -> None:
    if plan.codec not in HALF_CODECS:
        raise PlanError(
            f"codec={plan.codec} does not go with staleness={plan.staleness} yet: what packing "
            "dropped would be of steps that others have not made. Use codec=fp16 or codec=bf16, "
            "add local_steps=2 or more, or leave staleness out."
        )


def _refuse_packed_gradients(plan: "Plan") -> None:
    """Where gradients that are packed on every step cannot be followed."""
    if plan.zero == 3 and plan.codec == AUTO:
        raise PlanError(
            "codec=auto does not go with zero=3 yet: a model that FSDP2 has cut is not rehearsed "
            "under several codecs. Name a codec, or use zero=1 or zero=2."
        )
    if plan.zero == 3 and plan.pipeline > 1:
        raise PlanError(
            f"codec={plan.codec} does not go with zero=3 in a pipeline yet, where each microbatch "
            "would be packed by itself. Use zero=1 or zero=2, or leave pipeline or codec out."
        )
    if plan.tensor > 1 and (plan.zero or plan.codec == AUTO or "powersgd" in plan.codec):
        key = f"zero={plan.zero}" if plan.zero else f"codec={plan.codec}"
        raise PlanError(
            f"{key} does not go with tensor={plan.tensor} and gradients that are packed yet: "
            "factors, and changes of shards, would be of parts of a tensor. "
            f"Leave {'zero' if plan.zero else 'tensor'} out, or use codec=int8 or codec=topk:0.01."
        )


def _refuse_uneven_pieces(plan: "Plan", pieces: int) -> None:
    """Refuse uneven pieces where every replica must do equally much."""
    if plan.data is None or pieces % (plan.data * plan.num_microbatches) == 0:
        return
    if plan.local_steps > 1:
        raise PlanError(
            f"pieces={pieces} is not a multiple of data={plan.data}. With "
            f"local_steps={plan.local_steps} each replica trains alone and counts the same in "
            "the average, so all need equally many pieces. Use a multiple of data."
        )
    if plan.zero == 3:
        raise PlanError(
            f"pieces={pieces} does not give each of data={plan.data} replicas equally many. With "
            "zero=3 they hold parts of one another's parameters, so all must run the model "
            "equally often. Use a multiple of data x microbatches."
        )
