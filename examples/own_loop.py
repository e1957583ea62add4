"""A training loop of one's own, around a recipe.

Run it with any launcher:

    shoal run --ranks 2 examples/own_loop.py
    torchrun --standalone --nproc-per-node 2 examples/own_loop.py
"""

import sys
from pathlib import Path

import shoal

sys.path.insert(0, str(Path(__file__).parents[1]))

from recipes import digits

run = digits.small()
with shoal.trainer(run, plan="data=auto") as trainer:
    for info in trainer:
        if info.step % 20 == 0:
            scores = trainer.evaluate(run.evaluate)  # every rank must call it
            if trainer.mesh.rank == 0:
                print(f"step {info.step}  loss {info.loss:.4f}  accuracy {scores['accuracy']:.3f}")
