"""Every setting, its meaning beside it. A recipe is a YAML file with these names; unknown names are refused."""

import difflib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any

from nmla.errors import UsageError

LOSSES = ("ctc", "ngram")
TEXTS = ("output", "data.corpus")  # settings that hold any text


@dataclass(frozen=True)
class DataConfig:
    corpus: str  # directory written by `nmla prepare`


@dataclass(frozen=True)
class ModelConfig:
    d_model: int = 512  # width of embeddings and layers
    heads: int = 8  # attention heads; must divide d_model
    feed_forward: int = 2048  # inner width of the feed-forward blocks
    encoder_layers: int = 6
    decoder_layers: int = 6
    upsample: int = 3  # output positions per source token

    def __post_init__(self) -> None:
        _check_positive("model", self)
        _check(self.d_model % 2 == 0, "model.d_model must be even, for sine and cosine positions", self.d_model)
        _check(self.d_model % self.heads == 0, f"model.heads must divide d_model {self.d_model}", self.heads)


@dataclass(frozen=True)
class TrainConfig:
    """One stage of training: its loss, its length, its optimizer, which always starts fresh."""

    steps: int  # optimizer steps
    loss: str = "ctc"  # "ctc", or "ngram": non-monotonic n-gram matching (NMLA), for a model that CTC has trained
    ngram: int = 2  # n of the n-gram loss
    learning_rate: float = 5e-4  # the highest, reached after warm-up
    warmup_steps: int = 1000  # linear up to learning_rate, then down with the inverse square root of the step
    max_tokens: int = 8192  # output positions in a batch, padding included
    accumulate: int = 1  # batches per optimizer step
    clip_norm: float = 1.0  # largest norm of the gradient
    weight_decay: float = 0.01
    dropout: float = 0.1
    validate_every: int = 1000  # steps between translating the validation set
    checkpoint_every: int = 1000  # steps between checkpoints, from which a stopped run goes on

    def __post_init__(self) -> None:
        _check(self.loss in LOSSES, f"loss must be one of {', '.join(LOSSES)}", self.loss)
        _check(0 <= self.dropout < 1, "dropout must be in [0, 1)", self.dropout)
        _check(self.weight_decay >= 0, "weight_decay must be at least 0", self.weight_decay)
        _check_positive("a stage", self, but=("dropout", "weight_decay"))


@dataclass(frozen=True)
class Recipe:
    """All that one training needs, so that one file can reproduce one result."""

    data: DataConfig
    train: TrainConfig  # first stage, from random weights
    output: str  # directory for the models, logs and checkpoints
    finetune: TrainConfig | None = None  # second stage, from the weights of the first
    model: ModelConfig = field(default_factory=ModelConfig)
    seed: int = 1

    def __post_init__(self) -> None:
        _check(self.seed >= 0, "seed must be at least 0", self.seed)


def load_recipe(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a YAML recipe and apply `key=value` overrides such as ``train.steps=500``."""
    if not path.exists() or path.is_dir():
        raise UsageError(f"{path}: a recipe must be a YAML file, but there is none here")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise UsageError(f"{path}: a recipe must be UTF-8 text, but is not") from None
    return parse_recipe(text, overrides, name=str(path))


def parse_recipe(text: str, overrides: Sequence[str] = (), name: str = "recipe") -> Recipe:
    """A recipe from YAML text; errors call it `name`."""
    import yaml  # heavy, like omegaconf: only who reads a recipe pays for it
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        if not isinstance(yaml.safe_load(text), dict | None):
            raise UsageError(f"{name}: a recipe must be a mapping of settings, but is {text.strip()!r}")
        given = OmegaConf.create(text)
        for override in overrides:
            key, equals, value = override.partition("=")
            if not equals:
                raise UsageError(f"an override must be key=value, but is {override!r}")
            # A text is taken as it is typed: a directory called 007 is not the number 7.
            OmegaConf.update(given, key, value if key in TEXTS else yaml.safe_load(value), force_add=True)
        _refuse_unknown(Recipe, OmegaConf.to_container(given), name)
        recipe = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Recipe), given))
    except OmegaConfBaseException as error:
        key = f"{error.full_key}: " if getattr(error, "full_key", None) else ""
        raise UsageError(f"{name}: {key}{str(error).splitlines()[0]}") from None
    except yaml.YAMLError as error:
        raise UsageError(f"{name}: must be YAML, but: {' '.join(str(error).split())}") from None
    assert isinstance(recipe, Recipe)
    return recipe


def recipe_yaml(recipe: Recipe) -> str:
    """The recipe as YAML that `load_recipe` reads back to an equal recipe."""
    import yaml

    return str(yaml.safe_dump(asdict(recipe), sort_keys=False))


def _refuse_unknown(schema: Any, given: Any, name: str, prefix: str = "") -> None:
    """Name a setting that does not exist, with the nearest that does; omegaconf would only say that it is unknown."""
    known = {f.name: f.type for f in fields(schema)}
    for key, value in (given or {}).items():
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1, cutoff=0.5)
            hint = f"did you mean {prefix}{near[0]}?" if near else f"the settings here are {', '.join(known)}"
            raise UsageError(f"{name}: there is no setting {prefix}{key}; {hint}")
        section = next((t for t in (DataConfig, ModelConfig, TrainConfig) if t in _members(known[key])), None)
        if section and value is not None:
            if not isinstance(value, dict):
                raise UsageError(f"{name}: {prefix}{key} must be a section with settings of its own, but is {value!r}")
            _refuse_unknown(section, value, name, f"{prefix}{key}.")


def _members(annotation: Any) -> tuple[Any, ...]:
    return getattr(annotation, "__args__", (annotation,))


def _check(holds: bool, must: str, found: object) -> None:
    if not holds:
        raise UsageError(f"{must}, but is {found!r}")


def _check_positive(name: str, config: Any, but: tuple[str, ...] = ()) -> None:
    assert is_dataclass(config)
    for f in fields(config):
        value = getattr(config, f.name)
        if f.name not in but and isinstance(value, int | float):
            _check(value > 0, f"{f.name} of {name} must be above 0", value)
