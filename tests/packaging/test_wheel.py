"""The content of the wheel, and its use away from the checkout."""

from __future__ import annotations

import re
import tarfile
import zipfile
from importlib.metadata import PathDistribution
from pathlib import Path

import pytest

from tests.packaging.conftest import Distributions, build
from tests.packaging.outside import PACKAGES, ROOT, Installed

NAME = "kvferry/kvferry"
RAW = f"githubusercontent.com/{NAME}"

REGISTER = """
import os, sys
os.environ["VLLM_PLUGINS"] = "kvferry"
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.plugins import load_general_plugins
load_general_plugins()
found = KVConnectorFactory.get_connector_class_by_name("FerryConnector")
print(found.__name__, sys.modules[found.__module__].__file__)
"""


def members(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def metadata(installed: Installed) -> PathDistribution:
    (folder,) = installed.folder.glob("*.dist-info")
    return PathDistribution(folder)


def modules_of_the_checkout() -> set[str]:
    return {
        str(path.relative_to(ROOT / package))
        for package in PACKAGES
        for path in (ROOT / package / "kvferry").rglob("*.py")
    }


def test_the_wheel_holds_every_module_of_all_packages_and_nothing_else(
    distributions: Distributions,
) -> None:
    found = {name for name in members(distributions.wheel) if ".dist-info/" not in name}
    assert {name for name in found if name.endswith(".py")} == modules_of_the_checkout()
    typed = {f"kvferry/{package}/py.typed" for package in PACKAGES}
    tables = {"kvferry/cli/plan/model_families.json"}
    assert {name for name in found if not name.endswith(".py")} == typed | tables


def test_the_source_distribution_builds_the_same_wheel(
    distributions: Distributions, tmp_path: Path
) -> None:
    with tarfile.open(distributions.source) as archive:
        archive.extractall(tmp_path, filter="data")
    (folder,) = tmp_path.iterdir()
    build(folder, tmp_path / "again", "wheel")
    (again,) = (tmp_path / "again").glob("*.whl")
    assert members(again) == members(distributions.wheel)


def test_vllm_loads_the_plugin_and_finds_the_connector_by_its_name(
    installed: Installed,
) -> None:
    pytest.importorskip("vllm", reason="NOT TESTED: vLLM is not installed")
    said = installed.python("-c", REGISTER, timeout_s=240).splitlines()
    (file,) = (line.split()[1] for line in said if line.startswith("FerryConnector "))
    assert Path(file).is_relative_to(installed.folder)


def test_the_description_on_pypi_has_no_relative_link(installed: Installed) -> None:
    found = metadata(installed).metadata
    assert found["Description-Content-Type"] == "text/markdown"
    described = found.get_payload()  # type: ignore[attr-defined]
    links = set(re.findall(r'(?:\]\(|(?:src|srcset|href)=")([^)"\s]*)', described))
    assert [link for link in links if not link.startswith(("https://", "#"))] == []
    pages, pictures = (
        f"https://{host}/v{found['Version']}/"
        for host in (f"github.com/{NAME}/blob", f"raw.{RAW}")
    )
    ours = {link.partition("#")[0]: link for link in links if NAME in link}
    for link in ours:
        path = link.removeprefix(pages).removeprefix(pictures)
        assert (ROOT / path).is_file(), link
        assert link.startswith(pictures) == path.endswith((".svg", ".png")), link
    assert any(link.startswith(pictures) for link in ours)
    assert any(link.startswith(pages) for link in ours)


def test_the_changelog_and_the_images_have_the_version_of_the_package(
    installed: Installed,
) -> None:
    version = metadata(installed).version
    first = re.search(
        r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE
    )
    assert first is not None
    assert first[1] == version
    texts = [
        path.read_text() for path in (ROOT / "deploy").rglob("*") if path.is_file()
    ]
    tags = [
        tag
        for text in texts
        for tag in re.findall(r"(?:/kvferry[a-z-]*:|newTag: \"?)([0-9][\w.]*)", text)
    ]
    assert len(tags) >= 2
    labels = re.findall(r"image\.version=(\S+)", (ROOT / "Dockerfile").read_text())
    assert {*tags, *labels} == {version}
    assert labels
