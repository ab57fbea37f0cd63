"""`python requirements.py EXTRA…`: the requirements of distserve and these extras, a line each, as pyproject.toml in
the current folder has them. Installed by themselves they make a layer of an image that a change of the source leaves
as it is."""

import re
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_OWN = re.compile(r"distserve\[(.+)\]")  # an extra that is made of others


def requirements(project: Mapping[str, Any], extras: Sequence[str]) -> Iterator[str]:
    """project: the table of pyproject.toml. Raises KeyError for an extra that is none."""
    yield from project["dependencies"]
    for extra in extras:
        yield from _of_extra(project["optional-dependencies"], extra)


def _of_extra(optional: Mapping[str, Sequence[str]], extra: str) -> Iterator[str]:
    for line in optional[extra]:
        if own := _OWN.fullmatch(line):
            for other in own[1].split(","):
                yield from _of_extra(optional, other)
        else:
            yield line


if __name__ == "__main__":
    with open("pyproject.toml", "rb") as file:
        print("\n".join(dict.fromkeys(requirements(tomllib.load(file)["project"], sys.argv[1:]))))
