"""The reference table of docs/configuration.md, from the code."""

from itertools import groupby

from distserve.config.settings import Setting, settings


def markdown() -> str:
    """Every setting, a table for each section."""
    parts = []
    for section, found in groupby(settings().values(), key=lambda s: s.section):
        rows = [
            f"| `{s.name}` | {_default(s)} | {s.expected.replace('|', chr(92) + '|')} | {_text(s)} |" for s in found
        ]
        parts.append(
            "\n".join([f"### {section}", "", "| key | default | takes | meaning |", "|---|---|---|---|", *rows])
        )
    return "\n\n".join(parts) + "\n"


def _default(s: Setting) -> str:
    text = s.text(s.default)
    return f"`{text}`" if text else "(empty)"


def _text(s: Setting) -> str:
    return s.description.replace("|", "\\|")
