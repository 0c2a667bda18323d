"""Every setting, its meaning beside it. A recipe is a YAML file with these names; unknown names are refused."""

import difflib
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar, get_origin

from nmla.errors import UsageError

# The losses that each model family can be trained with.
LOSSES = {
    "autoregressive": ("cross_entropy",),
    "fixed_length": ("cross_entropy", "oaxe", "axe", "bag"),
    "ctc": ("ctc", "ngram", "combined", "ddrs"),
    "sctc": ("sctc", "bipartite", "ngram", "combined", "ddrs"),
}
MANY_REFERENCES = ("ngram", "combined", "bag", "ddrs")  # losses that can take several references of a source together
GLANCING = ("cross_entropy", "ctc", "sctc")  # losses that a model can glance under
COMPUTE_TYPES = ("float32", "int8")  # of decoding by CTranslate2
PRECISIONS = {"float32": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed", "float64": "64-true"}
HIGHEST_PENALTY = 10_000  # of the blank: far beyond what any model would notice
WIDEST_BEAM = 10_000  # memory is bounded
SEEDS = 1 << 63  # there are so many
TEXTS = ("output", "data.corpus")  # settings that hold any text


@dataclass(frozen=True)
class DataConfig:
    corpus: str  # directory written by `nmla prepare`


@dataclass(frozen=True)
class ModelConfig:
    family: str = "ctc"  # "ctc", "sctc" (which drops blanks but keeps repeats), "fixed_length" or "autoregressive"
    d_model: int = 512  # width of embeddings and layers
    heads: int = 8  # attention heads; must divide d_model
    feed_forward: int = 2048  # inner width of the feed-forward blocks
    encoder_layers: int = 6
    decoder_layers: int = 6
    upsample: int = 3  # output positions per source token, in the families "ctc" and "sctc"
    norm: str = "pre"  # "pre": normalise what enters attention and feed-forward; "post": what leaves them
    positions: str = "sinusoidal"  # or "learned"
    max_positions: int = 1024  # of learned positions; longer pairs are not trained on, longer input is split

    def __post_init__(self) -> None:
        _check_positive("model", self)
        _check_one_of("model.family", self.family, LOSSES)
        _check_one_of("model.norm", self.norm, ("pre", "post"))
        _check_one_of("model.positions", self.positions, ("sinusoidal", "learned"))
        _check(
            self.max_positions >= 2 * self.upsample,
            "model.max_positions must be 2 x upsample or more",
            self.max_positions,
        )
        _check(self.d_model % 2 == 0, "model.d_model must be even, for sine and cosine positions", self.d_model)
        _check(self.d_model % self.heads == 0, f"model.heads must divide d_model {self.d_model}", self.heads)


@dataclass(frozen=True)
class TrainConfig:
    """One stage of training: its loss, its length, its optimizer, which always starts fresh."""

    steps: int  # optimizer steps, at most
    loss: str = "ctc"  # what is minimised; each model family has its own, see LOSSES
    ngram: int = 2  # n of the losses "ngram" (non-monotonic n-gram matching, NMLA) and "bag"
    combine: list[float] = field(default_factory=lambda: [0.5, 0.5])  # weights of n = 1, 2, ... in the loss "combined"
    combine_mean: str = "arithmetic"  # or "geometric"
    exact_total: bool = True  # of an output's n-grams; false: as in the paper, wrong for outputs of few tokens
    recall_weight: float = 1.0  # of recall beside precision in the loss "ngram": above 1, outputs get longer
    ctc_weight: float = 0.0  # of the model's CTC loss per token, added to the loss "ngram"
    label_smoothing: float = 0.0  # of "cross_entropy"
    glance_from: float = 0.0  # glancing: the share of the errors that is revealed, at the first step (0: no glancing)
    glance_to: float = 0.0  # and at the last
    references: str = "each"  # "each" reference of a source is an example, or all "together", where the loss can
    learning_rate: float = 5e-4  # the highest, reached after warm-up
    warmup_steps: int = 1000  # linear up to learning_rate
    schedule: str = "inverse_sqrt"  # afterwards: "inverse_sqrt" of the step, "linear" or "cosine" to 0, or "constant"
    max_tokens: int = 8192  # output positions in a batch, padding included
    accumulate: int = 1  # batches per optimizer step and device
    clip_norm: float = 1.0  # largest norm of the gradient
    weight_decay: float = 0.01
    dropout: float = 0.1
    validate_every: int = 1000  # steps between translating the validation set
    patience: int = 0  # stop after so many validations without a better BLEU (0: go on to the last step)
    checkpoint_every: int = 1000  # steps between checkpoints, from which a stopped run goes on
    keep_last: int = 5  # checkpoints that are kept, and at least two
    keep_best: int = 1  # models that are kept in best/, by validation BLEU
    final: str = "last"  # what model/ holds: the "last" weights, the "best", or the "average" of the kept checkpoints

    def __post_init__(self) -> None:
        _check_one_of("loss", self.loss, sorted({loss for losses in LOSSES.values() for loss in losses}))
        _check_one_of("combine_mean", self.combine_mean, ("arithmetic", "geometric"))
        _check_one_of("references", self.references, ("each", "together"))
        _check_one_of("schedule", self.schedule, ("inverse_sqrt", "linear", "cosine", "constant"))
        _check_one_of("final", self.final, ("last", "best", "average"))
        for name in ("dropout", "label_smoothing"):
            _check(0 <= getattr(self, name) < 1, f"{name} must be in [0, 1)", getattr(self, name))
        for name in ("glance_from", "glance_to"):
            _check(0 <= getattr(self, name) <= 1, f"{name} must be in [0, 1]", getattr(self, name))
        for name in ("weight_decay", "patience", "ctc_weight"):
            _check(0 <= getattr(self, name) < math.inf, f"{name} must be at least 0 and finite", getattr(self, name))
        fits = all(weight >= 0 for weight in self.combine) and abs(sum(self.combine) - 1) < 1e-6
        _check(fits, "combine must hold weights of at least 0 that sum to 1", self.combine)
        if self.loss == "ddrs":
            _check(self.references == "together", "references of the loss ddrs must be together", self.references)
        if self.references == "together":
            _check(self.loss in MANY_REFERENCES, f"references: together needs a loss of {MANY_REFERENCES}", self.loss)
        if self.glance_from or self.glance_to:
            _check(self.loss in GLANCING, f"glancing needs a loss of {GLANCING}", self.loss)
        if self.recall_weight != 1:
            _check(self.loss == "ngram", "recall_weight needs the loss ngram", self.loss)
        if self.ctc_weight:
            _check(self.loss == "ngram", "ctc_weight needs the loss ngram", self.loss)
            _check(self.references == "each", "ctc_weight needs references: each", self.references)
        if self.label_smoothing:
            _check(self.loss == "cross_entropy", "label_smoothing needs the loss cross_entropy", self.loss)
        zero = (
            "dropout",
            "label_smoothing",
            "ctc_weight",
            "glance_from",
            "glance_to",
            "weight_decay",
            "patience",
            "exact_total",
        )
        _check_positive("a stage", self, but=zero)
        for name in ("learning_rate", "recall_weight"):
            _check(getattr(self, name) < math.inf, f"{name} must be a finite number", getattr(self, name))


@dataclass(frozen=True)
class Decoding:
    """How a model's output becomes text. The names are CTranslate2's where it has one."""

    beam_size: int = 1  # translations that a search keeps, or lengths that a fixed-length model tries; 1: no search
    num_hypotheses: int = 1  # translations that are told, best first; at most beam_size
    top_k: int = 20  # tokens that may follow at each position, in the search of a CTC model
    alpha: float = 0.0  # weight of the language model in that search
    beta: float = 0.0  # weight of the logarithm of the length in it
    blank_penalty: float = 0.0  # taken from a CTC model's blank before the softmax: above 0, outputs get longer
    return_scores: bool = False  # also scores, tokens with confidence and source, entropy and blanks
    fast: bool = False  # batches as they come: a translation's last bits may then depend on the others
    max_batch_size: int = 2048  # of these batches
    batch_type: str = "tokens"  # what that counts: output positions, or "examples"

    def __post_init__(self) -> None:
        for name in ("beam_size", "num_hypotheses", "top_k", "max_batch_size"):
            value = getattr(self, name)
            _check(isinstance(value, int) and value >= 1, f"{name} must be a whole number of at least 1", value)
        _check(self.beam_size <= WIDEST_BEAM, f"beam_size must be at most {WIDEST_BEAM}", self.beam_size)
        _check_one_of("batch_type", self.batch_type, ("tokens", "examples"))
        _check(
            self.num_hypotheses <= self.beam_size,
            f"num_hypotheses must be at most beam_size {self.beam_size}",
            self.num_hypotheses,
        )
        _check(0 <= self.alpha < math.inf, "alpha must be at least 0", self.alpha)
        _check(math.isfinite(self.beta), "beta must be a finite number", self.beta)
        fits = abs(self.blank_penalty) <= HIGHEST_PENALTY
        _check(fits, f"blank_penalty must be from -{HIGHEST_PENALTY} to {HIGHEST_PENALTY}", self.blank_penalty)


@dataclass(frozen=True)
class MachineConfig:
    """Where a training runs. Only precision changes what it computes, and devices x nodes, by which a step grows."""

    accelerator: str = "auto"  # "cpu", "cuda", ...
    devices: int = 1  # processes on this machine; under torchrun or SLURM theirs count
    nodes: int = 1  # machines
    precision: str = "float32"  # "bf16" and "fp16": mixed, with losses in float32; "float64"
    compile: bool = False  # torch.compile: worth it on GPUs
    tensorboard: bool = False  # also log for TensorBoard, which `pip install nmla[tensorboard]` brings

    def __post_init__(self) -> None:
        _check_one_of("machine.precision", self.precision, PRECISIONS)
        _check_positive("machine", self, but=("compile", "tensorboard"))


@dataclass(frozen=True)
class TeacherConfig:
    """The autoregressive models whose translations are trained on in place of the corpus's own targets."""

    train: TrainConfig
    model: ModelConfig = field(default_factory=lambda: ModelConfig(family="autoregressive"))
    seeds: list[int] = field(default_factory=lambda: [1])  # one teacher each: several give several references
    beam_size: int = 5  # of their translations
    compute_type: str = "float32"  # or "int8": faster, and a little less exact

    def __post_init__(self) -> None:
        _check_one_of("teacher.model.family", self.model.family, ("autoregressive",))
        # The default is another loss: it is here when a recipe without a teacher gets overrides for one.
        own = "teacher.train.loss, which a recipe with a teacher sets,"
        _check_one_of(own, self.train.loss, LOSSES["autoregressive"])
        _check_one_of("teacher.compute_type", self.compute_type, COMPUTE_TYPES)
        fits = 1 <= self.beam_size <= WIDEST_BEAM
        _check(fits, f"teacher.beam_size must be from 1 to {WIDEST_BEAM}", self.beam_size)
        distinct = (
            self.seeds and len({*self.seeds}) == len(self.seeds) and all(0 <= seed < SEEDS for seed in self.seeds)
        )
        _check(bool(distinct), f"teacher.seeds must be different numbers from 0 to {SEEDS - 1}", self.seeds)


@dataclass(frozen=True)
class Recipe:
    """All that one training needs, so that one file can reproduce one result."""

    data: DataConfig
    train: TrainConfig  # first stage, from random weights
    output: str  # directory for the models, logs and checkpoints
    finetune: TrainConfig | None = None  # second stage, from the weights of the first
    teacher: TeacherConfig | None = None  # trained before, and its translations taken as targets
    model: ModelConfig = field(default_factory=ModelConfig)
    machine: MachineConfig = field(default_factory=MachineConfig)
    seed: int = 1

    def __post_init__(self) -> None:
        _check(bool(self.output), "output must name a directory", self.output)
        _check(0 <= self.seed < SEEDS, f"seed must be from 0 to {SEEDS - 1}", self.seed)
        for name, stage in (("train", self.train), ("finetune", self.finetune)):
            if stage is not None:
                _check_one_of(f"{name}.loss of a {self.model.family} model", stage.loss, LOSSES[self.model.family])
                may_glance = self.model.family != "autoregressive" or not (stage.glance_from or stage.glance_to)
                _check(may_glance, f"{name}.glance_from of an autoregressive model must be 0", stage.glance_from)


def load_recipe(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a YAML recipe and apply `key=value` overrides such as ``train.steps=500``."""
    return parse_recipe(read_settings(path, "a recipe"), overrides, name=str(path))


def parse_recipe(text: str, overrides: Sequence[str] = (), name: str = "recipe") -> Recipe:
    """A recipe from YAML text; errors call it `name`."""
    return parse_settings(Recipe, text, overrides, name)


def read_settings(path: Path, what: str) -> str:
    if not path.exists() or path.is_dir():
        raise UsageError(f"{path}: {what} must be a YAML file, but there is none here")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise UsageError(f"{path}: {what} must be UTF-8 text, but is not") from None


Schema = TypeVar("Schema")


def parse_settings(schema: type[Schema], text: str, overrides: Sequence[str], name: str) -> Schema:
    """The settings of a dataclass from YAML text; errors call them `name`."""
    import yaml  # heavy, like omegaconf: only who reads a recipe pays for it
    from omegaconf import OmegaConf
    from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

    try:
        if not isinstance(yaml.safe_load(text), dict | None):
            raise UsageError(f"{name}: must be a mapping of settings, but is {text.strip()!r}")
        given = OmegaConf.create(text)
        for override in overrides:
            key, equals, value = override.partition("=")
            if not equals:
                raise UsageError(f"an override must be key=value, but is {override!r}")
            # A text is taken as it is typed: a directory called 007 is not the number 7.
            OmegaConf.update(given, key, value if key in TEXTS else yaml.safe_load(value), force_add=True)
        _refuse_unknown(schema, OmegaConf.to_container(given), name)
        settings = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(schema), given))
    except MissingMandatoryValue as error:
        raise UsageError(f"{name}: {error.full_key} must be given, but is not") from None
    except TypeError as error:  # such as a section in place of a list
        raise UsageError(f"{name}: {str(error).splitlines()[0]}") from None
    except OmegaConfBaseException as error:
        key = f"{error.full_key}: " if getattr(error, "full_key", None) else ""
        raise UsageError(f"{name}: {key}{str(error).splitlines()[0]}") from None
    except yaml.YAMLError as error:
        raise UsageError(f"{name}: must be YAML, but: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise UsageError(f"{name}: must be YAML of some few levels, but is nested without end") from None
    assert isinstance(settings, schema)
    return settings


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
        if get_origin(known[key]) is list and not isinstance(value, list):
            raise UsageError(f"{name}: {prefix}{key} must be a list such as [1, 2], but is {value!r}")
        section = next((t for t in _members(known[key]) if is_dataclass(t)), None)
        if section and value is not None:
            many = origin if (origin := get_origin(known[key])) in (list, dict) else None
            if not isinstance(value, many or dict):
                must = f"a {many.__name__} of sections" if many else "a section with settings of its own"
                raise UsageError(f"{name}: {prefix}{key} must be {must}, but is {value!r}")
            if many is None:
                _refuse_unknown(section, value, name, f"{prefix}{key}.")
            for place, one in enumerate(value) if many is list else value.items() if many is dict else ():
                if not isinstance(one, dict):
                    raise UsageError(f"{name}: {prefix}{key}.{place} must be a section with settings, but is {one!r}")
                _refuse_unknown(section, one, name, f"{prefix}{key}.{place}.")


def _members(annotation: Any) -> tuple[Any, ...]:
    return getattr(annotation, "__args__", (annotation,))


def _check(holds: bool, must: str, found: object) -> None:
    if not holds:
        raise UsageError(f"{must}, but is {found!r}")


def _check_one_of(name: str, value: str, allowed: Iterable[str]) -> None:
    _check(value in allowed, f"{name} must be one of {', '.join(allowed)}", value)


def _check_positive(name: str, config: Any, but: tuple[str, ...] = ()) -> None:
    assert is_dataclass(config)
    for f in fields(config):
        value = getattr(config, f.name)
        if f.name not in but and isinstance(value, int | float):
            _check(value > 0, f"{f.name} of {name} must be above 0", value)
