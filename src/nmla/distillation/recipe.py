"""A whole recipe: its teachers first, if it has any, then what they teach, then the model that learns it."""

from dataclasses import replace
from pathlib import Path

from lightning_fabric import Fabric

from nmla.config import DataConfig, Recipe
from nmla.data.workers import cores
from nmla.distillation.distill import distill
from nmla.errors import UsageError
from nmla.training.loop import train
from nmla.training.machine import processes, start_fabric


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
        models.append(train(own, fabric))
    try:
        # Every process of the training joins in, so none has to wait long for another.
        distill(
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
    return train(replace(recipe, teacher=None, data=DataConfig(str(output / "corpus"))), fabric)
