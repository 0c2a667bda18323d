"""Models as rivals for `nmla.evaluation.speed`, each in a process of its own."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import ctranslate2  # noqa: F401  # before torch, or its threads would be counted with torch's, and sleep at once
import torch

from nmla.config import COMPUTE_TYPES
from nmla.data.workers import Workers
from nmla.decoding.teacher import MODEL, Teacher
from nmla.decoding.translator import Translator
from nmla.errors import UsageError
from nmla.evaluation.speed import THREADS, System, Texts, timed
from nmla.models.pretrained import read_config

SEARCHES = {"greedy": 1, "beam 5": 5}  # of autoregressive models
BEAM_SIZE, ALPHA = 20, 0.3  # with a language model, of a model that is tuned for none


@contextlib.contextmanager
def load_systems(
    directories: Mapping[str, Path],
    *,
    threads: Sequence[int] = THREADS,
    compute_types: Sequence[str] = COMPUTE_TYPES,
    **search: Any,
) -> Iterator[list[System]]:
    """The ways in which each model, known by its name, can be decoded, as long as the context lasts.

    Models that write all words at once: by argmax and, if they are tuned for a search or `search` asks for one, by
    that. It is `lm`, `beam_size`, `alpha` and `beta`. Each also as it comes, when not asked to be fast. Autoregressive
    ones, ours and CTranslate2's: greedily and by beam search, in each of the compute types.

    Each model has a process of its own. In one process each has threads of its own too, and as soon as all of them
    are more than the cores, the OpenMP runtime puts them to sleep between any two products. It also counts torch's
    threads, unless CTranslate2 was imported first.
    """
    systems: list[System] = []
    kinds = {of: "" if (of / MODEL).is_file() else read_config(of)["model_type"] for of in directories.values()}
    given = [of for of in ("lm", "alpha", "beta") if search.get(of) is not None]
    if given and not {"ctc", "sctc"} & {*kinds.values()}:
        raise UsageError(f"--{given[0]} is for the search of ctc and sctc models, but no system is one")
    with contextlib.ExitStack() as processes:

        def host(of: Callable[..., list[System]], *arguments: Any) -> None:
            workers = processes.enter_context(Workers(1))
            [found] = workers.map(_host, [(of, *arguments)])
            for i, system in enumerate(found):
                seconds, lengths = (partial(_ask, workers, i, what) for what in ("seconds", "lengths"))
                systems.append(replace(system, seconds=seconds, lengths=lengths))

        for name, directory in directories.items():
            if kinds[directory] in ("", "autoregressive"):
                for kind in compute_types:
                    host(_sequential, name, directory, sorted(set(threads)), kind)
            else:
                host(_parallel, name, directory, search)
        yield systems


_hosted: list[System] = []  # in a process that measures: its systems


def _host(of: Callable[..., list[System]], *arguments: Any) -> list[System]:
    """Load a model here; what is told of its systems is all but what only works here."""
    _hosted[:] = of(*arguments)
    return [replace(system, seconds=_not_here, lengths=_not_here) for system in _hosted]


def _not_here(*_: object) -> Any:
    raise AssertionError("a system of another process was not asked there")


def _ask(workers: Workers, system: int, what: str, *arguments: Any) -> Any:
    [answer] = workers.map(_answer, [(system, what, *arguments)])
    return answer


def _answer(system: int, what: str, *arguments: Any) -> Any:
    return getattr(_hosted[system], what)(*arguments)


def _sequential(name: str, directory: Path, threads: Sequence[int], kind: str) -> list[System]:
    # One batch at a time, on all threads, as torch works. CTranslate2 can also give each thread a batch of its own,
    # but then a sentence that is alone has one thread, and of batches of 32 there are more than 32 at work.
    teachers = {n: Teacher(directory, compute_type=kind, workers=1, threads=n) for n in threads}
    one = teachers[threads[0]]

    def translate(beam_size: int, texts: Texts, batch_size: int, threads: int) -> object:
        return teachers[threads].translate(texts, beam_size, batch_size)

    return [
        System(
            f"{name} {search} {kind}",
            partial(timed, partial(translate, beam_size)),
            lambda texts: [len(one.source_tokens(text)) for text in texts],
            one.max_source_tokens,
            reference=f"{name} {search}" if beam_size == 5 else "",
        )
        for search, beam_size in SEARCHES.items()
    ]


def _parallel(name: str, directory: Path, search: dict[str, Any]) -> list[System]:
    translator, ways = _ways(name, directory, **search)

    def translate(options: dict[str, Any], texts: Texts, batch_size: int, threads: int) -> object:
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        return translator.translate_batch(texts, **options, max_batch_size=batch_size)

    return [
        System(
            f"{name} {way}, default mode" if default else f"{name} {way}",
            partial(timed, partial(translate, options | {"fast": not default, "batch_type": "examples"})),
            lambda texts: [len(translator.tokenizer.encode(text)) for text in texts],
            translator.max_source_tokens,
            alone=default,
        )
        for way, options in ways.items()
        for default in (False, True)
    ]


def _ways(
    name: str,
    directory: Path,
    *,
    lm: Path | None = None,
    beam_size: int | None = None,
    alpha: float | None = None,
    beta: float | None = None,
) -> tuple[Translator, dict[str, dict[str, Any]]]:
    """A model that writes all words at once, and the options of each way to decode it."""
    family = read_config(directory)["model_type"]
    if family not in ("ctc", "sctc"):
        lm = alpha = beta = None  # which are of no use to it, but maybe to another
    translator = Translator.load(directory, lm)
    tuned = translator.decoding
    plain = {"beam_size": 1, "num_hypotheses": 1, "alpha": 0.0, "beta": 0.0, "return_scores": False}
    ways = {"argmax": plain}
    if beam_size is None:
        beam_size = BEAM_SIZE if lm is not None and tuned.beam_size == 1 else tuned.beam_size
    if beam_size != 1:
        # How fast, not how good: any weight will do, as long as the language model is asked.
        weight = (tuned.alpha or (ALPHA if lm is not None else 0.0)) if alpha is None else alpha
        weights = {"alpha": weight, "beta": tuned.beta if beta is None else beta}
        ways[f"beam {beam_size}"] = plain | {"beam_size": beam_size} | weights
    elif lm is not None or alpha or beta:
        raise UsageError(f"{name}: a language model and weights are for a search, but beam_size is 1")
    for options in ways.values():
        translator.settings(**options)  # refuses what it cannot do
    return translator, ways
