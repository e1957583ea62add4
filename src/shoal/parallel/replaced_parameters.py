"""Parameters that parts have replaced: they raise an error when they are used.

`tensor` and `zero=3` put parts of parameters, or shards, into a model's modules. A model that
reaches a parameter in another way than through its module (a variable of Keras, an attribute of
another object, a closure) would use the old one, which is not trained. So the old ones raise
when they are computed with. Cost: nothing for other tensors.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from shoal.errors import PlanError
from shoal.parallel.pipeline.calls import leaves, torch_call
from shoal.plans.plan import Plan


class ReplacedParameter(nn.Parameter):
    """Has a shape and a dtype, but may not be computed with."""

    why = ""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if torch_call(func).is_event:
            items = leaves((args, kwargs), [])
            raise PlanError(
                next((x.why for x in items if isinstance(x, ReplacedParameter)), cls.why)
            )
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def retire_replaced(model: nn.Module, before: Mapping[str, nn.Parameter], plan: Plan) -> None:
    """Let the parameters of `before` that the model has others for raise from now on."""
    now = dict(model.named_parameters())
    key = f"tensor={plan.tensor}" if plan.tensor > 1 else f"zero={plan.zero}"
    for name, parameter in before.items():
        if now[name] is parameter or type(parameter) is not nn.Parameter:
            continue
        parameter.__class__ = ReplacedParameter
        parameter.why = (  # type: ignore[attr-defined]
            f"The model uses its parameter {name} in another way than through its module: a layer "
            f"of Keras, an attribute of another object or a closure holds it. {key} puts a part of "
            "it into the module, and what is held elsewhere is not trained. Use data, zero=1, "
            "zero=2 or pipeline, or reach it through the module."
        )
