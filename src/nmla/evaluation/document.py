"""A document of text, tables, pictures and code, as one HTML page that stands alone or as Markdown."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from urllib.parse import quote

from nmla.evaluation.report import page, table
from nmla.files import check_output, write_text


@dataclass(frozen=True)
class Figures:
    """A table of numbers; of text if `text`."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    text: bool = False


@dataclass(frozen=True)
class Picture:
    svg: str


@dataclass(frozen=True)
class Code:
    text: str
    folded: str = ""  # under this name, until it is opened


Block = str | Figures | Picture | Code
Section = tuple[str, Sequence[Block]]


def to_html(title: str, sections: Sequence[Section]) -> str:
    return page(
        title, [(heading, "\n".join(_html(block) for block in blocks if block)) for heading, blocks in sections]
    )


def _html(block: Block) -> str:
    match block:
        case Figures(header, rows, text):
            kind = "text" if text else "numbers noted" if header[-1] == "note" else "numbers"
            return table(header, [list(map(escape, row)) for row in rows], kind)
        case Picture(svg):
            return f'<div class="wide">{svg}</div>'
        case Code(text, folded):
            code = f"<pre>{escape(text)}</pre>"
            return f"<details><summary>{escape(folded)}</summary>{code}</details>" if folded else code
    return "<p>" + re.sub("`([^`]+)`", r"<code>\1</code>", escape(block)) + "</p>"


def to_markdown(title: str, sections: Sequence[Section], pictures: Sequence[str] = ()) -> str:
    """Pictures are shown from files of these names, in their order; those that have none are left out."""
    parts = [f"# {title}"] if title else []
    files = iter(pictures)
    for heading, blocks in sections:
        parts += [f"## {heading}"] if heading else []
        for block in blocks:
            if not isinstance(block, Picture):
                parts += [_markdown(block)] if block else []
            elif file := next(files, ""):
                parts.append(f"![{heading or title}]({quote(file)})")
    return "\n\n".join(parts) + "\n"


def _markdown(block: str | Figures | Code) -> str:
    match block:
        case Figures(header, rows, text):
            return markdown_table(header, rows, text)
        case Code(text, folded):
            return (f"{folded}:\n\n" if folded else "") + "\n".join(f"    {line}" for line in text.rstrip().split("\n"))
    return block


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]], text: bool = False) -> str:
    """Numbers stand to the right in their columns; text stands to the left, as the first column always does."""
    rule = ["---", *("---" if text or name == "note" else "--:" for name in header[1:])]
    told = [[_literal(cell) for cell in row] for row in rows] if text else rows
    cells = ([cell.replace("|", "\\|") for cell in line] for line in (header, rule, *told))
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


def _literal(text: str) -> str:
    """Of anybody's text, nothing that Markdown would take for its own."""
    return re.sub(r"([\\`*_<\[&~])", r"\\\1", " ".join(text.splitlines()))


def write_document(path: Path, title: str, sections: Sequence[Section]) -> None:
    """One page if the name ends in .html, else Markdown, with its pictures in files beside it."""
    if path.suffix == ".html":
        write_text(path, to_html(title, sections))
        return
    pictures = [block.svg for _, blocks in sections for block in blocks if isinstance(block, Picture)]
    names = [f"{path.stem}-{number}.svg" for number in range(1, len(pictures) + 1)]
    for name in names:
        check_output(path.with_name(name))
    for name, svg in zip(names, pictures, strict=True):
        write_text(path.with_name(name), svg)
    write_text(path, to_markdown(title, sections, names))
