"""Every recipe is legal, names itself rightly, and builds the model it says, of the size it should have."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from nmla.config import LOSSES, ModelConfig, Recipe, TrainConfig, load_recipe
from nmla.models.pretrained import build_model
from nmla.reproduce.table import load_table
from nmla.training import objective

ROOT = Path(__file__).parent.parent / "recipes"
TABLES = sorted((ROOT / "tables").glob("*.yaml"))
PATHS = sorted({*ROOT.rglob("*.yaml")} - {*TABLES})
PAPER = [path for path in PATHS if path.parent != ROOT]  # the systems of the paper
VOCABULARY = {"multi30k": 4000, "tatoeba": 4000, "wmt14-en-de": 32000, "wmt16-en-ro": 32000}

# Of each system: family, loss of the first stage, loss of the second and its n or weights.
SYSTEMS = {
    "transformer": ("autoregressive", "cross_entropy", None),
    "transformer-12-1": ("autoregressive", "cross_entropy", None),
    "vanilla-nat": ("fixed_length", "cross_entropy", None),
    "bag-of-ngrams": ("fixed_length", "cross_entropy", ("bag", 2)),
    "oaxe": ("fixed_length", "cross_entropy", ("oaxe",)),
    "sctc": ("sctc", "sctc", None),
    "sctc-bipartite": ("sctc", "sctc", ("bipartite",)),
    "sctc-1gram": ("sctc", "sctc", ("ngram", 1)),
    "sctc-2gram": ("sctc", "sctc", ("ngram", 2)),
    "sctc-3gram": ("sctc", "sctc", ("ngram", 3)),
    "sctc-4gram": ("sctc", "sctc", ("ngram", 4)),
    "sctc-combined": ("sctc", "sctc", ("combined", [0.5, 0.5])),
    "ctc": ("ctc", "ctc", None),
    "ctc-1gram": ("ctc", "ctc", ("ngram", 1)),
    "ctc-nmla": ("ctc", "ctc", ("ngram", 2)),
    "ddrs": ("ctc", "ddrs", None),
    "ddrs-nmla": ("ctc", "ddrs", ("ngram", 2)),
    "ddrs-big": ("ctc", "ddrs", None),
    "ddrs-big-nmla": ("ctc", "ddrs", ("ngram", 2)),
    "glat-ctc": ("ctc", "ctc", None),
    "glat-ctc-nmla": ("ctc", "ctc", ("ngram", 2)),
}
FOLDERS = {
    "wmt14-en-de": set(SYSTEMS),
    "wmt16-en-ro": {
        *("transformer", "transformer-12-1", "bag-of-ngrams", "oaxe", "ctc", "ctc-nmla", "ddrs", "ddrs-nmla")
    },
}
STEPS = {"wmt14-en-de": 300_000, "wmt16-en-ro": 150_000}
DROPOUT = {"wmt14-en-de": (0.2, 0.1), "wmt16-en-ro": (0.3, 0.3)}
BIG = ["model.d_model=1024", "model.heads=16", "model.feed_forward=4096"]

every_recipe = pytest.mark.parametrize("path", PATHS, ids=lambda path: str(path.relative_to(ROOT).with_suffix("")))
every_system = pytest.mark.parametrize("path", PAPER, ids=lambda path: str(path.relative_to(ROOT).with_suffix("")))


def vocabulary(path: Path) -> int:
    return VOCABULARY[path.parent.name if path.parent != ROOT else path.stem.split("-")[0]]


def parameters(model: ModelConfig, vocab_size: int) -> int:
    """How many a model has, from its sizes alone; the output matrix is the embedding's."""
    d, f = model.d_model, model.feed_forward
    norm = d + d  # scale and shift
    attention = 4 * (d * d + d)  # queries, keys, values, output, each with a bias
    feed_forward = (d * f + f) + (f * d + d)
    encoder = model.encoder_layers * (attention + feed_forward + 2 * norm)
    decoder = model.decoder_layers * (2 * attention + feed_forward + 3 * norm)
    last_norms = 2 * norm if model.norm == "pre" else 0
    positions = 2 * model.max_positions * d if model.positions == "learned" else 0
    lengths = d * 256 + 256 if model.family == "fixed_length" else 0
    return vocab_size * d + positions + encoder + decoder + last_norms + lengths


