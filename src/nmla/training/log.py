"""What a training writes down: JSON lines always, TensorBoard if asked."""

import json
import math
import time
from pathlib import Path
from typing import Any

import torch
from lightning_fabric import Fabric

from nmla.errors import UsageError
from nmla.files import write_text


class Log:
    """log.jsonl, one record a line; when a run goes on, what came after its checkpoint is dropped and written again."""

    def __init__(self, output: Path, step: int, tensorboard: bool, enabled: bool) -> None:
        self._file = None
        self._board: Any = None
        if tensorboard:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:
                raise UsageError("machine.tensorboard needs the extra: pip install 'nmla[tensorboard]'") from None
        if not enabled:
            return
        path = output / "log.jsonl"
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        kept = [line for line in text.split("\n") if _step(line) <= step]
        write_text(path, "".join(f"{line}\n" for line in kept))
        self._file = path.open("a", encoding="utf-8")
        if tensorboard:
            self._board = SummaryWriter(output / "tensorboard", purge_step=step + 1)

    def write(self, event: str, step: int, seconds: float, **values: float) -> None:
        if self._file is None:
            return
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}  # JSON has no NaN
        self._file.write(json.dumps({"event": event, "step": step, "seconds": round(seconds, 3), **finite}) + "\n")
        self._file.flush()
        if self._board is not None:
            for name, value in values.items():
                self._board.add_scalar(f"{event}/{name}", value, step)

    def __enter__(self) -> "Log":
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()
        if self._board is not None:
            self._board.close()


def _step(line: str) -> float:
    """The step of a record; infinite where a kill cut the line."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf


class Meter:
    """The mean loss and the speed since it was last read; only time spent on steps counts."""

    def __init__(self) -> None:
        self._losses: list[float] = []
        self._words = 0
        self._seconds = 0.0
        self._since = time.perf_counter()

    def add(self, loss: float, words: int) -> None:
        self._losses.append(loss)
        self._words += words
        now = time.perf_counter()
        self._seconds += now - self._since
        self._since = now

    def pause(self) -> None:
        """Leave out what was done since the last step."""
        self._since = time.perf_counter()

    def read(self, fabric: Fabric) -> dict[str, float]:
        """Over all devices; words are tokens of the target."""
        dtype = torch.float32 if fabric.device.type == "mps" else torch.float64  # which has no float64
        mean = torch.tensor(sum(self._losses) / len(self._losses), dtype=dtype, device=fabric.device)
        total: Any = fabric.all_reduce(mean, reduce_op="sum")
        rate = self._words / max(self._seconds, 1e-9)
        self._losses, self._words, self._seconds = [], 0, 0.0
        return {"loss": float(total), "words_per_second": round(rate, 1)}
