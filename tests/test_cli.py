"""The commands as a user types them."""

import contextlib
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import COPY_RECIPE
from nmla.cli import COMMANDS, main
from nmla.data.synthetic import HEADLINE, generate

ENVIRONMENT = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}


def nmla(*arguments, cwd, stdin=b""):
    return subprocess.run(
        [sys.executable, "-m", "nmla.cli", *map(str, arguments)], cwd=cwd, input=stdin, capture_output=True
    )


def complaint(done, code):
    """The one line on stderr of a command that refused, having written nothing to stdout."""
    lines = done.stderr.decode().splitlines()
    assert done.returncode == code, done.stderr.decode()
    assert len(lines) == 1, done.stderr.decode()
    assert done.stdout == b""
    return lines[0]


@pytest.fixture(scope="module")
def desk(tmp_path_factory):
    """A directory with the files that the examples of the help name."""
    directory = tmp_path_factory.mktemp("desk")
    sentences = generate(HEADLINE, 2100, seed=1)
    for split, part in (("train", sentences[:2000]), ("valid", sentences[2000:])):
        (directory / f"{split}.en").write_text("".join(f"{sentence.source}\n" for sentence in part))
        (directory / f"{split}.de").write_text("".join(f"{sentence.target}\n" for sentence in part))
    (directory / "recipe.yaml").write_text("data: {corpus: corpora/mine}\noutput: runs/mine\n" + COPY_RECIPE)
    (directory / "table.yaml").write_text(TABLE)
    return directory


TABLE = """
title: A table
output: runs/tables
test: {source: valid.en, references: [valid.de]}
rows: [{name: CTC, recipe: recipe.yaml, overrides: [train.steps=20, finetune=null]}]
"""
# What the example of distill begins from.
TEACHER = (
    "nmla train recipe.yaml model.family=autoregressive train.loss=cross_entropy train.steps=30 finetune=null "
    "output=runs/teacher"
)


FIRST = ("prepare", "train", "teacher", "distill", "average", "translate", "score", "demo")
THEN = ("lm train", "lm convert", "tune", "bench speed", "analyse", "report", "reproduce")


@pytest.fixture(scope="module")
def examples(desk):
    """Each command's example, run in turn: they build on each other."""
    return {
        name: subprocess.run(
            COMMANDS[name].example if name in COMMANDS else TEACHER,
            shell=True,
            cwd=desk,
            env=ENVIRONMENT,
            capture_output=True,
            text=True,
        )
        for name in (*FIRST, *THEN)
    }


@pytest.mark.parametrize("name", COMMANDS)
def test_example_in_the_help_runs(examples, name):
    assert examples[name].returncode == 0, examples[name].stderr


@pytest.mark.parametrize("name", COMMANDS)
def test_help_shows_the_example(name, desk):
    done = nmla(*name.split(), "--help", cwd=desk)
    assert done.returncode == 0
    assert COMMANDS[name].example in done.stdout.decode()
    assert " ".join(shlex.split(COMMANDS[name].example)).startswith(f"nmla {name} ")


def test_commands_print_data_on_stdout(examples, desk):
    assert "train_pairs\t2000" in examples["prepare"].stdout
    assert examples["train"].stdout == "runs/mine/finetune/model\n"
    assert examples["translate"].stdout == ""  # the shell sent it to a file
    assert len((desk / "output.de").read_text().splitlines()) == 100
    assert examples["score"].stdout.startswith("BLEU\t")
    assert "nrefs:1|case:mixed" in examples["score"].stdout
    assert examples["lm train"].stdout.startswith("1-grams\t300\n2-grams\t")
    assert examples["reproduce"].stdout.startswith("# A table\n\n    nmla reproduce table.yaml\n\n| system | BLEU, ")
    assert examples["lm convert"].stdout == examples["lm train"].stdout
    assert examples["analyse"].stdout.startswith("measure\tctc\tnmla\tfile\treference\tnote\nBLEU\t")
    assert examples["report"].stdout == "report.html\n"
    assert "\nblanks\t" in examples["analyse"].stdout
    assert "\n| ctc argmax, default mode |" in examples["bench speed"].stdout
    assert "ar beam 5 float32 or ar beam 5 int8, whichever is faster" in examples["bench speed"].stdout
    assert examples["bench speed"].stderr == ""
    assert (desk / "speed.svg").read_text().startswith("<svg")