def built(model: ModelConfig, vocab_size: int) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in build_model(model, vocab_size).parameters())


def stages(recipe: Recipe) -> list[TrainConfig]:
    return [recipe.train, *([recipe.finetune] if recipe.finetune else [])]


def tokens_per_step(recipe: Recipe, stage: TrainConfig) -> float:
    positions = stage.max_tokens * stage.accumulate * recipe.machine.devices * recipe.machine.nodes
    return positions / (recipe.model.upsample if recipe.model.family in ("ctc", "sctc") else 1)


@every_recipe
def test_recipe_is_legal_and_names_itself(path):
    recipe = load_recipe(path)
    name = path.relative_to(ROOT).with_suffix("")
    text = path.read_text(encoding="utf-8")
    assert f"nmla train recipes/{name}.yaml" in text
    for stage in stages(recipe):
        assert stage.loss in LOSSES[recipe.model.family]
        assert stage.loss in objective.LOSSES


@every_recipe
def test_model_has_the_parameters_of_its_sizes(path):
    model = load_recipe(path).model
    assert built(model, vocabulary(path)) == parameters(model, vocabulary(path))


@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("positions", ["sinusoidal", "learned"])
@pytest.mark.parametrize("family", LOSSES)
def test_parameters_of_every_kind_of_model(family, positions, norm):
    sizes = {
        "d_model": 12,
        "heads": 3,
        "feed_forward": 7,
        "encoder_layers": 2,
        "decoder_layers": 3,
        "max_positions": 11,
    }
    model = ModelConfig(family=family, positions=positions, norm=norm, **sizes)
    assert built(model, 11) == parameters(model, 11)


def test_sizes_are_those_that_are_known():
    """A Transformer with a joint vocabulary of 32,000: base about 60 million, big about 209 million.

    "Attention is all you need", Table 3, tells 65 and 213 million, with a vocabulary of about 37,000.
    """
    base = load_recipe(ROOT / "wmt14-en-de" / "transformer.yaml").model
    big = load_recipe(ROOT / "wmt14-en-de" / "transformer.yaml", BIG).model
    assert built(base, 32000) == pytest.approx(60e6, rel=0.01)
    assert built(big, 32000) == pytest.approx(209e6, rel=0.01)
    assert built(base, 37000) == pytest.approx(65e6, rel=0.04)
    assert built(big, 37000) == pytest.approx(213e6, rel=0.01)


def test_there_is_a_recipe_for_each_system():
    folders = [folder for folder in ROOT.iterdir() if folder.is_dir() and folder.name != "tables"]
    assert {folder.name: {path.stem for path in folder.glob("*.yaml")} for folder in folders} == FOLDERS


@every_system
def test_system_is_what_its_name_says(path):
    recipe = load_recipe(path)
    family, first, second = SYSTEMS[path.stem]
    assert (recipe.model.family, recipe.train.loss) == (family, first)
    layers = (12, 1) if path.stem == "transformer-12-1" else (6, 6)
    assert (recipe.model.encoder_layers, recipe.model.decoder_layers) == layers
    if second is None:
        assert recipe.finetune is None
    else:
        of_loss = {"ngram": recipe.finetune.ngram, "bag": recipe.finetune.ngram, "combined": recipe.finetune.combine}
        assert (recipe.finetune.loss, *second[1:]) == (second[0], *([of_loss[second[0]]] if second[1:] else []))
    glances = (recipe.train.glance_from, recipe.train.glance_to)
    assert glances == ((0.5, 0.3) if path.stem.startswith("glat") else (0.0, 0.0))
    if path.stem.startswith("ddrs"):
        assert {stage.references for stage in stages(recipe)} == {"together"}
    assert recipe.model.d_model == (1024 if "big" in path.stem else 512)


@every_system
def test_training_is_the_papers(path):
    """ "Implementation Details": 64K and 256K tokens a step, and so on. Of the teacher's training it says nothing."""
    recipe = load_recipe(path)
    teacher = recipe.model.family == "autoregressive"
    assert tokens_per_step(recipe, recipe.train) == pytest.approx(32_000 if teacher else 64_000, rel=0.1)
    for stage in stages(recipe):
        assert (stage.final, stage.keep_last) == ("average", 5)
        assert stage.steps >= 5 * stage.checkpoint_every
    if teacher:
        return
    dropout = DROPOUT[path.parent.name]
    train = recipe.train
    assert (train.steps, train.learning_rate, train.warmup_steps) == (STEPS[path.parent.name], 5e-4, 10_000)
    assert (train.schedule, train.dropout) == ("inverse_sqrt", dropout[0])
    if tune := recipe.finetune:
        assert tokens_per_step(recipe, tune) == pytest.approx(256_000, rel=0.1)
        assert (tune.steps, tune.warmup_steps, tune.dropout) == (6000, 500, dropout[1])
        assert tune.learning_rate == (1e-4 if tune.loss == "bag" else 3e-4)


@pytest.mark.parametrize(
    ("tuned", "first"),
    [
        *((f"wmt14-en-de/sctc-{name}", "wmt14-en-de/sctc") for name in ("bipartite", "1gram", "4gram", "combined")),
        *((f"wmt14-en-de/{name}", "wmt14-en-de/vanilla-nat") for name in ("bag-of-ngrams", "oaxe")),
        *((f"wmt14-en-de/ctc-{name}", "wmt14-en-de/ctc") for name in ("1gram", "nmla")),
        ("wmt14-en-de/glat-ctc-nmla", "wmt14-en-de/glat-ctc"),
        ("wmt14-en-de/ddrs-nmla", "wmt14-en-de/ddrs"),
        ("wmt14-en-de/ddrs-big-nmla", "wmt14-en-de/ddrs-big"),
        ("wmt16-en-ro/ddrs-nmla", "wmt16-en-ro/ddrs"),
        ("wmt16-en-ro/ctc-nmla", "wmt16-en-ro/ctc"),
    ],
)
def test_fine_tuning_begins_where_the_plain_system_ends(tuned, first):
    """So that the first stage of one can be copied for the other."""
    tuned, first = (load_recipe(ROOT / f"{name}.yaml") for name in (tuned, first))
    assert replace(tuned, finetune=None, output=first.output) == first


def test_overrides_that_comments_tell_are_legal():
    path = ROOT / "wmt14-en-de" / "sctc-combined.yaml"
    text = path.read_text(encoding="utf-8")
    told = re.findall(r"'(finetune\.combine=[^']+)'", text)
    assert [load_recipe(path, [override]).finetune.combine for override in told] == [
        [0.25, 0.75],
        [0.75, 0.25],
        [0.25] * 4,
    ]
    others = [["finetune.combine_mean=geometric"], ["model.family=ctc", "train.loss=ctc"]]
    for overrides in others:
        assert all(override in text for override in overrides)
        load_recipe(path, [told[-1], *overrides])


@every_system
def test_readme_tells_the_size_and_the_score(path):
    """A row of its tables: recipe, the paper's row, millions of parameters, the paper's BLEU, as in the recipe."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    rows = [line for line in readme.splitlines() if f"({path.relative_to(ROOT)})" in line]
    assert len(rows) == 1
    millions = parameters(load_recipe(path).model, vocabulary(path)) / 1e6
    assert f"| {millions:.1f} M |" in rows[0]
    for bleu in re.findall(r"\d\d\.\d\d", rows[0].split("|")[4]):
        assert bleu in path.read_text(encoding="utf-8")


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.stem)
def test_table_is_legal_and_names_itself(path):
    table, recipes = load_table(path)
    assert f"nmla reproduce recipes/tables/{path.name}" in path.read_text(encoding="utf-8")
    assert [*recipes] == [row.name for row in table.rows]
    for row in table.rows:
        assert [*table.ways_of(row, recipes[row.name])]


def test_teacher_that_is_a_row_is_the_one_that_others_learn_from():
    _, recipes = load_table(ROOT / "tables" / "multi30k-distilled.yaml")
    alone = recipes["Transformer, the teacher"]
    teachers = [recipe.teacher for recipe in recipes.values() if recipe.teacher is not None]
    assert teachers
    assert all((of.model, of.train) == (alone.model, alone.train) for of in teachers)
