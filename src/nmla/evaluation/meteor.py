"""METEOR 1.5, by its own program: other implementations give other numbers."""

import importlib.util
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from sacrebleu.tokenizers.tokenizer_13a import Tokenizer13a

from nmla.errors import NmlaError, UsageError
from nmla.evaluation.measure import SEED, Counts, Lines, Measured, References, compare, first_references
from nmla.text.lines import require_file

# Paraphrase tables for other languages than English are not part of the program.
MODULES = {"cz": "exact", "en": "exact stem synonym paraphrase"}  # there is no stemmer for Czech
WITHOUT_TABLES = "exact stem"
NORMALISED = ("cz", "de", "en", "es", "fr")  # languages that the program splits into words itself
LANGUAGES = sorted([*NORMALISED, "da", "fi", "hu", "it", "nl", "no", "pt", "ro", "ru", "se", "tr"])
# Runs of words in the same order, of the program's counts in a sentence. It takes them for none in its sum over
# sentences where one run matches all words of output and reference.
CHUNKS = -3
# Its numbers and its small letters are those of the user's language otherwise.
ENGLISH = ("-Duser.language=en", "-Duser.country=US")
PACKAGE, JAR = "pycocoevalcap", "meteor/meteor-1.5.jar"


def find_meteor(language: str, jar: Path | None = None) -> Path:
    """The program, which knows the language; refuses if there is none."""
    if language not in LANGUAGES:
        raise UsageError(f"METEOR's language must be one of {', '.join(LANGUAGES)}, but is {language!r}")
    jar = jar or _installed()
    require_file(jar)
    if shutil.which("java") is None:
        raise UsageError("METEOR needs java, which must be on the path, but is not; install a Java runtime")
    return jar


def meteor(
    hypotheses: Lines,
    references: References,
    language: str,
    jar: Path | None = None,
    *,
    baseline: Lines | None = None,
    samples: int = 0,
) -> Measured:
    """METEOR, from 0 to 1 as it is published, with punctuation normalised; intervals as of all metrics.

    Where the program cannot split a language's words, BLEU's splitting (13a) is taken, and the signature says so.
    """
    jar = find_meteor(language, jar)
    modules = MODULES.get(language, WITHOUT_TABLES)
    splitting, prepare = ("-norm", _one_line) if language in NORMALISED else ("-lower", _split)
    options = ["-l", language, splitting, "-m", modules]

    def count(lines: Lines) -> Counts:
        with tempfile.TemporaryDirectory(prefix="nmla-") as directory:
            outputs, targets = Path(directory) / "outputs", Path(directory) / "references"
            outputs.write_text("".join(f"{prepare(line)}\n" for line in lines), encoding="utf-8")
            # A sentence's references follow each other, equally many of each: the first again adds nothing.
            of_all = zip(first_references(references), *references, strict=True)
            together = (of or first for first, *of_one in of_all for of in of_one)
            targets.write_text("".join(f"{prepare(line)}\n" for line in together), encoding="utf-8")
            files = [str(outputs), str(targets)]
            counts = np.array(_numbers(jar, [*files, *options, "-r", str(len(references)), "-ssOut"], len(lines)))
        words, matched = counts[:, :2], counts[:, -2:]  # of output and reference
        counts[(words == matched).all(1) & (counts[:, CHUNKS] == 1), CHUNKS] = 0
        return counts

    def score_each(sums: Counts) -> list[float]:
        asked = "".join(f"SING ||| {' '.join(map(str, of))}\n" for of in sums.tolist())
        return [score for (score,) in _numbers(jar, ["-", "-", *options, "-stdio"], len(sums), asked)]

    name = "meteor-1.5" if splitting == "-norm" else "meteor-1.5|tok:13a"
    signature = f'{name}|-l {language} {splitting} -m "{modules}"'
    if samples and len(hypotheses) > 1:  # of one sentence there is no interval
        signature += f"|bs:{samples}|seed:{SEED}"
    counts = [count(lines) for lines in (hypotheses, baseline) if lines is not None]
    return compare("METEOR", signature, score_each, counts, samples)


def _numbers(jar: Path, arguments: Sequence[str], lines: int, given: str = "") -> list[list[float]]:
    """What the program prints: as many lines of numbers."""
    command = ["java", "-Xmx2G", "-Dfile.encoding=UTF-8", *ENGLISH, "-jar", str(jar), *arguments]
    done = subprocess.run(command, input=given, capture_output=True, encoding="utf-8", errors="replace", check=False)
    try:
        told = [[float(number) for number in line.split()] for line in done.stdout.splitlines()]
    except ValueError:
        told = []
    if len(told) == lines and len({len(of) for of in told}) == 1:
        return told
    said = [line for line in (done.stderr + done.stdout).splitlines() if line.strip()]
    told_first = (line for line in said if not line.startswith("Picked up "))  # Java's word on its own settings
    raise NmlaError(f"METEOR gave no score: {next(told_first, 'it said nothing')}")


def _one_line(text: str) -> str:
    """Java ends lines at more characters than we do."""
    return " ".join(text.splitlines())


def _split(text: str) -> str:
    return str(Tokenizer13a()(_one_line(text)))


def _installed() -> Path:
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise UsageError(
            f"METEOR needs its jar, but {PACKAGE} is not there: pip install nmla[meteor], or name a jar by --meteor-jar"
        )
    return Path(next(iter(spec.submodule_search_locations))) / JAR  # it has no __init__.py, so no origin
