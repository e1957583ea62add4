"""`distill`: a student with a teacher against the same student without one.

The digits recipe with 4 channels learns from itself with 16 channels, the character GPT with one
layer and a quarter of the width from one of two layers. Both arms have the same steps, samples and
seeds, three of them; the figure is the held-out loss without a teacher over that with one. Nothing
here is a time: a teacher costs its forward on every sample, or once with a cache.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import shoal
from bench import harness, quality
from bench.harness import Row

FLOOR = 1.0


def measure(quick: bool) -> Iterator[Row]:
    with quality.folder() as place:
        digits, gpt = quality.steps(quick, 210), quality.steps(quick, 300)
        tiny = {"layers": 1, "width": 16}
        yield _row(quick, place / "digits", quality.DIGITS, digits, {"channels": 4})
        yield _row(quick, place / "gpt", quality.CHARLM, {**quality.GPT, **gpt}, tiny)


def _row(
    quick: bool, place: Path, recipe: str, settings: Mapping[str, Any], student: Mapping[str, Any]
) -> Row:
    teacher = quality.trained(recipe, settings, place / "teacher")
    ratios, told = [], ""
    for seed in quality.SEEDS[: 1 if quick else 3]:
        own = {**settings, **student, "seed": seed}
        alone = shoal.train(
            recipe, "data=1", settings=own, run_dir=place / f"alone-{seed}", progress=False
        )
        taught = shoal.slim.train_student(
            recipe,
            teacher,
            out=place / f"out-{seed}",
            teacher_settings=settings,
            settings=own,
            lessons=shoal.slim.Lessons(temperature=2.0, alpha=0.7),
            training=shoal.slim.Training("data=1", place / f"taught-{seed}", progress=False),
        )
        ratios.append(alone.metrics["loss"] / taught.after.metrics["loss"])
        arms = {"alone": alone.metrics, "taught": taught.after.metrics}
        arms |= {"teacher": taught.before.metrics}
        told = ", ".join(f"{name} {found['loss']:.4f}" for name, found in arms.items())
    ratio = harness.spread(ratios)
    return Row(
        name=f"distill/{place.name}",
        value=ratio.median,
        low=ratio.low,
        high=ratio.high,
        num_pairs=ratio.num_pairs,
        floor=FLOOR,
        peer="the same student without a teacher",
        ceiling="the teacher",
        note=f"losses of the last seed: {told}",
    )


if __name__ == "__main__":
    harness.main(measure)
