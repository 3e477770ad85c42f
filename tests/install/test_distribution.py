"""What sdist and wheel hold, what they say of themselves, and what works where only the wheel is."""

from __future__ import annotations

import re
import tarfile
import zipfile
from pathlib import Path

import pytest
import yaml
from packaging.metadata import Metadata

from calfat_plugin import __version__
from calfat_plugin.shipped import shipped_files
from tests.cli.runner import ROOT
from tests.install.environments import Offline, fedml_wheel

PAGE = (ROOT / "docs" / "package.md").read_text(encoding="utf-8")
INFO = f"calfat_plugin-{__version__}.dist-info"


@pytest.fixture(scope="module")
def wheel(dist: Path) -> dict[str, bytes]:
    """Name to content of each file of the wheel."""
    (path,) = dist.glob("*.whl")
    assert path.name == f"calfat_plugin-{__version__}-py3-none-any.whl"
    with zipfile.ZipFile(path) as content:
        return {name: content.read(name) for name in content.namelist()}


@pytest.fixture(scope="module")
def metadata(wheel: dict[str, bytes]) -> Metadata:
    """The wheel's metadata; what an index would refuse is an error."""
    return Metadata.from_email(wheel[f"{INFO}/METADATA"], validate=True)


def sources(*patterns: str) -> set[str]:
    return {str(path.relative_to(ROOT)) for pattern in patterns for path in ROOT.glob(pattern) if path.is_file()}


def test_the_wheel_has_the_package_its_recipes_and_nothing_else(wheel: dict[str, bytes]) -> None:
    package = {name for name in sources("calfat_plugin/**/*") if "__pycache__" not in name}
    shipped = {f"calfat_plugin/shipped/{name}" for name in sources("recipes/*.yaml")}
    about = {f"{INFO}/{name}" for name in ("METADATA", "RECORD", "WHEEL", "entry_points.txt", "top_level.txt")}
    assert set(wheel) == {*package, *shipped, *about, f"{INFO}/licenses/LICENSE", "calfat_fedml.pth"}
    assert len(shipped) == len(shipped_files())
    assert {line.split(",")[0] for line in wheel[f"{INFO}/RECORD"].decode().splitlines()} == set(wheel)


def test_the_sdist_has_what_its_tests_and_make_need(dist: Path) -> None:
    (path,) = dist.glob("*.tar.gz")
    with tarfile.open(path) as content:
        names = {name.partition("/")[2] for name in content.getnames()}
    files = ["*.md", "*.yml", "*.py", "*.txt", "*.cfg", "*.toml", "LICENSE", "CITATION.cff", "Makefile", "Dockerfile"]
    kept = ["docs", "examples", "recipes", "studies", "tests", "benchmarks", "build_backend", ".ci"]
    wanted = sources(*files, *(f"{folder}/**/*" for folder in (*kept, "calfat_plugin")))
    assert sorted(name for name in wanted - names if "__pycache__" not in name) == []


def test_the_metadata_name_license_authors_and_pages(metadata: Metadata) -> None:
    assert (metadata.name, str(metadata.version)) == ("calfat-plugin", __version__)
    assert (metadata.license, metadata.license_files) == ("Apache-2.0", ["LICENSE"])
    assert "Apache License\n" in (ROOT / "LICENSE").read_text()
    assert metadata.author == "The calfat-plugin maintainers"
    assert metadata.project_urls
    assert all(url.startswith("https://") for url in metadata.project_urls.values())
    assert metadata.description == PAGE
    assert metadata.description_content_type == "text/markdown"


def test_the_page_on_an_index_has_no_link_into_a_checkout() -> None:
    links = re.findall(r"\]\(([^)]+)\)", PAGE)
    assert links
    assert [link for link in links if not link.startswith("https://")] == []


def test_the_citation_is_of_this_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["cff-version"] == "1.2.0"
    assert (citation["version"], citation["license"]) == (__version__, "Apache-2.0")
    assert citation["authors"]
    assert citation["references"][0]["title"].startswith("CalFAT: Calibrated Federated Adversarial Training")


def test_commands_of_the_page_work_from_the_wheel_in_any_folder(dist: Path, tmp_path: Path) -> None:
    """Recipes and templates are read from the installed package; training is in the slow test."""
    environment = Offline(tmp_path)
    environment.install(next(dist.glob("*.whl")), fedml_wheel(tmp_path))
    (block,) = re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
    install, train, *rest = (line.partition("#")[0].split() for line in block.splitlines())
    assert (install, train) == (["pip", "install", "calfat-plugin"], ["calfat", "run", "calfat_digits"])
    assert [words[1] for words in rest] == ["recipes", "init", "plugins"]
    for command, *words in rest:
        ended = environment.call(command, *words)
        assert (ended.code, ended.err) == (0, ""), ended
    copied = environment.call("calfat", "check", "calfat_digits.yaml")
    assert copied.out.startswith("calfat_digits.yaml: good. calfat with fedavg on digits")
