"""Distillation: a student of a tenth of the size learns from a teacher's answers.

    python examples/distillation.py

What it shows: `shoal.slim.distill` makes a Run of a Run. The teacher is part of the data, so the
student's checkpoints hold the student alone, and it trains under every plan. `cache` keeps the
teacher's answers: it is asked once about each sample, whatever follows. The same student without a
teacher is trained beside it.
"""

import sys
from pathlib import Path

import shoal

sys.path.insert(0, str(Path(__file__).parents[1]))

from recipes.digits import small

STUDENT = {"channels": 2, "steps": 300}


def main() -> None:
    teacher = shoal.train(small, "data=2")
    alone = shoal.train(small, "data=2", settings=STUDENT)

    def student(channels: int) -> shoal.Run:
        return shoal.slim.distill(
            small(channels),
            teacher.run_dir,
            teacher_recipe=small,
            temperature=3.0,
            alpha=0.8,
            cache=f"{teacher.run_dir}/answers",
        )

    taught = shoal.train(student, "data=2", settings=STUDENT)
    for name, outcome in (("teacher", teacher), ("student", alone), ("student, taught", taught)):
        count = sum(weights.numel() for weights in outcome.model().parameters())
        loss, accuracy = outcome.metrics["loss"], outcome.metrics["accuracy"]
        # The loss of all three is on the labels: what the teacher says does not count in it.
        print(f"{name:15}  {count:6,} weights  loss {loss:.3f}  accuracy {accuracy:.1%}")


if __name__ == "__main__":
    main()
