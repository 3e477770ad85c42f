"""docs/architecture.md names files that exist, and every package; docs/host.md the patches of its host."""

from __future__ import annotations

import re

from tests.cli.runner import ROOT

PACKAGE = ROOT / "calfat_plugin"
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
PACKAGES = PAGE.partition("## Packages")[2].partition("\n## ")[0]


def listed(pattern: str, text: str) -> list[str]:
    found = re.findall(pattern, text, re.MULTILINE)
    assert found
    return found


def test_every_package_has_a_row_with_its_files() -> None:
    rows = dict(listed(r"^\| `(\w+)/` \| .*? \| (.*) \|$", PACKAGES))
    packages = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert set(rows) == packages
    missing = [
        f"{package}/{name}"
        for package, files in rows.items()
        for name in re.findall(r"`([\w/]+(?:\.py|/))`", files)
        if not (PACKAGE / package / name).exists()
    ]
    assert missing == []


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#]+)", PAGE):
        assert (ROOT / "docs" / target).is_file(), target


def test_the_page_of_the_host_names_the_patches() -> None:
    page = (ROOT / "docs" / "host.md").read_text(encoding="utf-8")
    code = (PACKAGE / "host" / "launch.py").read_text(encoding="utf-8")
    assert set(listed(r"`(?:launch|patches)\.(\w+)`", page)) == set(listed(r"^@contextmanager\ndef (\w+)", code))
