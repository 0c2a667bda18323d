"""A run's directory: what it was begun with, so that nothing else is ever continued in its place."""

import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

from nmla.config import Recipe, load_recipe, recipe_yaml
from nmla.errors import UsageError
from nmla.files import sha256, write_text
from nmla.models.pretrained import WEIGHTS
from nmla.training.checkpoint import numbered

# Settings that may change while a run goes on: they do not change what a step computes.
FREE = {"output", "train.steps", "train.patience", "train.keep_last", "train.keep_best", "train.final"}
FREE |= {f"machine.{name}" for name in ("accelerator", "devices", "nodes", "compile", "tensorboard")}


def begin_run(output: Path, recipe: Recipe, start: Path | None) -> None:
    """Write down what the run is begun with, or refuse to go on with one that other settings or weights began."""
    began_from = sha256(start / WEIGHTS) if start else "random weights"
    _refuse_another_run(output, recipe, began_from)
    for directory in (output, output / "checkpoints", output / "best"):  # what a kill in the middle of a write left
        for path in directory.glob(".*"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    write_text(output / "recipe.yaml", recipe_yaml(recipe))
    write_text(output / "start.txt", f"{began_from}\n")


def _refuse_another_run(output: Path, recipe: Recipe, began_from: str) -> None:
    """Nothing is refused where there is no checkpoint: nothing is gone on with."""
    if not numbered(output / "checkpoints"):
        return
    old, new = (_flat(asdict(r)) for r in (load_recipe(output / "recipe.yaml"), recipe))
    stage = recipe.train
    falls = stage.schedule in ("linear", "cosine") or stage.glance_from != stage.glance_to  # towards the last step
    free = FREE - {"train.steps"} if falls else FREE
    changed = [
        f"{key} {old.get(key)} -> {new.get(key)}"
        for key in old | new
        if old.get(key) != new.get(key) and key not in free
    ]
    if changed:
        raise UsageError(
            f"{output}: a run must keep its settings, but {', '.join(changed)}; "
            "choose another output, or remove this one"
        )
    if (output / "start.txt").read_text(encoding="utf-8").strip() != began_from:
        raise UsageError(f"{output}: began from other weights than there are now; remove it to train this stage anew")


def _flat(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat
