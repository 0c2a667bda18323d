"""Markdown tables, as all benchmarks print them."""


def row(*cells: object) -> str:
    return "| " + " | ".join(f"{cell:.2f}" if isinstance(cell, float) else str(cell) for cell in cells) + " |"


def header(*cells: str) -> None:
    print(row(*cells))
    print("|---" + "|--:" * (len(cells) - 1) + "|")


def verdict(text: str, value: float, bar: float, *, at_least: bool = False) -> None:
    met = value >= bar if at_least else value <= bar
    print(row(text, value, f"{'>=' if at_least else '<='} {bar:g}", "yes" if met else "NO"))
