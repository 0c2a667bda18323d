"""Kill distillations with SIGKILL at many moments, let each go on, and compare its corpus with an undisturbed one.

Run by test_distill.py in a process of its own: its children are forked before any thread is started.
"""

import functools
import json
import random
import sys
from pathlib import Path

import nmla.distillation.distill as module
from killing import in_child, kill_at_call

TRIALS = 24


def files(corpus: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in corpus.iterdir()}


def main(corpus: Path, teachers: list[Path], workplace: Path) -> None:
    module.PART_SOURCES = 40
    rng = random.Random(1)
    workplace.mkdir()

    def distill(name: str) -> None:
        module.distill(corpus=corpus, teachers=teachers, output=workplace / name, beam_size=2, threads=2)

    events = workplace / "events"
    assert not in_child(lambda: kill_at_call(lambda: distill("whole"), 0, events))
    count, expected = int(events.read_text()), files(workplace / "whole")
    killed, different = 0, []
    for trial in range(TRIALS):
        name = f"trial-{trial}"
        work = functools.partial(distill, name)
        at = rng.randrange(1, count * 95 // 100)
        killed += in_child(functools.partial(kill_at_call, work, at, events))
        if not (workplace / name).exists():
            assert not in_child(work)
        if files(workplace / name) != expected:
            different.append(name)
    left = [path.name for path in workplace.iterdir() if path.name.startswith(".")]
    print(json.dumps({"killed": killed, "different": different, "left": left}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), [Path(path) for path in sys.argv[3:]], Path(sys.argv[2]))
