"""A tiny Llama, and LoRA on it, for tests of the command line."""

import shoal
from tests import zoo


def base() -> shoal.Run:
    return zoo.llama(layers=2)


def lora(begin_from: str = "", freeze: str = "") -> shoal.Run:
    if freeze:
        return shoal.slim.adapt(zoo.gpt(), freeze=freeze.split(","), layer_decay=0.5)
    return shoal.slim.adapt(
        base(), begin_from=begin_from or None, lora={"r": 4, "alpha": 8, "targets": ["q_proj"]}
    )