def test_score_of_a_model_tells_its_entropy(examples, desk):
    done = nmla(
        *("score", "--model", "runs/mine/train/model", "--source", "valid.en", "--reference", "valid.de"), cwd=desk
    )
    assert done.returncode == 0
    assert "entropy\t" in done.stdout.decode()


def test_translate_keeps_every_line(copy_run, tmp_path):
    model = copy_run / "train" / "model"
    text = "1 2\n\n3 4\r\n \n\U0001f600 \u2028 5\n6 7".encode()
    lines = nmla("translate", "--model", model, cwd=tmp_path, stdin=text).stdout.decode().split("\n")
    assert len(lines) == 7
    assert (lines[0], lines[1], lines[2], lines[3], lines[-1]) == ("1 2", "", "3 4", " ", "")
    assert nmla("translate", "--model", model, cwd=tmp_path, stdin=b"").stdout == b""


def test_translate_takes_files_and_writes_other_forms(copy_run, tmp_path):
    (tmp_path / "one.txt").write_text("1 2\n\n3\t4\n")
    (tmp_path / "two.txt").write_text("5 6")
    command = ("translate", "--model", copy_run / "train" / "model", "one.txt", "two.txt")
    assert nmla(*command, cwd=tmp_path).stdout == b"1 2\n\n3 4\n5 6\n"
    done = nmla(*command, "--format", "tsv", "--output", "out.tsv", cwd=tmp_path)
    assert done.stdout == b""
    assert (tmp_path / "out.tsv").read_text() == "1 2\t1 2\n\t\n3 4\t3 4\n5 6\t5 6\n"
    done = nmla(*command, "--format", "jsonl", "--beam-size", "4", "--num-hypotheses", "2", cwd=tmp_path)
    records = [json.loads(line) for line in done.stdout.decode().splitlines()]
    assert [(record["source"], record["text"]) for record in records] == [
        ("1 2", "1 2"),
        ("", ""),
        ("3\t4", "3 4"),
        ("5 6", "5 6"),
    ]
    assert "".join(token["piece"] for token in records[0]["tokens"]) == "▁1▁2"
    assert len(records[0]["alternatives"]) == 1


def test_translate_does_not_write_over_its_input(copy_run, tmp_path):
    (tmp_path / "in.en").write_text("1 2\n")
    command = [sys.executable, "-m", "nmla.cli", "translate", "--model", copy_run / "train" / "model"]
    with (tmp_path / "in.en").open() as file:
        done = subprocess.run([*command, "--output", "in.en"], cwd=tmp_path, stdin=file, capture_output=True)
    assert complaint(done, 2) == "nmla translate: in.en: must not be what is translated, but is"
    assert (tmp_path / "in.en").read_text() == "1 2\n"


def test_translate_does_not_follow_its_own_output(copy_run, tmp_path):
    (tmp_path / "in.en").write_text("1 2\n")
    command = [sys.executable, "-m", "nmla.cli", "translate", "--model", copy_run / "train" / "model", "in.en"]
    with (tmp_path / "in.en").open("a") as file:
        done = subprocess.run(command, cwd=tmp_path, stdout=file, stderr=subprocess.PIPE)
    assert done.returncode == 2
    assert done.stderr == b"nmla translate: standard output: must not be what is translated, but is\n"
    assert (tmp_path / "in.en").read_text() == "1 2\n"


def test_translate_does_not_need_its_stderr(copy_run, tmp_path):
    (tmp_path / "in.en").write_text("1 2 3 4 " * 200 + "\n1 2\n")
    command = f"{sys.executable} -m nmla.cli translate --model {copy_run / 'train' / 'model'} in.en"
    for closed in ("2>&-", "2> >(true)"):
        done = subprocess.run(["bash", "-c", f"{command} {closed}"], cwd=tmp_path, stdout=subprocess.PIPE)
        assert (done.returncode, done.stdout.count(b"\n")) == (0, 2)


def test_translate_destroys_nothing(copy_run, tmp_path):
    model = copy_run / "train" / "model"
    (tmp_path / "keep.de").write_text("kept\n")
    (tmp_path / "in.en").write_text("1 2\n")
    for arguments, message in (
        (("missing.en", "--output", "keep.de"), "missing.en: must be a file, but does not exist"),
        (("in.en", "--output", "keep.de", "--beta", "1"), "beam_size must be above 1"),
        (("in.en", "--output", "in.en"), "in.en: must not be what is translated, but is"),
    ):
        done = nmla("translate", "--model", model, *arguments, cwd=tmp_path)
        assert message in complaint(done, 2)
    assert (tmp_path / "keep.de").read_text() == "kept\n"
    assert (tmp_path / "in.en").read_text() == "1 2\n"


