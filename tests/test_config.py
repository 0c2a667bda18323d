from pathlib import Path

import pytest

from nmla.config import load_recipe, parse_recipe, recipe_yaml
from nmla.errors import UsageError

RECIPES = Path(__file__).parent.parent / "recipes"
RECIPE = """
data: {corpus: corpora/mine}
output: runs/mine
train: {steps: 100, learning_rate: 1}
finetune: {steps: 50, loss: ngram}
"""


def test_recipe_has_types_defaults_and_overrides():
    recipe = parse_recipe(RECIPE, ["train.steps=7", "model.d_model=64", "seed=3"])
    assert (recipe.train.steps, recipe.train.loss, recipe.train.learning_rate) == (7, "ctc", 1.0)
    assert (recipe.finetune.loss, recipe.finetune.ngram) == ("ngram", 2)
    assert (recipe.model.d_model, recipe.seed) == (64, 3)
    assert parse_recipe(RECIPE, ["finetune=null"]).finetune is None


def test_texts_are_taken_as_typed():
    assert parse_recipe(RECIPE, ["output=007"]).output == "007"
    assert parse_recipe(RECIPE, ["data.corpus=12:30"]).data.corpus == "12:30"


PATHS = sorted({*RECIPES.rglob("*.yaml")} - {*(RECIPES / "tables").iterdir()})


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_recipes_that_come_with_the_project_are_sound(path):
    assert load_recipe(path).output == f"runs/{path.relative_to(RECIPES).with_suffix('')}"


def test_yaml_of_a_recipe_reads_back_equal():
    recipe = parse_recipe(RECIPE)
    assert parse_recipe(recipe_yaml(recipe)) == recipe


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["train.step=5"], "there is no setting train.step; did you mean train.steps?"),
        (["trian.steps=5"], "there is no setting trian; did you mean train?"),
        (
            ["finetune.lerning_rate=5"],
            "there is no setting finetune.lerning_rate; did you mean finetune.learning_rate?",
        ),
        (["train.xyzzy=5"], "there is no setting train.xyzzy; the settings here are steps, loss,"),
        (["train.steps=many"], "train.steps: Value 'many' of type 'str' could not be converted to Integer"),
        (["train.steps=1.5"], "could not be converted to Integer"),
        (["train.steps=0"], "steps of a stage must be above 0, but is 0"),
        (["train.learning_rate=nan"], "learning_rate of a stage must be above 0, but is nan"),
        (["train.learning_rate=.inf"], "learning_rate must be a finite number, but is inf"),
        (["train.weight_decay=.inf"], "weight_decay must be at least 0 and finite, but is inf"),
        (["train.combine.0=1"], "recipe: train.combine must be a list"),
        (["output="], "output must name a directory, but is ''"),
        (
            ["train.loss=nll"],
            "must be one of axe, bag, bipartite, combined, cross_entropy, ctc, ddrs, ngram, oaxe, sctc",
        ),
        (["train.loss=oaxe"], "train.loss of a ctc model must be one of ctc, ngram, combined, ddrs, but is 'oaxe'"),
        (["model.family=gru"], "model.family must be one of autoregressive, fixed_length, ctc, sctc, but is 'gru'"),
        (["model.norm=none"], "model.norm must be one of pre, post, but is 'none'"),
        (["machine.precision=int8"], "machine.precision must be one of float32, bf16, fp16, float64, but is 'int8'"),
        (["machine.devices=0"], "devices of machine must be above 0, but is 0"),
        (["machine.gpus=1"], "there is no setting machine.gpus; the settings here are accelerator, devices,"),
        (["train.loss=ddrs"], "references of the loss ddrs must be together, but is 'each'"),
        (["train.references=together"], "together needs a loss of ('ngram', 'combined', 'bag', 'ddrs'), but is 'ctc'"),
        (["finetune.combine=[0.5,0.6]"], "combine must hold weights of at least 0 that sum to 1, but is [0.5, 0.6]"),
        (["train.glance_to=2"], "glance_to must be in [0, 1], but is 2.0"),
        (["train.loss=ngram", "train.glance_from=0.5"], "glancing needs a loss of ('cross_entropy', 'ctc', 'sctc')"),
        (["train.label_smoothing=0.1"], "label_smoothing needs the loss cross_entropy, but is 'ctc'"),
        (["train.recall_weight=2"], "recall_weight needs the loss ngram, but is 'ctc'"),
        (["finetune.recall_weight=0"], "recall_weight of a stage must be above 0, but is 0"),
        (["train.ctc_weight=0.1"], "ctc_weight needs the loss ngram, but is 'ctc'"),
        (["finetune.ctc_weight=0.1", "finetune.references=together"], "ctc_weight needs references: each"),
        (["train.patience=-1"], "patience must be at least 0 and finite, but is -1"),
        (["train.dropout=1"], "dropout must be in [0, 1), but is 1.0"),
        (["model.heads=3"], "model.heads must divide d_model 512, but is 3"),
        (["train=3"], "train must be a section with settings of its own, but is 3"),
        (["seed=-1"], "seed must be from 0 to 9223372036854775807, but is -1"),
        (["steps"], "an override must be key=value, but is 'steps'"),
        (["teacher.train.steps=5"], "which a recipe with a teacher sets, must be one of cross_entropy, but is 'ctc'"),
    ],
)
def test_wrong_setting_is_refused_with_the_right_one(overrides, message):
    with pytest.raises(UsageError) as error:
        parse_recipe(RECIPE, overrides)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "text", ["- a list", "5", "true", "a: [unclosed", "output: runs/x", "", "train: {steps: 5, steps: }: }"]
)
def test_what_is_no_recipe_is_refused_in_one_line(text, tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    with pytest.raises(UsageError) as error:
        load_recipe(path)
    assert str(error.value).startswith(str(path))
    assert "\n" not in str(error.value)


def test_missing_or_binary_recipe_is_refused(tmp_path):
    with pytest.raises(UsageError, match="there is none here"):
        load_recipe(tmp_path / "none.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="must be UTF-8 text"):
        load_recipe(tmp_path / "binary.yaml")


@pytest.mark.parametrize(
    ("text", "missing"), [("output: x\ntrain: {steps: 1}", "data"), ("", "data"), ("data: {}", "data.corpus")]
)
def test_a_setting_that_must_be_given_is_named(text, missing):
    with pytest.raises(UsageError, match=f"^recipe: {missing} must be given, but is not$"):
        parse_recipe(text)
