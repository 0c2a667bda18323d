"""A model on disk: a directory with all that it takes to use it. Nothing in it is ever unpickled.

config.json        family, sizes, vocabulary size
model.safetensors  weights
tokenizer.model    sentencepiece
README.md          the model card: what it is and how to use it
manifest.json      SHA-256 of the first three
"""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import safetensors.torch
from safetensors import SafetensorError

from nmla import __version__
from nmla.config import ModelConfig
from nmla.data.corpus import TOKENIZER
from nmla.errors import DataError, UsageError
from nmla.files import MANIFEST, verify_manifest, write_manifest, write_text
from nmla.models.autoregressive import AutoregressiveTransformer
from nmla.models.ctc import CTCTransformer
from nmla.models.fixed_length import FixedLengthTransformer
from nmla.models.transformer import Transformer
from nmla.text.tokenizer import Tokenizer

CONFIG, WEIGHTS, CARD = "config.json", "model.safetensors", "README.md"
DECODING, LANGUAGE_MODEL = "decoding.json", "language.lm"  # beside them, if its decoding was tuned
FILES = (CONFIG, WEIGHTS, TOKENIZER, CARD, MANIFEST)
FAMILIES: dict[str, type[Transformer]] = {
    "autoregressive": AutoregressiveTransformer,
    "fixed_length": FixedLengthTransformer,
    "ctc": CTCTransformer,
    "sctc": CTCTransformer,
}
IN_WORDS = {
    "autoregressive": "an autoregressive Transformer, which writes one word after the other",
    "fixed_length": "a non-autoregressive Transformer, which decides on a length and writes all words at once",
    "ctc": "a non-autoregressive Transformer, which writes all words at once, CTC's blanks and repeats between them",
    "sctc": "a non-autoregressive Transformer, which writes all words at once, with blanks between them",
}


def build_model(config: ModelConfig, vocab_size: int) -> Transformer:
    return FAMILIES[config.family](config, vocab_size)


def save_model(
    model: Transformer, tokenizer: Tokenizer, directory: Path, about: Mapping[str, str] | None = None
) -> None:
    """Write the files of a model into `directory`. `about` goes into the card: what it was trained on, and how."""
    config = asdict(model.config)
    settings = {"model_type": config.pop("family"), "vocab_size": model.embedding.num_embeddings, **config}
    write_text(directory / CONFIG, json.dumps({**settings, "nmla": __version__}, indent=2) + "\n")
    try:
        safetensors.torch.save_file(model.state_dict(), directory / WEIGHTS)
    except SafetensorError as error:
        raise OSError(str(error)) from None  # such as a full disk
    tokenizer.save(directory / TOKENIZER)
    write_text(directory / CARD, model_card(model, about or {}))
    write_manifest(directory, (CONFIG, WEIGHTS, TOKENIZER))


def read_config(directory: Path) -> dict[str, Any]:
    """What a model directory says of its model."""
    if not (directory / CONFIG).is_file():
        raise UsageError(f"{directory}: must be a model directory, but holds no {CONFIG}")
    try:
        config: dict[str, Any] = json.loads((directory / CONFIG).read_text(encoding="utf-8"))
        missing = {"model_type", "vocab_size", "positions", "max_positions"} - set(config)
    except (ValueError, TypeError) as error:
        raise DataError(f"{directory / CONFIG}: must be a model's configuration, but: {error}") from None
    if missing:
        raise DataError(f"{directory / CONFIG}: must be a model's configuration, but has no {min(missing)}")
    return config


def load_model(directory: Path) -> tuple[Transformer, Tokenizer]:
    config = read_config(directory)
    try:
        verify_manifest(directory, but=CARD)
        config.pop("nmla", None)
        family, vocab_size = config.pop("model_type"), config.pop("vocab_size")
        model = build_model(ModelConfig(family=family, **config), vocab_size)
        weights = safetensors.torch.load_file(directory / WEIGHTS)
        model.to(weights["embedding.weight"].dtype).load_state_dict(weights)
    except (AttributeError, KeyError, TypeError, ValueError, OSError, RuntimeError, SafetensorError) as error:
        raise DataError(
            f"{directory}: the model is damaged or of another version: {' '.join(str(error).split())}"
        ) from None
    return model, Tokenizer.load(directory / TOKENIZER)


def model_card(model: Transformer, about: Mapping[str, str]) -> str:
    size = sum(parameter.numel() for parameter in model.parameters())
    config = model.config
    lines = [
        "---",
        "library_name: nmla",
        "pipeline_tag: translation",
        "---",
        "# A translation model",
        "",
        f"This is {IN_WORDS[config.family]}: {size:,} parameters, width {config.d_model}, "
        f"{config.encoder_layers} + {config.decoder_layers} layers, {model.embedding.num_embeddings:,} tokens.",
        "",
        "    import nmla",
        '    print(nmla.load("this directory").translate("a sentence"))',
        "",
        *(f"- {name}: {value}" for name, value in about.items()),
    ]
    return "\n".join(lines) + "\n"
