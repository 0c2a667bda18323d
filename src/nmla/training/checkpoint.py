"""Checkpoints: all that a stopped run needs to go on as if it had never stopped, safe from a kill while written."""

import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

import safetensors.torch
import torch
from torch import nn

from nmla.files import new_directory, write_text


@dataclass(frozen=True)
class Progress:
    """Where a run stands: optimizer steps done, the next batch, and the time it took."""

    step: int = 0
    epoch: int = 0
    batch: int = 0
    seconds: float = 0.0


def save_checkpoint(directory: Path, model: nn.Module, optimizer: torch.optim.Optimizer, progress: Progress) -> None:
    """Write a checkpoint under its step, then remove the one before the last."""
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
    for old in _checkpoints(directory)[:-2]:
        shutil.rmtree(old)


def load_checkpoint(directory: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> Progress:
    """Bring model, optimizer and random numbers to the newest checkpoint, if there is one; say where the run stands."""
    checkpoints = _checkpoints(directory)
    if not checkpoints:
        return Progress()
    newest = checkpoints[-1]
    model.load_state_dict(safetensors.torch.load_file(newest / "model.safetensors"))
    state: dict[int, dict[str, torch.Tensor]] = {}
    for key, value in safetensors.torch.load_file(newest / "optimizer.safetensors").items():
        index, name = key.split(".")
        state.setdefault(int(index), {})[name] = value
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
    torch.set_rng_state(safetensors.torch.load_file(newest / "random.safetensors")["torch"])
    return Progress(**json.loads((newest / "progress.json").read_text(encoding="utf-8")))


def _checkpoints(directory: Path) -> list[Path]:
    """Complete checkpoints, oldest first: an incomplete one never gets a name of digits alone."""
    return sorted(path for path in directory.glob("*") if path.name.isdigit())