def test_a_line_without_end_is_told(copy_run, tmp_path):
    text = b"1 2\n" + b"3" * (1 << 21)
    done = nmla("translate", "--model", copy_run / "train" / "model", cwd=tmp_path, stdin=text)
    assert (done.returncode, done.stdout) == (3, b"1 2\n")
    assert b"stdin:2: must have at most 1048576 bytes, but has more; split the line" in done.stderr


def test_translate_answers_each_line_as_it_comes(copy_run, tmp_path):
    process = subprocess.Popen(
        ["nmla", "translate", "--model", copy_run / "train" / "model"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=tmp_path,
        env=ENVIRONMENT,
    )
    with process:
        for line in (b"1 2 3\n", b"4 5\n"):
            process.stdin.write(line)
            process.stdin.flush()
            assert process.stdout.readline() == line


def test_translate_writes_what_came_before_a_bad_line(copy_run, tmp_path):
    done = nmla("translate", "--model", copy_run / "train" / "model", cwd=tmp_path, stdin=b"1 2\n\xff\n")
    assert done.returncode == 3
    assert done.stderr.decode().startswith("nmla translate: stdin:2: text must be UTF-8")


def test_long_line_is_told(copy_run, tmp_path):
    done = nmla("translate", "--model", copy_run / "train" / "model", cwd=tmp_path, stdin=b"1 2 3 4 " * 200)
    assert b"stdin:1: long line, translated in" in done.stderr


PREPARE = ("prepare", "--train", "train.en", "train.de", "--valid", "valid.en", "valid.de", "--vocab-size", "300")


LM_TRAIN = ("lm", "train", "--tokenizer", "nowhere")
BENCH = ("bench", "speed", "--source", "valid.en", "--system", "a=nowhere")


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("train", "nowhere.yaml"), 2, "a recipe must be a YAML file, but there is none here"),
        (("train", "recipe.yaml", "train.step=5"), 2, "there is no setting train.step; did you mean train.steps?"),
        (("train", "recipe.yaml", "data.corpus=nowhere"), 2, "must be a corpus, but holds no manifest.json"),
        (("translate", "--model", "nowhere"), 2, "must be a model directory"),
        (("score", "--reference", "nowhere"), 2, "nowhere: must be a file, but does not exist"),
        (("score", "--reference", "valid.de"), 3, "there must be at least one output to score, but there is none"),
        (("score", "--reference", "valid.de", "--model", "x"), 2, "must be given together"),
        ((*PREPARE, "--output", "valid.en"), 2, "must not exist yet"),
        ((*PREPARE, "--output", "new", "--train", "train.en", "nowhere"), 2, "nowhere: must be a file"),
        ((*PREPARE, "--output", "new", "--train", "train.en", "valid.de"), 3, "must have as many lines as each other"),
        ((*PREPARE, "--output", "new", "--train", "empty", "empty"), 3, "empty: must hold at least one line"),
        ((*PREPARE, "--output", "new", "--valid", "binary", "binary", "--bad", "refuse"), 3, "binary:1: text must be"),
        ((*PREPARE, "--output", "new", "--train", "train.en"), 2, "must have a source and a target file, or one that"),
        ((*PREPARE, "--output", "new", "--tokenizer", "x"), 2, "--vocab-size must not be given with --tokenizer"),
        ((*PREPARE, "--output", "new", "--vocab-size", "9000"), 2, "vocab_size must be at most"),
        ((*PREPARE, "--output", "new", "--vocab-size", "99999999999"), 2, "vocab_size must be from 6 to"),
        ((*PREPARE, "--output", "valid.en/new"), 2, "valid.en"),
        (("train", "recipe.yaml", "seed=-1"), 2, "seed must be from 0 to"),
        (("train", "."), 2, "a recipe must be a YAML file"),
        (
            ("score", "--reference", "valid.de", "--beam-size", "7"),
            2,
            "--beam-size is for what a model does, but there",
        ),
        (("score", "--reference", "valid.de", "--meteor-jar", "x"), 2, "--meteor-jar must come with --meteor LANGUAGE"),
        (("demo", "seed=1", "--output", "x", "seed=2"), 2, "demo: 'seed=2' must stand beside what else has no option"),
        (("demo", "--sede", "1"), 2, "demo: there is no option --sede; see nmla demo --help"),
        (("report", "runs/mine", "--output", "."), 2, "must end in .html or .md, but does not"),
        (
            ("report", "runs/mine", "--output", "x.html", "--lm", "lm.lm"),
            2,
            "--lm is for what models write, so --source",
        ),
        (("report", "nowhere", "--output", "x.html"), 2, "nowhere: must hold a finished training, but holds none"),
        (("reproduce", "nowhere.yaml"), 2, "nowhere.yaml: a table must be a YAML file, but there is none here"),
        (("score", "--reference", "."), 2, "must be a file, but is a directory"),
        (("demo", "train.step=5"), 2, "did you mean train.steps?"),
        (("demo", "--output", "."), 2, "must be empty or an earlier demo"),
        ((*LM_TRAIN, "--text", "train.de", "--output", "new.lm"), 2, "nowhere: must be a file, but does not exist"),
        (("lm", "convert", "train.de", "new.lm", "--tokenizer", "valid.de"), 3, "must be a sentencepiece model"),
        (BENCH, 2, "nowhere: must be a model directory"),
        ((*BENCH, "--system", "nowhere"), 2, "--system must be NAME=PATH, but is 'nowhere'"),
        ((*BENCH, "--system", "a=other"), 2, "systems must have names of their own, but two are called 'a'"),
        ((*BENCH, "--batch-sizes", "8", "0"), 2, "batch sizes must be at least 1, but there is 0"),
        ((*BENCH, "--sentences", "0"), 2, "sentences must be at least 1, but there is 0"),
        ((*BENCH, "--source", "empty"), 3, "empty: must hold at least one line, but is empty"),
        ((*BENCH, "--picture", "."), 2, "must be a file to write, but is a directory"),
    ],
)
def test_mistake_is_one_line_and_an_exit_code(desk, arguments, code, message):
    (desk / "empty").write_bytes(b"")
    (desk / "binary").write_bytes(b"\xff\xfe\n")
    before = {path.name for path in desk.iterdir()}
    assert message in complaint(nmla(*arguments, cwd=desk), code)
    assert {path.name for path in desk.iterdir()} == before


