"""The learning rate over time."""

import math

from nmla.config import TrainConfig


def learning_rate(step: int, stage: TrainConfig) -> float:
    """Linear warm-up to `learning_rate` at step `warmup_steps`, then as `schedule` says; steps count from 1."""
    if step <= stage.warmup_steps:
        return stage.learning_rate * step / stage.warmup_steps
    rest = (stage.steps - step) / max(stage.steps - stage.warmup_steps, 1)  # from 1 to 0
    share = {
        "inverse_sqrt": math.sqrt(stage.warmup_steps / step),
        "linear": rest,
        "cosine": (1 - math.cos(math.pi * rest)) / 2,
        "constant": 1.0,
    }
    return stage.learning_rate * share[stage.schedule]
