"""A run's directory: what it was begun with, so that nothing else is ever continued in its place."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from nmla.config import Recipe, TrainConfig, load_recipe, recipe_yaml
from nmla.data.corpus import content_hash
from nmla.errors import UsageError
from nmla.files import remove_leftovers, sha256, write_text
from nmla.models.pretrained import WEIGHTS
from nmla.training.checkpoint import numbered

START = "start.json"  # what a run was begun with
# Settings that may change while a run goes on: they do not change what a step computes.
FREE = {"output", "data.corpus", "train.steps", "train.patience", "train.keep_last", "train.keep_best", "train.final"}
FREE |= {"train.accumulate"}  # as long as accumulate x devices stays the same
FREE |= {f"machine.{name}" for name in ("accelerator", "devices", "nodes", "compile", "tensorboard")}


def begin_run(output: Path, recipe: Recipe, start: Path | None, devices: int) -> None:
    """Write down what the run is begun with, or refuse to go on with one that something else began."""
    began = {
        "weights": sha256(start / WEIGHTS) if start else "random",
        "corpus": content_hash(Path(recipe.data.corpus)),
        "batches a step": recipe.train.accumulate * devices,
    }
    if done := numbered(output / "checkpoints"):  # else there is nothing to go on with
        _refuse_other_settings(output, recipe)
        _refuse_another_start(output, began)
        if (steps := int(done[-1].name)) > recipe.train.steps:
            raise UsageError(
                f"{output}: steps must be at least {steps}, which it has done, but is {recipe.train.steps}"
            )
    for directory in (output, output / "checkpoints", output / "best"):
        remove_leftovers(directory)
    write_text(output / "recipe.yaml", recipe_yaml(recipe))
    write_text(output / START, json.dumps(began, indent=2) + "\n")


def refuse_other_weights(output: Path, stage: TrainConfig, after: Path) -> None:
    """A stage that went on would lose the weights that what came after it, already begun, did begin from."""
    if not (output / "recipe.yaml").exists():
        return
    before = load_recipe(output / "recipe.yaml").train
    names = ("steps", "patience", "final", *(["keep_last"] if stage.final == "average" else []))
    changed = [
        f"{name} {old} -> {new}" for name in names if (old := getattr(before, name)) != (new := getattr(stage, name))
    ]
    if changed:
        raise UsageError(
            f"{after}: began from what {output} made, which must keep its settings, but {', '.join(changed)}; "
            f"remove {after} to go on before it"
        )


def _refuse_other_settings(output: Path, recipe: Recipe) -> None:
    old, new = (_flat(asdict(r)) for r in (load_recipe(output / "recipe.yaml"), recipe))
    stage = recipe.train
    # What goes towards the last step depends on which that is.
    goes = stage.schedule in ("linear", "cosine") or stage.glance_from != stage.glance_to or stage.loss == "ddrs"
    free = FREE - {"train.steps"} if goes else FREE
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


def _refuse_another_start(output: Path, began: dict[str, Any]) -> None:
    before = json.loads((output / START).read_text(encoding="utf-8"))
    reasons = {
        "weights": "began from other weights than there are now",
        "corpus": "began with another corpus than there is now",
        "batches a step": (
            f"accumulate x devices must stay {before.get('batches a step')}, but is {began['batches a step']}"
        ),
    }
    for key, reason in reasons.items():
        if before.get(key) != began[key]:
            raise UsageError(f"{output}: {reason}; remove it to train this stage anew")


def _flat(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat
