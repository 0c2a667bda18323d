"""Checkpoints: all that a stopped run needs to go on as if it had never stopped, safe from a kill while written."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from nmla.errors import DataError
from nmla.files import new_directory, remove_directory, verify_manifest, write_manifest, write_text
from nmla.models.pretrained import CARD, WEIGHTS
from nmla.progress import say
from nmla.training.feed import Place

OPTIMIZER, PROGRESS = "optimizer.safetensors", "progress.json"


@dataclass(frozen=True)
class Progress:
    """Where a run stands. Random numbers have no state: each batch draws its own from its place."""

    step: int = 0  # optimizer steps done
    place: Place = field(default_factory=Place)  # the next batch
    seconds: float = 0.0
    scores: tuple[tuple[int, float], ...] = ()  # step and BLEU of every validation so far
    scale: dict[str, float] = field(default_factory=dict)  # of the loss, in fp16

    @classmethod
    def load(cls, path: Path) -> "Progress":
        values = json.loads(path.read_text(encoding="utf-8"))
        scores = tuple((step, score) for step, score in values.pop("scores"))
        return cls(place=Place(**values.pop("place")), scores=scores, **values)


def save_checkpoint(
    directory: Path, model: nn.Module, optimizer: torch.optim.Optimizer, progress: Progress, keep: int, every: int
) -> None:
    """Write a checkpoint under its step; those before it stay, should this one be damaged.

    Of those that come every so many steps the last `keep` are kept: one that a signal made pushes none of them out.
    """
    optimizer_state = {
        f"{index}.{name}": value
        for index, values in optimizer.state_dict()["state"].items()
        for name, value in values.items()
    }
    with new_directory(directory / f"{progress.step:09d}") as aside:
        safetensors.torch.save_file(model.state_dict(), aside / WEIGHTS)
        safetensors.torch.save_file(optimizer_state, aside / OPTIMIZER)
        write_text(aside / PROGRESS, json.dumps(asdict(progress)))
        write_manifest(aside, (WEIGHTS, OPTIMIZER, PROGRESS))
    kept = {*numbered(directory)[-2:], *regular(directory, progress.step, keep, every)}
    for old in set(numbered(directory)) - kept:
        remove_directory(old)


def newest_sound(directory: Path) -> Path | None:
    """The newest checkpoint that is as it was written, if there is any."""
    damaged = []
    for path in reversed(numbered(directory)):
        try:
            verify_manifest(path)
            Progress.load(path / PROGRESS)
        except (OSError, ValueError, TypeError, KeyError) as error:
            say(f"{path}: the checkpoint is damaged ({error}); going on from the one before it")
            damaged.append(path.name)
            continue
        return path
    if damaged:
        raise DataError(f"{directory}: one checkpoint must be sound, but none is; remove the run to begin anew")
    return None


def load_checkpoint(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> Progress:
    """Bring model and optimizer to a checkpoint; returns where the run stood. They must be where they will be used:
    the optimizer's state takes its type and its device from the weights."""
    weights, optimizer_tensors = (safetensors.torch.load_file(path / name) for name in (WEIGHTS, OPTIMIZER))
    model.load_state_dict(weights)
    state: dict[int, dict[str, Tensor]] = {}
    for key, value in optimizer_tensors.items():
        index, name = key.split(".")
        state.setdefault(int(index), {})[name] = value
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
    return Progress.load(path / PROGRESS)


def average(directories: Sequence[Path]) -> dict[str, Tensor]:
    """The mean of the weights in several model or checkpoint directories, taken in double precision."""
    total: dict[str, Tensor] = {}
    types: dict[str, torch.dtype] = {}
    for directory in directories:
        try:
            verify_manifest(directory, but=CARD)
            weights = safetensors.torch.load_file(directory / WEIGHTS)
        except (SafetensorError, OSError, ValueError, KeyError) as error:
            raise DataError(f"{directory}: must be a sound model or checkpoint, but: {error}") from None
        shapes = {name: value.shape for name, value in weights.items()}
        if total and shapes != {name: value.shape for name, value in total.items()}:
            raise DataError(f"{directory}: must hold weights of the same names and sizes as the others, but does not")
        types = {name: value.dtype for name, value in weights.items()}
        total = {name: value.double() + total.get(name, 0) for name, value in weights.items()}
    return {name: (value / len(directories)).to(types[name]) for name, value in total.items()}


def numbered(directory: Path) -> list[Path]:
    """Complete checkpoints or models, oldest first: an incomplete one never gets a name of digits alone."""
    return sorted(path for path in directory.glob("*") if path.name.isdigit())


def regular(directory: Path, last: int, keep: int, every: int) -> list[Path]:
    """The last `keep` checkpoints of those that come every so many steps, and of the `last` step."""
    return [path for path in numbered(directory) if int(path.name) % every == 0 or int(path.name) == last][-keep:]


def keep_only(directory: Path, steps: Iterable[int]) -> None:
    """Remove the models of all other steps."""
    kept = {f"{step:09d}" for step in steps}
    for path in numbered(directory):
        if path.name not in kept:
            remove_directory(path)
