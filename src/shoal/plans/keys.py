"""The keys of a plan's text: each with its values, its meaning and its parser.

`KEYS` is the one place that describes a key: parsing, the help of `--plan` and the checks of a
`Plan` made in Python all use it. Rules between keys are in `rules.py`.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

PlanValue = int | str | None

HALF_CODECS = ("fp16", "bf16")
ROUNDING_CODECS = ("fp16", "bf16", "int8", "int4")  # codecs that round each element
LEAST_SHARE = 1 / 1024  # of `topk`, which sends one of so many elements at least


class PlanKey(NamedTuple):
    """One key. `read` returns the value in its canonical form, or raises ValueError."""

    values: str
    meaning: str
    read: Callable[[str], PlanValue]


def _count(least: int = 1, most: int | None = None) -> Callable[[str], int]:
    def read(text: str) -> int:
        count = int(text) if text.isascii() and text.isdecimal() else -1
        if count < least or (most is not None and count > most):
            raise ValueError(text)
        return count

    return read


def _choice(*names: str) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text not in names:
            raise ValueError(text)
        return text

    return read


def _data(text: str) -> int | None:
    return None if text == "auto" else _count()(text)


def _staleness(text: str) -> int | str:
    return text if text == "any" else _count(0)(text)


def _combine(text: str) -> str:
    name, _, share = text.partition(":")
    if name == "trimmed" and 0 < float(share) < 0.5:
        return f"trimmed:{float(share)}"
    return _choice("mean", "median")(text)


def _rates(text: str) -> str:
    if text == "even":
        return text
    rates = [float(rate) for rate in text.split(":")]
    if not all(0 < rate < math.inf for rate in rates):
        raise ValueError(text)
    return ":".join(str(rate) for rate in rates)


def _deadline(text: str) -> str:
    if text == "none":
        return text
    seconds = float(text)
    if not 0 < seconds < math.inf:
        raise ValueError(text)
    return f"{seconds:g}"


def _outer(text: str) -> str:
    """`nesterov` is printed with its rate and momentum, so that equal plans have equal text."""
    name, *numbers = text.split(":")
    if name == "average" and not numbers:
        return text
    if name != "nesterov" or len(numbers) > 2:
        raise ValueError(text)
    defaults = ["0.7", "0.9"]
    rate, momentum = (float(number) for number in numbers + defaults[len(numbers) :])
    if not (0 < rate < math.inf and 0 <= momentum < 1):
        raise ValueError(text)
    return f"nesterov:{rate}:{momentum}"


def _precision(text: str) -> str:
    """One of the names, or some in turn: `bf16:fp32@900`. fp32 at the beginning is not printed."""
    known = _choice("fp32", "bf16")
    first, *rest = text.split(":")
    if "@" in first:
        first, rest = "fp32", [first, *rest]
    if not rest:
        return _choice("fp32", "bf16", "fp16")(text)
    names, steps = [known(first)], [0]
    for word in rest:
        name, _, step = word.partition("@")
        names.append(known(name))
        steps.append(_count()(step))
        if steps[-1] <= steps[-2] or names[-1] == names[-2]:
            raise ValueError(text)
    words = [f"{name}@{step}" for name, step in zip(names[1:], steps[1:], strict=True)]
    return ":".join(words if first == "fp32" else [first, *words])


def _codec(text: str) -> str:
    name, _, number = text.partition(":")
    if name == "topk":
        share = float(number.removesuffix("+int8"))
        if LEAST_SHARE <= share <= 1:
            return f"topk:{share}{'+int8' * number.endswith('+int8')}"
    if name == "powersgd":
        return f"powersgd:{_count()(number)}"
    return _choice("none", *ROUNDING_CODECS, "onebit")(text)


# In the order in which a plan prints them, which is the order of the fields of `Plan`.
KEYS: dict[str, PlanKey] = {
    "data": PlanKey(
        "auto, or 1 or more",
        "number of replicas that share the batch (auto: the largest that fits)",
        _data,
    ),
    "tensor": PlanKey("1 or more", "number of ranks that share each layer", _count()),
    "pipeline": PlanKey("1 or more", "number of ranks that share the depth of the model", _count()),
    "zero": PlanKey(
        "0, 1, 2, 3",
        "level of what is sharded over data: nothing, optimizer state, + gradients, + parameters",
        _count(0, 3),
    ),
    "schedule": PlanKey(
        "1f1b, gpipe, interleaved, zero-bubble, zbv",
        "order of work in the pipeline",
        _choice("1f1b", "gpipe", "interleaved", "zero-bubble", "zbv"),
    ),
    "microbatches": PlanKey(
        "1 or more", "number of pieces in the pipeline together, else 2 x pipeline", _count()
    ),
    "stages": PlanKey(
        "1 or more",
        "number of stages of each pipeline rank, else what the schedule needs",
        _count(),
    ),
    "sync": PlanKey(
        "allreduce, server", "way in which replicas agree", _choice("allreduce", "server")
    ),
    "servers": PlanKey("1 to 256", "number of parameter servers", _count(1, 256)),
    "hosts": PlanKey(
        "1 or more",
        "number of hosts that ranks sit on, each of which adds up its gradients in its own server",
        _count(),
    ),
    "staleness": PlanKey(
        "0 or more, or any",
        "number of batches a worker may be ahead of those that all have done (0: lockstep)",
        _staleness,
    ),
    "combine": PlanKey(
        "mean, median, trimmed:F with 0 < F < 0.5",
        "way in which servers make one gradient of those of the replicas",
        _combine,
    ),
    "damping": PlanKey(
        "none, inverse",
        "way in which updates count less that are made of old parameters",
        _choice("none", "inverse"),
    ),
    "rates": PlanKey(
        "even, or a number above 0 for each replica, as in 1:1:0.5",
        "factors of the replicas' learning rates",
        _rates,
    ),
    "copies": PlanKey("1 or more", "number of servers that hold each shard", _count()),
    "deadline": PlanKey(
        "none, or seconds above 0",
        "time after the first replica's push when servers close a round of local steps without "
        "those who have not come",
        _deadline,
    ),
    "local_steps": PlanKey("1 or more", "number of steps between two agreements", _count()),
    "outer": PlanKey(
        "average, nesterov[:rate[:momentum]] with rate > 0 and 0 <= momentum < 1",
        "way in which local steps are brought together",
        _outer,
    ),
    "fragments": PlanKey(
        "1 or more",
        "number of parts that local steps are brought together in, each while others compute",
        _count(),
    ),
    "sums": PlanKey(
        "exact, ring",
        "order of summation: one tree over the pieces (the same bits on any number of ranks), "
        "or whatever is fastest",
        _choice("exact", "ring"),
    ),
    "codec": PlanKey(
        "none, fp16, bf16, int8, int4, onebit, topk:F or topk:F+int8 with 1/1024 <= F <= 1, "
        "powersgd:R with R of 1 or more",
        "packing of gradients for the wire",
        _codec,
    ),
    "precision": PlanKey(
        "fp32, bf16, fp16; or fp32 and bf16 in turn: bf16@100 (after 100 steps), bf16:fp32@900",
        "arithmetic of forward and backward",
        _precision,
    ),
    "accumulate": PlanKey(
        "1 or more", "number of pieces (pipeline rounds) each replica takes per step", _count()
    ),
    "pieces": PlanKey(
        "1 or more",
        "number of equal parts of the global batch, else data x accumulate x microbatches",
        _count(),
    ),
    "recompute": PlanKey(
        "none, blocks", "part of the forward pass that is done again", _choice("none", "blocks")
    ),
    "offload": PlanKey(
        "none, optimizer", "state that is kept off the device", _choice("none", "optimizer")
    ),
    "memory": PlanKey(
        "shared, apart",
        "parameters and optimizer state of the ranks of one host: one copy for all, or one each",
        _choice("shared", "apart"),
    ),
}
