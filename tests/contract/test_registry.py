"""Discovery: what installed distributions offer is found; what is wrong with one is told and stops no other."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from calfat_plugin import __version__
from calfat_plugin.entries import EvaluatorEntry, ModelEntry, TrainerEntry
from calfat_plugin.errors import PluginError
from calfat_plugin.experiment import assemble
from calfat_plugin.hookspecs import hookimpl
from calfat_plugin.recipe.document import parse_document
from calfat_plugin.registry import BLOCK_VARIABLE, BUILT_IN, Provider, Registry
from tests.cli.runner import Ended, python
from tests.contract.distributions import install
from tests.snapshot import TextSnapshot

HEAD = "from calfat_plugin.entries import *\nfrom calfat_plugin.hookspecs import hookimpl\n"
Install = Callable[..., None]


def offering(*names: str) -> str:
    """A module that offers local trainers."""
    entries = ", ".join(f"TrainerEntry({name!r}, build=dict, summary='of a test')" for name in names)
    return f"{HEAD}@hookimpl\ndef calfat_local_trainers():\n    return [{entries}]\n"


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Installs distributions into a folder that comes first on the search path."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delenv(BLOCK_VARIABLE, raising=False)
    before = set(sys.modules)

    def add(name: str, version: str, modules: dict[str, str], **plugins: str) -> None:
        install(tmp_path, name, version, modules, **plugins)

    yield add
    for module in set(sys.modules) - before:
        if not module.startswith("calfat_plugin"):
            del sys.modules[module]


def failures(registry: Registry) -> list[str]:
    return [str(failure) for failure in registry.failures]


# --- what works -------------------------------------------------------------------------------------------------------


def test_an_installed_plugin_is_found(site: Install) -> None:
    site("my-fat", "1.1", {"my_hooks": offering("my-fat", "my-fat-2")}, my_fat="my_hooks")
    registry = Registry.load()
    assert {"my-fat", "my-fat-2", "calfat"} <= set(registry.names(TrainerEntry))
    assert registry.find(TrainerEntry, "my-fat")[0].summary == "of a test"
    assert registry.provider(TrainerEntry, "my-fat") == Provider("my-fat", "1.1", "my-fat")
    assert registry.provider(TrainerEntry, "calfat") is BUILT_IN
    assert registry.plugins() == (BUILT_IN, Provider("my-fat", "1.1", "my-fat"))
    assert registry.failures == []


def test_an_entry_point_may_name_an_instance(site: Install) -> None:
    source = f"""{HEAD}
class Hooks:
    @hookimpl
    def calfat_models(self):
        yield ModelEntry("tiny", build=dict)