def test_scores_are_told_even_if_meteor_fails(tmp_path, monkeypatch):
    text = "one two three four\n"
    (tmp_path / "text").write_text(text)
    (tmp_path / "some.jar").touch()
    java = tmp_path / "java"
    java.write_text("#!/bin/sh\necho 'no memory' >&2\n")
    java.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    arguments = ("score", "--reference", "text", "--meteor", "de", "--meteor-jar", "some.jar")
    done = nmla(*arguments, cwd=tmp_path, stdin=text.encode())
    assert (done.returncode, done.stderr) == (1, b"nmla score: METEOR gave no score: no memory\n")
    assert done.stdout.startswith(b"BLEU\t100.00\t")


def test_text_that_is_split_already_is_told_once(tmp_path):
    text = "a b c d .\n" * 100
    (tmp_path / "text").write_text(text)
    done = nmla("score", "--reference", "text", "--baseline", "text", cwd=tmp_path, stdin=text.encode())
    assert done.stderr.count(b"\n") == 1
    assert b"count them as they are by --tokenised" in done.stderr


def test_stdout_is_utf8_whatever_the_locale_says(tmp_path, monkeypatch):
    (tmp_path / "text").write_text("grün\n", encoding="utf-8")
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    done = nmla("analyse", "--reference", "text", "--system", "a=text", cwd=tmp_path)
    assert done.returncode == 0
    assert "grün" in done.stdout.decode("utf-8")


def test_closed_stdin_is_a_usage_error(copy_run, tmp_path):
    command = f"{sys.executable} -m nmla.cli translate --model {copy_run}/train/model <&-"
    done = subprocess.run(command, shell=True, cwd=tmp_path, capture_output=True)
    assert "standard input must be open" in complaint(done, 2)


def test_pipe_is_as_good_as_a_file(desk):
    command = f"{sys.executable} -m nmla.cli score --reference <(cat valid.de) < valid.de"
    done = subprocess.run(["bash", "-c", command], cwd=desk, capture_output=True, text=True)
    assert done.stdout.startswith("BLEU\t100.00"), done.stderr


