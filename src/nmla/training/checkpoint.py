"""Checkpoints: all that a stopped run needs to go on as if it had never stopped, safe from a kill while written."""

import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import nn

from nmla.errors import UsageError
from nmla.files import new_directory, write_text
from nmla.progress import say


@dataclass(frozen=True)
class Progress:
    """Where a run stands: optimizer steps done, the next batch, and the time it took."""

    step: int = 0
    epoch: int = 0
    batch: int = 0
    seconds: float = 0.0


def save_checkpoint(directory: Path, model: nn.Module, optimizer: torch.optim.Optimizer, progress: Progress) -> None:
    """Write a checkpoint under its step; the one before it stays, should this one be damaged."""
    optimizer_state = {
        f"{index}.{name}": value
        for index, values in optimizer.state_dict()["state"].items()
        for name, value in values.items()
    }
    with new_directory(directory / f"{progress.step:09d}") as aside:
        safetensors.torch.save_file(model.state_dict(), aside / "model.safetensors")
        safetensors.torch.save_file(optimizer_state, aside / "optimizer.safetensors")
        safetensors.torch.save_file({"torch": torch.get_rng_state()}, aside / "random.safetensors")
        write_text(aside / "progress.json", json.dumps(asdict(progress)))
    for old in checkpoints(directory)[:-2]:
        shutil.rmtree(old)


def load_checkpoint(directory: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> Progress:
    """Bring model, optimizer and random numbers to the newest sound checkpoint, if there is one.

    Returns:
        Where the run stands.
    """
    for path in reversed(checkpoints(directory)):
        try:
            weights, optimizer_tensors, random = (
                safetensors.torch.load_file(path / f"{name}.safetensors") for name in ("model", "optimizer", "random")
            )
            progress = Progress(**json.loads((path / "progress.json").read_text(encoding="utf-8")))
        except (SafetensorError, OSError, ValueError, TypeError) as error:
            say(f"{path}: the checkpoint is damaged ({error}); going on from the one before it")
            continue
        try:
            model.load_state_dict(weights)
        except RuntimeError:
            raise UsageError(
                f"{path}: must fit the model, but was made with another vocabulary or size; choose another output"
            ) from None
        state: dict[int, dict[str, torch.Tensor]] = {}
        for key, value in optimizer_tensors.items():
            index, name = key.split(".")
            state.setdefault(int(index), {})[name] = value
        optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
        torch.set_rng_state(random["torch"])
        return progress
    return Progress()


def checkpoints(directory: Path) -> list[Path]:
    """Complete checkpoints, oldest first: an incomplete one never gets a name of digits alone."""
    return sorted(path for path in directory.glob("*") if path.name.isdigit())


def remove_incomplete(directory: Path) -> None:
    """Remove what a kill in the middle of a write left."""
    for path in directory.glob(".*"):
        shutil.rmtree(path)