hooks = Hooks()
"""
    site("my-models", "2.0", {"my_models_hooks": source}, models="my_models_hooks:hooks")
    assert "tiny" in Registry.load().names(ModelEntry)


def test_tests_and_embedders_may_refuse_discovery_and_pass_plugins_in(site: Install) -> None:
    site("my-fat", "1.1", {"my_hooks": offering("my-fat")}, my_fat="my_hooks")
    registry = Registry.load(entry_points=False, plugins=[_offer(TrainerEntry("passed", build=dict))])
    assert "my-fat" not in registry.names(TrainerEntry)
    assert registry.provider(TrainerEntry, "passed").distribution == "passed in"


@pytest.mark.parametrize("blocked", ["my-fat", "MY_FAT", "other, my.fat", "the-plugin"])
def test_plugins_can_be_blocked_from_the_environment(
    blocked: str, site: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    site("my-fat", "1.1", {"my_hooks": "raise RuntimeError('imported')"}, the_plugin="my_hooks")
    monkeypatch.setenv(BLOCK_VARIABLE, blocked)
    registry = Registry.load()
    assert registry.plugins() == (BUILT_IN,)
    assert registry.failures == []


def test_the_first_of_two_copies_of_a_distribution_counts(site: Install, tmp_path: Path) -> None:
    older = tmp_path / "older"
    older.mkdir()
    sys.path.append(str(older))
    try:
        site("my-fat", "2.0", {"my_hooks": offering("my-fat")}, my_fat="my_hooks")
        install(older, "My.Fat", "1.0", {"my_old_hooks": offering("my-old-fat")}, my_fat="my_old_hooks")
        registry = Registry.load()
    finally:
        sys.path.remove(str(older))
    assert registry.provider(TrainerEntry, "my-fat").version == "2.0"
    assert "my-old-fat" not in registry.names(TrainerEntry)


def test_discovery_survives_the_host_s_own_importlib_metadata(site: Install, tmp_path: Path) -> None:
    """fedml pins importlib-metadata 1.7, which takes the search for distributions over when imported."""
    site("my-fat", "1.1", {"my_hooks": offering("my-fat")}, my_fat="my_hooks")
    program = (
        "import importlib_metadata\n"
        "from calfat_plugin.registry import Registry\n"
        "print([str(provider) for provider in Registry.load().plugins()][-1])"
    )
    assert python(program, path=(tmp_path,)) == Ended(0, "my-fat 1.1\n", "")


# --- names ------------------------------------------------------------------------------------------------------------


def _offer(*entries: TrainerEntry) -> Any:
    return SimpleNamespace(calfat_local_trainers=hookimpl(lambda: entries))


def test_a_number_at_the_end_of_a_name_sets_an_option() -> None:
    registry = Registry.load(entry_points=False)
    entry, named = registry.find(EvaluatorEntry, "pgd7")
    assert (entry.name, named) == ("pgd", {"steps": 7})
    assert registry.find(EvaluatorEntry, "pgd")[1] == {}
    with pytest.raises(
        PluginError, match=r"^no evaluator called 'pgd9999999': its number may have 6 digits at most\.$"
    ):
        registry.find(EvaluatorEntry, "pgd9999999")
    with pytest.raises(PluginError):
        registry.find(EvaluatorEntry, "fgsm7")


def test_a_whole_name_wins_over_a_name_with_a_number() -> None:
    registry = Registry.load(entry_points=False)
    assert registry.find(ModelEntry, "resnet18")[1] == {}


def test_an_unknown_name_is_reported_with_all_that_may_be_meant(site: Install) -> None:
    site("my-fat", "1.1", {"my_hooks": offering("my-fat")}, my_fat="my_hooks")
    site("slow-at", "0.2", {"slow_hooks": "import apex_of_nvidia"}, slow_at="slow_hooks")
    registry = Registry.load()
    built_in = ", ".join(name for name in registry.names(TrainerEntry) if name != "my-fat")
    with pytest.raises(PluginError) as raised:
        registry.find(TrainerEntry, "My-Fatt")
    assert str(raised.value) == (
        f"no local trainer called 'My-Fatt'. Did you mean 'my-fat'? Known: {built_in} (calfat-plugin {__version__}); "
        "my-fat (my-fat 1.1). Not loaded: slow-at (slow-at 0.2): ModuleNotFoundError: No module named 'apex_of_nvidia'."
    )


# --- clashes ----------------------------------------------------------------------------------------------------------


def refusal() -> str:
    with pytest.raises(PluginError) as raised:
        Registry.load()
    return str(raised.value)


def test_a_name_offered_by_two_distributions_is_an_error_until_one_of_them_is_blocked(
    site: Install, snapshot: TextSnapshot, monkeypatch: pytest.MonkeyPatch
) -> None:
    site("my-fat", "1.1", {"my_hooks": offering("fat")}, mine="my_hooks")
    site("your-fat", "0.3", {"your_hooks": offering("fat")}, yours="your_hooks")
    snapshot(refusal())
    monkeypatch.setenv(BLOCK_VARIABLE, "your-fat")
    assert Registry.load().provider(TrainerEntry, "fat").distribution == "my-fat"


def test_nobody_replaces_a_built_in(site: Install) -> None:
    site("my-fat", "1.1", {"my_hooks": offering("fedpgd")}, my_fat="my_hooks")
    assert refusal() == (
        f"two distributions offer a local trainer called 'fedpgd': calfat-plugin {__version__} and my-fat 1.1. "
        "Uninstall one of them, or start with CALFAT_BLOCK_PLUGINS=my-fat."
    )


def test_a_distribution_that_clashes_with_itself_is_reported_where(site: Install) -> None:
    site("my-fat", "1.1", {"a_hooks": offering("fat"), "b_hooks": offering("fat")}, a="a_hooks", b="b_hooks")
    assert refusal() == "my-fat 1.1 offers a local trainer called 'fat' twice, in its plugins a and b."


def test_a_plugin_that_clashes_with_itself_is_reported_where(site: Install) -> None:
    site("my-fat", "1.1", {"my_hooks": offering("fat", "fat")}, mine="my_hooks")
    assert refusal() == "plugin mine (my-fat 1.1) offers a local trainer called 'fat' twice."


# --- broken plugins ---------------------------------------------------------------------------------------------------

YIELD = f"{HEAD}@hookimpl\ndef calfat_local_trainers():\n    "
BROKEN = {
    "missing module": "import no_such_module",
    "syntax error": "def broken(:",
    "raises on import": "raise RuntimeError('no\\n  licence')",
    "ends the process": "import sys; sys.exit('bye')",
    "raises without words": "assert False",
    "misspelt hook": f"{HEAD}@hookimpl\ndef calfat_local_trainer(): return []",
    "hook that raises": f"{YIELD}raise KeyError('x')",
    "hook that raises later": f"{YIELD}yield TrainerEntry('x', build=dict)\n    1/0",
    "nothing yielded": f"{YIELD}TrainerEntry('x', build=dict)",
    "one entry returned": f"{YIELD}return TrainerEntry('x', build=dict)",
    "class yielded": f"{YIELD}yield dict",
    "entry of another kind": f"{YIELD}yield ModelEntry('x', build=dict)",
    "no end": f"{YIELD}while True: yield TrainerEntry('x', build=dict)",
    "field of another type": f"{YIELD}yield TrainerEntry('x', build=dict, citation='Me, 2026')",
    "name in upper case": f"{YIELD}yield TrainerEntry('MyFAT', build=dict)",
    "argument of its own": f"{HEAD}@hookimpl\ndef calfat_run_started(rum): pass",
    "half way": f"{YIELD}yield TrainerEntry('x', build=dict)\n"
    "@hookimpl\ndef calfat_run_started(run): pass\n@hookimpl\ndef calfat_run_finished(run, result, more): pass",
    "class in place of a module": f"{HEAD}class Hooks:\n    @hookimpl\n    def calfat_local_trainers(self): return []",
    "entry point to nothing": "",
}
TARGETS = {"class in place of a module": "bad_hooks:Hooks", "entry point to nothing": "bad_hooks:hooks"}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_plugin_is_reported_and_survived(case: str, site: Install, snapshot: TextSnapshot) -> None:
    site("bad", "0.1", {"bad_hooks": BROKEN[case]}, bad=TARGETS.get(case, "bad_hooks"))
    site("good", "1.0", {"good_hooks": offering("good")}, good="good_hooks")
    registry = Registry.load()
    (failure,) = failures(registry)
    assert failure.startswith("bad (bad 0.1): ")
    assert "\n" not in failure
    snapshot(failure)
    assert registry.plugins() == (BUILT_IN, Provider("good", "1.0", "good"))
    assert "good" in registry.names(TrainerEntry)
    assert "x" not in registry.names(TrainerEntry)
    assert registry.listeners() == ()


DAMAGED = [
    ("entry_points.txt", b"[console_scripts]\ncaf\xe9 = a:b\n", "UnicodeDecodeError"),
    ("entry_points.txt", b"[console_scripts]\nno equals sign\n", "TypeError"),  # Python's
    ("METADATA", b"", "METADATA has no name"),
    ("METADATA", b"Name: x\nAuthor: M\xfcller\n", "UnicodeDecodeError"),
    ("METADATA", b"Metadata-Version: 2.1\nName: nobody\nVersion: 1\n", "PackageNotFoundError"),
]


def test_damaged_distributions_are_reported_and_left_out(site: Install, tmp_path: Path) -> None:
    site("good", "1.0", {"good_hooks": offering("good")}, good="good_hooks")
    failures = set()
    for number, (file, content, reason) in enumerate(DAMAGED):
        name = f"legacy{number}"
        site(name, "1.0", {f"{name}_hooks": offering(name)}, **{name: f"{name}_hooks"})
        folder = tmp_path / f"{name}-1.0.dist-info"
        (folder / file).write_bytes(content)
        failures.add(f"{name} ({name} 1.0): {folder} is damaged ({reason}")
    registry = Registry.load()
    found = sorted(map(str, registry.failures))
    starts = sorted(failures)
    assert [text[: len(start)] for text, start in zip(found, starts, strict=True)] == starts
    assert registry.plugins()[-1] == Provider("good", "1.0", "good")


def test_a_damaged_distribution_can_be_blocked(site: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site("legacy-thing", "1.0", {}, legacy="legacy_hooks")
    (tmp_path / "legacy_thing-1.0.dist-info" / "METADATA").write_text("")
    assert len(Registry.load().failures) == 1
    monkeypatch.setenv(BLOCK_VARIABLE, "legacy-thing")
    assert Registry.load().failures == []


def test_two_objects_of_one_class_may_be_passed_in() -> None:
    plugins = [_offer(TrainerEntry(name, build=dict)) for name in ("one", "two")]
    assert {"one", "two"} <= set(Registry.load(entry_points=False, plugins=plugins).names(TrainerEntry))


def test_who_passes_a_plugin_in_hears_of_a_hook_that_breaks() -> None:
    broken = SimpleNamespace(calfat_local_trainers=hookimpl(lambda: {}["x"]), __name__="Broken")
    with pytest.raises(PluginError, match=r"^Broken: KeyError: 'x'$"):
        Registry.load(entry_points=False, plugins=[broken])


# --- a distribution that requires another version of this package -----------------------------------------------------


@pytest.mark.parametrize(
    ("requirement", "unmet"),
    [
        ("calfat-plugin>=99", "calfat-plugin>=99"),
        ("calfat_plugin (<0.1)", "calfat-plugin<0.1"),
        ("Calfat.Plugin[grpc] ==99.* ; python_version > '3'", "calfat-plugin==99.*"),
        (f"calfat-plugin<={__version__}", ""),
        ("calfat-plugin", ""),
        ("calfat-plugin>=99 ; extra == 'new'", ""),
        ("calfat-plugin>=99 ; python_version < '3'", ""),
        ("calfat-plugin-more>=99", ""),
        ("calfat-plugin >= >= 1", ""),
        ("numpy>=99", ""),
    ],
)
def test_what_a_distribution_requires_of_this_package_is_known(
    requirement: str, unmet: str, site: Install, tmp_path: Path
) -> None:
    modules = {"my_hooks": offering("my-fat")}
    install(tmp_path, "my-fat", "1.1", modules, ["torch>=2", requirement], my_fat="my_hooks")
    assert Registry.load().provider(TrainerEntry, "my-fat").unmet == unmet


def test_a_recipe_that_picks_a_plugin_of_another_version_is_warned_at_the_key(site: Install, tmp_path: Path) -> None:
    install(tmp_path, "my-fat", "1.1", {"my_hooks": offering("my-fat")}, ["calfat-plugin>=99"], my_fat="my_hooks")
    registry = Registry.load()
    recipe = "data_args: {dataset: digits}\nmodel_args: {model: cnn_small}\ncalfat:\n  trainer: "
    complaint = (
        f"my-fat 1.1 requires calfat-plugin>=99, and this is calfat-plugin {__version__}: it may fail or measure "
        "something else. Install versions that fit together."
    )
    picks = assemble(parse_document(recipe + "my-fat", "r.yaml"), registry)
    assert f"r.yaml:4: calfat.trainer: 'my-fat' is of {complaint}" in picks.warnings
    others = assemble(parse_document(recipe + "calfat", "r.yaml"), registry)
    assert "my-fat" not in str(others.warnings)


def test_a_plugin_that_fails_to_load_names_the_version_that_it_requires(site: Install, tmp_path: Path) -> None:
    modules = {"my_hooks": "from calfat_plugin import NotYetThere\n"}
    install(tmp_path, "my-fat", "1.1", modules, ["calfat-plugin>=99"], my_fat="my_hooks")
    (said,) = failures(Registry.load())
    assert said.startswith("my-fat (my-fat 1.1): ImportError: cannot import name 'NotYetThere'")
    assert f". my-fat 1.1 requires calfat-plugin>=99, and this is calfat-plugin {__version__}" in said
