"""A table of results as settings: which rows, on which test set, decoded in which ways."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from nmla.config import LOSSES, SEEDS, WIDEST_BEAM, Recipe, load_recipe, parse_settings, read_settings
from nmla.decoding.ngram_lm import MAX_ORDER
from nmla.errors import UsageError
from nmla.evaluation.meteor import LANGUAGES


@dataclass(frozen=True)
class TestConfig:
    source: str  # a text file, one sentence a line
    references: list[str]  # its translations

    def __post_init__(self) -> None:
        if not self.references:
            raise UsageError("test.references must hold at least one file, but is empty")


@dataclass(frozen=True)
class Way:
    """A way of decoding, which becomes a column."""

    beam_size: int = 1  # of a search, or the lengths that a fixed-length model tries
    tune: bool = False  # the blank penalty on the validation set, and with a beam the weights of its search
    lm: bool = False  # search with the table's language model
    teacher: bool = False  # the recipe's first teacher chooses among what was found
    # Model families that are decoded like this, other rows must name it; all by default.
    families: list[str] = field(default_factory=lambda: [*LOSSES])

    def __post_init__(self) -> None:
        if not 1 <= self.beam_size <= WIDEST_BEAM:
            raise UsageError(f"beam_size of a way must be from 1 to {WIDEST_BEAM}, but is {self.beam_size}")
        if (self.teacher or self.lm) and self.beam_size == 1:
            raise UsageError("beam_size of a way with a teacher or a language model must be above 1, but is 1")
        if self.lm and not self.tune:
            raise UsageError("tune of a way with a language model must be true, so that it gets a weight, but is false")
        if unknown := [family for family in self.families if family not in LOSSES]:
            raise UsageError(f"families must be among {', '.join(LOSSES)}, but one is {unknown[0]!r}")


@dataclass(frozen=True)
class Row:
    name: str
    overrides: list[str] = field(default_factory=list)  # of the recipe, such as finetune.ngram=3
    recipe: str = ""  # a file beside the table's (default: the table's recipe)
    seeds: list[int] = field(default_factory=list)  # (default: the table's)
    ways: list[str] = field(default_factory=list)  # (default: all that the model family can)
    control: str = ""  # a row that it is also tested against, in the same way (default: none)
    published: dict[str, float] = field(default_factory=dict)  # BLEU elsewhere, by way of decoding


@dataclass(frozen=True)
class LanguageModelConfig:
    text: str  # a text file in the target language
    order: int = 4

    def __post_init__(self) -> None:
        if not 1 <= self.order <= MAX_ORDER:
            raise UsageError(f"lm.order must be from 1 to {MAX_ORDER}, but is {self.order}")


@dataclass(frozen=True)
class Table:
    title: str
    output: str  # directory of all that is made
    test: TestConfig
    rows: list[Row]
    recipe: str = ""  # of all rows that name none, beside this file
    overrides: list[str] = field(default_factory=list)  # of every row's recipe, before the row's own
    seeds: list[int] = field(default_factory=lambda: [1])
    ways: dict[str, Way] = field(default_factory=dict)  # (default: argmax)
    baseline: str = ""  # the row that the others are tested against (default: the first)
    lm: LanguageModelConfig | None = None
    meteor: str = ""  # the target language, for METEOR where its program is installed (default: none)
    about: str = ""  # what the reader must know
    published: str = ""  # where the rows' published figures stand, and what they are of

    def __post_init__(self) -> None:
        if not self.output:
            raise UsageError("output must be a directory, but is empty")
        if not self.ways:
            self.ways["argmax"] = Way()
        names = [row.name for row in self.rows]
        if not names:
            raise UsageError("rows must hold at least one row, but is empty")
        if twice := {name for name in names if names.count(name) > 1}:
            raise UsageError(f"rows must have different names, but two are called {min(twice)!r}")
        if odd := [name for name in names if "=" in name or not name.strip() or not name.isprintable()]:
            raise UsageError(
                f"names of rows must be one line without =, which ends them in commands, but one is {odd[0]!r}"
            )
        if self.baseline and self.baseline not in names:
            raise UsageError(f"baseline must be one of {', '.join(names)}, but is {self.baseline!r}")
        _check_overrides("the table", self.overrides)
        for row in self.rows:
            seeds = self.seeds_of(row)
            if not seeds or len({*seeds}) < len(seeds) or not all(0 <= seed < SEEDS for seed in seeds):
                raise UsageError(
                    f"seeds of {row.name!r} must be different numbers from 0 to {SEEDS - 1}, but are {seeds}"
                )
            if row.control and (row.control not in names or row.control == row.name):
                raise UsageError(f"control of {row.name!r} must be another row, but is {row.control!r}")
            _check_overrides(repr(row.name), row.overrides)
            for key, names_of_ways in (("ways", row.ways), ("published", row.published)):
                if unknown := [name for name in names_of_ways if name not in self.ways]:
                    raise UsageError(
                        f"{key} of {row.name!r} must be among {', '.join(self.ways)}, but one is {unknown[0]!r}"
                    )
            if row.published and not self.published:
                raise UsageError(f"published must tell where the figure of {row.name!r} stands, but is not given")
        if self.meteor and self.meteor not in LANGUAGES:
            raise UsageError(f"meteor must be one of {', '.join(LANGUAGES)}, but is {self.meteor!r}")
        if self.lm is None and (needs := [name for name, way in self.ways.items() if way.lm]):
            raise UsageError(f"lm must say what the way {needs[0]!r} takes its language model from, but is not given")

    def seeds_of(self, row: Row) -> list[int]:
        return row.seeds or self.seeds

    def ways_of(self, row: Row, recipe: Recipe) -> Iterator[tuple[str, Way]]:
        """The ways in which a row is decoded: those it names, or all that its family can."""
        family = recipe.model.family
        for name, way in self.ways.items():
            can = family in ("ctc", "sctc") or not (way.tune or way.lm)
            wanted = name in row.ways if row.ways else family in way.families
            if wanted and not can:
                raise UsageError(f"ways of {row.name!r} must fit a {family} model, but {name!r} is tuned or has an LM")
            if wanted and way.teacher and recipe.teacher is None:
                raise UsageError(f"ways of {row.name!r} must fit its recipe, but {name!r} needs a teacher")
            if wanted:
                yield name, way


def _check_overrides(whose: str, overrides: list[str]) -> None:
    for override in overrides:
        if not isinstance(override, str):  # a colon in place of the equals sign makes a mapping
            raise UsageError(f"overrides of {whose} must be like finetune.ngram=3, but one is {override}")
        for key in ("seed", "output"):
            if override.startswith(f"{key}="):
                raise UsageError(f"overrides of {whose} must not set {key}, which the table does, but one does")


def load_table(path: Path) -> tuple[Table, dict[str, Recipe]]:
    """A table, and the recipe of each of its rows, for the first seed."""
    table = parse_settings(Table, read_settings(path, "a table"), (), name=str(path))
    recipes = {}
    for row in table.rows:
        if not (name := row.recipe or table.recipe):
            raise UsageError(f"{path}: a row must name a recipe, or the table one for all, but {row.name!r} has none")
        try:
            recipes[row.name] = load_recipe(path.parent / name, [*table.overrides, *row.overrides])
        except UsageError as error:
            raise UsageError(f"{path}: the row {row.name!r}: {error}") from None
        if (seed := recipes[row.name].seed) not in table.seeds_of(row):
            raise UsageError(
                f"{path}: seeds of {row.name!r} must have that of its recipe, {seed}, but are {table.seeds_of(row)}"
            )
        if not list(table.ways_of(row, recipes[row.name])):
            family = recipes[row.name].model.family
            raise UsageError(f"{path}: ways must decode every row, but none is for {row.name!r}, a {family} model")
    return table, recipes
