"""The learning rate over time."""

import math

from nmla.config import TrainConfig


def learning_rate(step: int, stage: TrainConfig) -> float:
    """Linear warm-up to `learning_rate` at step `warmup_steps`, then the inverse square root; steps count from 1."""
    return stage.learning_rate * min(step / stage.warmup_steps, math.sqrt(stage.warmup_steps / step))
