"""Imports go one way: who reads a file needs to know only the rooms below it."""

import ast
import subprocess
import sys
from pathlib import Path

import nmla

ROOT = Path(nmla.__file__).parent
# Each may import from those before it; rooms on one line know nothing of each other.
FLOORS = [
    ["errors"],
    ["files", "config", "progress"],
    ["text"],
    ["data"],
    ["losses", "models"],
    ["decoding"],
    ["evaluation"],
    ["training"],
    ["distillation", "engine", "serving"],
    ["reproduce"],
    ["demo_report"],
    ["demo"],
    ["commands"],
    ["cli"],
]
FLOOR = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
OUTSIDE = {"losses": {"torch", "scipy"}}


def imported(path: Path) -> set[str]:
    """Modules that a file imports, anywhere in it, with relative ones spelt out."""
    package = ["nmla", *path.relative_to(ROOT).parent.parts]
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            names.add(".".join([*base, *([node.module] if node.module else [])]))
    return names


def test_imports_go_one_way():
    for path in ROOT.rglob("*.py"):
        room = path.relative_to(ROOT).parts[0].removesuffix(".py")
        if room == "__init__":
            continue
        for name in imported(path):
            parts = name.split(".")
            if parts[0] == "nmla" and len(parts) > 1 and parts[1] != room:
                assert FLOOR[parts[1]] < FLOOR[room], f"{path.name} in {room} must not import {name}"
            if parts[0] != "nmla" and room in OUTSIDE:
                allowed = OUTSIDE[room] | sys.stdlib_module_names
                assert parts[0] in allowed, f"{path.name} in {room} must not import {name}"


def test_help_and_mistyped_settings_wait_for_nothing_heavy(tmp_path):
    """What makes the command line quick: torch and its like are imported only by the commands that need them."""
    code = (
        "import sys\nfrom nmla.cli import parser\nparser().format_help()\n"
        "heavy = {'torch', 'numpy', 'omegaconf', 'rich', 'sacrebleu', 'sentencepiece'} & sys.modules.keys()\n"
        "sys.exit(' '.join(heavy) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
