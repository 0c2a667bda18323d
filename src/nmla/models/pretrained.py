"""A model on disk: a directory with config.json and model.safetensors. Nothing in it is ever unpickled."""

import json
from dataclasses import asdict
from pathlib import Path

import safetensors.torch
from safetensors import SafetensorError

from nmla.config import ModelConfig
from nmla.errors import DataError, UsageError
from nmla.files import write_text
from nmla.models.ctc import CTCTransformer

CONFIG, WEIGHTS = "config.json", "model.safetensors"


def save_model(model: CTCTransformer, directory: Path) -> None:
    config = {"model_type": "ctc", "vocab_size": model.embedding.num_embeddings, **asdict(model.config)}
    write_text(directory / CONFIG, json.dumps(config, indent=2) + "\n")
    safetensors.torch.save_file(model.state_dict(), directory / WEIGHTS)


def load_model(directory: Path) -> CTCTransformer:
    if not (directory / CONFIG).is_file():
        raise UsageError(f"{directory}: must be a model directory, but holds no {CONFIG}")
    try:
        config = json.loads((directory / CONFIG).read_text(encoding="utf-8"))
        if (kind := config.pop("model_type")) != "ctc":
            raise ValueError(f"model_type must be ctc, but is {kind}")
        model = CTCTransformer(vocab_size=config.pop("vocab_size"), config=ModelConfig(**config))
        model.load_state_dict(safetensors.torch.load_file(directory / WEIGHTS))
    except (AttributeError, KeyError, TypeError, ValueError, OSError, RuntimeError, SafetensorError) as error:
        raise DataError(
            f"{directory}: the model is damaged or of another version: {' '.join(str(error).split())}"
        ) from None
    return model
