"""A whole recipe: its teachers first, if it has any, then what they teach, then the model that learns it."""

from dataclasses import replace
from pathlib import Path

from lightning_fabric import Fabric

from nmla.config import DataConfig, Recipe
from nmla.data.workers import cores
from nmla.distillation.distill import distill
from nmla.errors import UsageError
from nmla.progress import say
from nmla.training.loop import train
from nmla.training.machine import processes, start_fabric
from nmla.training.run import refuse_other_weights


def train_with_teachers(recipe: Recipe, fabric: Fabric | None = None) -> Path:
    """Run all that a recipe asks for, or what is left of it, and return the directory of the final model.

    Below the output there are teacher-SEED/ for each teacher, corpus/ with their translations, and the stages of the
    model itself.
    """
    fabric = fabric or start_fabric(recipe.machine)
    teacher = recipe.teacher
    if teacher is None:
        return train(recipe, fabric)
    output = Path(recipe.output)
    if (output / "corpus").exists():
        for seed in teacher.seeds:
            refuse_other_weights(output / f"teacher-{seed}" / "train", teacher.train, output / "corpus")
    models = []
    for seed in teacher.seeds:
        own = replace(
            recipe,
            teacher=None,
            finetune=None,
            model=teacher.model,
            train=teacher.train,
            seed=seed,
            output=str(output / f"teacher-{seed}"),
        )
        if fabric.is_global_zero:
            say(f"{own.output}: a teacher")
        models.append(train(own, fabric))
    try:
        # Every process of the training joins in, so none has to wait long for another.
        counts = distill(
            corpus=Path(recipe.data.corpus),
            teachers=models,
            output=output / "corpus",
            beam_size=teacher.beam_size,
            compute_type=teacher.compute_type,
            threads=max(cores() // processes(recipe.machine)[0], 1),
            show=fabric.is_global_zero,
        )
    except UsageError as error:
        if (output / "corpus").exists():
            raise UsageError(
                f"{output / 'corpus'}: was made by other teachers or in another way; remove it to make it anew"
            ) from error
        raise
    if fabric.is_global_zero:
        say(f"{output / 'corpus'}: targets by teachers {counts['train_taught']}, of {counts['train_pairs']}")
    return train(replace(recipe, teacher=None, data=DataConfig(str(output / "corpus"))), fabric)