def test_terminal_gets_a_bar_and_stdout_stays_clean(digits, tmp_path):
    """On a terminal, work that takes a while shows how far it is; nothing of that reaches stdout."""
    import pty

    terminal, stderr = pty.openpty()
    text = str(digits / "valid.txt")
    arguments = ["--train", text, text, "--valid", text, text, "--vocab-size", "16", "--output", str(tmp_path / "new")]
    command = [sys.executable, "-m", "nmla.cli", "prepare", *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=stderr)
    os.close(stderr)
    shown = os.read(terminal, 100_000).decode()
    assert done.returncode == 0, shown
    assert "encoding" in shown
    assert "100/100" in shown
    assert done.stdout.decode().startswith("train_pairs\t100\n")


def test_language_model_has_bars_on_a_terminal_too(digits, tmp_path):
    import pty

    terminal, stderr = pty.openpty()
    files = ["--tokenizer", digits / "corpus", "--text", digits / "valid.txt", "--output", tmp_path / "new.arpa"]
    command = [sys.executable, "-m", "nmla.cli", "lm", "train", *map(str, files)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=stderr)
    os.close(stderr)
    shown = ""
    with contextlib.suppress(OSError):  # which comes when all is read
        while True:
            shown += os.read(terminal, 100_000).decode(errors="replace")
    assert done.returncode == 0, shown
    assert all(step in shown for step in ("encoding", "counting 4-grams", "estimating", "writing"))
    assert done.stdout.decode().startswith("1-grams\t16\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "nmla: the following arguments are required: COMMAND; see nmla --help"),
        (("translate",), "nmla translate: the following arguments are required: --model; see nmla translate --help"),
        ((*PREPARE, "--output", "new", "--vocab-size", "x"), "argument --vocab-size: invalid int value: 'x'"),
        (("trian",), "invalid choice: 'trian'"),
        (("lm",), "nmla lm: the following arguments are required: COMMAND; see nmla lm --help"),
        (("lm", "tell"), "invalid choice: 'tell'"),
        (("bench", "speed", "--source", "valid.en"), "the following arguments are required: --system; see nmla bench"),
    ],
)
def test_wrong_command_line_is_one_line_too(desk, arguments, message):
    assert message in complaint(nmla(*arguments, cwd=desk), 2)


def test_reader_that_stops_early_is_no_error(copy_run, tmp_path):
    command = f"{sys.executable} -m nmla.cli translate --model {copy_run}/train/model | head -n 1"
    done = subprocess.run(command, shell=True, cwd=tmp_path, input=b"1 2\n" * 20000, capture_output=True)
    assert done.stdout == b"1 2\n"
    assert done.stderr == b""


def test_average_takes_only_what_belongs_together(examples, desk, tmp_path):
    model, checkpoints = desk / "runs/mine/train/model", sorted((desk / "runs/mine/train/checkpoints").iterdir())
    other = desk / "runs/quick/ctc/model"
    for arguments, code, message in (
        ((desk / "nowhere",), 2, "nowhere: must be the directory of a model or a checkpoint, but is none"),
        (checkpoints, 2, "--model must tell which model the checkpoints belong to, but is not given"),
        ((model, other), 3, "must be a model of the same kind and vocabulary"),
        ((*checkpoints, "--model", other), 3, "must be a checkpoint of a model like"),
        ((model, "--model", desk / "nowhere"), 2, "nowhere: must be a model directory, but holds no config.json"),
        ((model, desk / "corpora"), 3, "must be a sound model or checkpoint, but"),
    ):
        done = nmla("average", *arguments, "--output", tmp_path / "new", cwd=desk)
        assert message in complaint(done, code)
        assert not (tmp_path / "new").exists()


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="a system without huge pages")
@pytest.mark.parametrize(("given", "expected"), [("", "1"), ("0", "0")])
def test_large_tensors_stand_on_huge_pages_unless_told_otherwise(tmp_path, monkeypatch, given, expected):
    monkeypatch.setenv("THP_MEM_ALLOC_ENABLE", given)
    if not given:
        monkeypatch.delenv("THP_MEM_ALLOC_ENABLE")
    assert main(["translate", "--model", str(tmp_path / "none")]) == 2
    assert os.environ["THP_MEM_ALLOC_ENABLE"] == expected
