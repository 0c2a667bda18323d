import json

import pytest

from conftest import COPY_RECIPE
from nmla.config import load_recipe, parse_recipe
from nmla.data.corpus import Corpus
from nmla.decoding.translator import Translator
from nmla.distillation.recipe import train_with_teachers
from nmla.errors import UsageError

TEACHER = """
teacher:
  model: {family: autoregressive, d_model: 32, heads: 2, feed_forward: 64, encoder_layers: 1, decoder_layers: 1}
  train: {loss: cross_entropy, steps: 20, max_tokens: 512, validate_every: 20}
  seeds: [3, 5]
  beam_size: 2
"""
FEW = ("train.steps=4", "train.loss=ddrs", "train.references=together", "finetune.steps=3")


def recipe(digits, output, *overrides):
    settings = [f"data.corpus={digits / 'corpus'}", f"output={output}", *FEW, "finetune.references=together"]
    return parse_recipe(COPY_RECIPE + TEACHER, [*settings, *overrides])


def test_one_recipe_trains_teachers_distills_and_trains_the_student(digits, tmp_path, capsys):
    """Two teachers, their translations as two references, DDRS, then n-gram matching; called again, all is there."""
    model = train_with_teachers(recipe(digits, tmp_path / "run"))
    assert model == tmp_path / "run" / "finetune" / "model"
    corpus = Corpus.load(tmp_path / "run" / "corpus")
    assert set((corpus.references[1:] - corpus.references[:-1]).tolist()) == {2}
    manifest = json.loads((tmp_path / "run" / "corpus" / "manifest.json").read_text())
    assert [name.split("/")[-3] for name in manifest["origins"][:2]] == ["teacher-3", "teacher-5"]
    assert manifest["settings"]["beam_size"] == 2
    families = [Translator.load(tmp_path / "run" / stage / "model").model.config.family for stage in STAGES]
    assert families == ["autoregressive", "autoregressive", "ctc", "ctc"]
    weights = (model / "model.safetensors").stat()
    assert train_with_teachers(recipe(digits, tmp_path / "run")) == model
    assert (model / "model.safetensors").stat().st_size == weights.st_size

    with pytest.raises(UsageError, match="corpus: was made by other teachers or in another way; remove it"):
        train_with_teachers(recipe(digits, tmp_path / "run", "teacher.beam_size=3"))
    with pytest.raises(UsageError, match=r"corpus: began from .*teacher-3/train made, .*, but steps 20 -> 30; remove"):
        train_with_teachers(recipe(digits, tmp_path / "run", "teacher.train.steps=30"))
    assert load_recipe(tmp_path / "run" / "teacher-3" / "train" / "recipe.yaml").train.steps == 20
    told = capsys.readouterr().err
    assert f"{tmp_path / 'run' / 'teacher-5'}: a teacher\n" in told
    assert f"corpus: targets by teachers {manifest['counts']['train_taught']}, of " in told


STAGES = ("teacher-3/train", "teacher-5/train", "train", "finetune")


@pytest.mark.parametrize(
    ("override", "match"),
    [
        ("teacher.model.family=ctc", "teacher.model.family must be one of autoregressive, but is 'ctc'"),
        ("teacher.train.loss=ctc", "sets, must be one of cross_entropy, but is 'ctc'"),
        ("teacher.compute_type=int4", "teacher.compute_type must be one of float32, int8, but is 'int4'"),
        ("teacher.beam_size=0", "teacher.beam_size must be from 1 to 10000, but is 0"),
        ("teacher.seeds=[]", r"teacher.seeds must be different numbers from 0 to 9223372036854775807, but is \[\]"),
        ("teacher.seeds=[1, 1]", "teacher.seeds must be different"),
        ("teacher.sedes=[1]", "there is no setting teacher.sedes; did you mean teacher.seeds"),
    ],
)
def test_refuses_a_teacher_that_cannot_be(digits, tmp_path, override, match):
    with pytest.raises(UsageError, match=match):
        recipe(digits, tmp_path, override)
