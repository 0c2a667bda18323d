"""METEOR 1.5, by its own program: other implementations give other numbers."""

import importlib.util
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from sacrebleu.tokenizers.tokenizer_13a import Tokenizer13a

from nmla.errors import NmlaError, UsageError
from nmla.evaluation.measure import Lines, Measured, References
from nmla.text.lines import require_file

# Paraphrase tables for other languages than English are not part of the program.
MODULES = {"cz": "exact", "en": "exact stem synonym paraphrase"}  # there is no stemmer for Czech
WITHOUT_TABLES = "exact stem"
NORMALISED = ("cz", "de", "en", "es", "fr")  # languages that the program splits into words itself
LANGUAGES = sorted([*NORMALISED, "da", "fi", "hu", "it", "nl", "no", "pt", "ro", "ru", "se", "tr"])
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


def meteor(hypotheses: Lines, references: References, language: str, jar: Path | None = None) -> Measured:
    """METEOR, from 0 to 1 as it is published, with punctuation normalised.

    Where the program cannot split a language's words, BLEU's splitting (13a) is taken, and the signature says so.
    """
    jar = find_meteor(language, jar)
    modules = MODULES.get(language, WITHOUT_TABLES)
    splitting, prepare = ("-norm", _one_line) if language in NORMALISED else ("-lower", _split)
    with tempfile.TemporaryDirectory(prefix="nmla-") as directory:
        outputs, targets = Path(directory) / "outputs", Path(directory) / "references"
        outputs.write_text("".join(f"{prepare(line)}\n" for line in hypotheses), encoding="utf-8")
        # A sentence's references follow each other, equally many of each: the first again adds nothing.
        together = (line or first or "" for first, *rest in zip(*references, strict=True) for line in (first, *rest))
        targets.write_text("".join(f"{prepare(line)}\n" for line in together), encoding="utf-8")
        command = ["java", "-Xmx2G", "-Dfile.encoding=UTF-8", "-jar", str(jar), str(outputs), str(targets)]
        command += ["-l", language, splitting, "-m", modules, "-r", str(len(references))]
        done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", errors="replace", check=False)
    name = "meteor-1.5" if splitting == "-norm" else "meteor-1.5|tok:13a"
    if found := re.search(r"^Final score:\s+([\d.]+(?:E-?\d+)?)", done.stdout, re.MULTILINE):
        return Measured("METEOR", float(found[1]), f'{name}|-l {language} {splitting} -m "{modules}"')
    said = (done.stderr.strip() or done.stdout.strip() or "it said nothing").splitlines()
    raise NmlaError(f"METEOR gave no score: {said[0]}")


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
