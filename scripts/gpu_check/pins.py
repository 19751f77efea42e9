"""Which packages are not as another one pins them: a machine may have a PyTorch that vLLM was not built for."""

from __future__ import annotations

from importlib import metadata

from packaging.requirements import Requirement
from packaging.version import Version


def not_as_pinned(package: str) -> list[str]:
    """A line for each package that `package` requires in another version than is installed, or that is missing.

    Nothing where `package` itself is not installed.
    """
    try:
        required = metadata.requires(package) or []
    except metadata.PackageNotFoundError:
        return []
    lines = []
    for text in sorted(required, key=str.lower):
        requirement = Requirement(text)
        if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
            continue
        wanted = f"{requirement.name} {requirement.specifier}".strip()
        try:
            version = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            lines.append(f"{wanted}: not installed")
            continue
        if not requirement.specifier.contains(Version(version), prereleases=True):
            lines.append(f"{wanted}: {version}")
    return lines
