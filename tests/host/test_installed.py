"""What is said where the host that a run needs is not installed."""

from __future__ import annotations

import platform
import re
from pathlib import Path

import pytest

import calfat_plugin
from calfat_plugin.errors import HostError
from calfat_plugin.host import installed
from tests.cli.runner import RECIPES, calfat
from tests.snapshot import TextSnapshot


@pytest.fixture
def without_fedml(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """Python 3.13 without any host, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    has(monkeypatch)
    monkeypatch.setattr(installed, "FEDML_INSTALLS", False)
    monkeypatch.setattr(platform, "python_version", lambda: "3.13.0")
    for begins in ("runs.directory.RunDirectory.open", "cli.party.run_all", "cli.suite.run_all"):
        monkeypatch.setattr(f"calfat_plugin.{begins}", lambda *_, **__: pytest.fail("a run was begun"))
    return monkeypatch


def has(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    monkeypatch.setattr(installed, "version_of", versions.get)


@pytest.mark.parametrize("flower", [{}, {"flwr": "1.42.0"}])
@pytest.mark.parametrize("installs", [True, False])
def test_what_to_do_depends_on_python_and_on_what_is_there(
    flower: dict[str, str], installs: bool, without_fedml: pytest.MonkeyPatch, snapshot: TextSnapshot
) -> None:
    has(without_fedml, **flower)
    without_fedml.setattr(installed, "FEDML_INSTALLS", installs)
    with pytest.raises(HostError) as refused:
        installed.refuse_without_fedml()
    snapshot(str(refused.value))
    has(without_fedml, fedml="0.9.6", **flower)
    installed.refuse_without_fedml()


RUN = ["run", "calfat_digits"]
SUITE = str(RECIPES.parent / "studies" / "paper" / "small_table10.yaml")
SILO = [*RUN, "--set", "common_args.training_type=cross_silo", "--set", "comm_args.backend=GRPC"]


@pytest.mark.parametrize(
    "words",
    [
        RUN,
        [*RUN, "--workers", "2"],
        [*SILO, "--local"],
        [*SILO, "--role", "client", "--rank", "1"],
        ["suite", SUITE],
    ],
    ids=["run", "workers", "local", "client", "suite"],
)
def test_nothing_is_begun_without_a_host(words: list[str], without_fedml: pytest.MonkeyPatch) -> None:
    ended = calfat(*words)
    assert (ended.code, ended.err) == (2, f"error: {_refusal()}\n")
    with pytest.raises(HostError, match=f"^{re.escape(_refusal())}$"):
        calfat_plugin.run(RECIPES / "calfat_digits.yaml", progress=False)
    assert list(Path().iterdir()) == []


def _refusal() -> str:
    with pytest.raises(HostError) as refused:
        installed.refuse_without_fedml()
    return str(refused.value)


def test_checks_and_views_need_no_host(without_fedml: pytest.MonkeyPatch) -> None:
    for words in (
        ["check", "calfat_digits"],
        ["plugins"],
        ["schema"],
        ["recipes"],
        ["suite", SUITE, "--dry-run"],
    ):
        ended = calfat(*words)
        assert (ended.code, ended.err) == (0, ""), words


@pytest.mark.parametrize("version", ["4.25.8", "7.36.2"])
def test_a_protobuf_that_fedml_cannot_be_imported_with_is_named(
    version: str, without_fedml: pytest.MonkeyPatch, snapshot: TextSnapshot
) -> None:
    without_fedml.delenv("PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION", raising=False)
    has(without_fedml, fedml="0.9.6", protobuf=version)
    snapshot(_refusal())
    without_fedml.setenv("PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION", "python")
    installed.refuse_without_fedml()
    without_fedml.delenv("PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION")
    has(without_fedml, fedml="0.9.6", protobuf="3.20.3")
    installed.refuse_without_fedml()
