"""What a user asks to run: a recipe with its overrides, checked, and where to write."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from calfat_plugin.experiment import Experiment, assemble
from calfat_plugin.host.runtimes import runtime_of, supported_runtime
from calfat_plugin.recipe.document import Document
from calfat_plugin.recipe.plugin_files import with_plugins
from calfat_plugin.registry import Registry
from calfat_plugin.runs.compute import with_resolved_precision


@dataclass(frozen=True)
class Request:
    """One run, or the continuation of one."""

    experiment: Experiment
    run_dir: Path | None
    resume: bool
    command: list[str]
    workers: int = 0  # that train a simulation's clients side by side; 0: this process trains them
    profile: bool = False
    page: bool = True  # whether the page is drawn when the run is finished

    def __post_init__(self) -> None:
        runtime_of(self.experiment).refuse_without_host()
        object.__setattr__(self, "experiment", with_resolved_precision(self.experiment))


def checked_experiment(
    document: Document,
    overrides: Iterable[str] = (),
    seed: int | None = None,
    *,
    download: bool = False,
    plugins: Iterable[str | Path] = (),
) -> Experiment:
    """Override and resolve a recipe, and refuse what the host cannot run: all that needs neither torch nor FedML."""
    if "axes" in document.data:
        raise document.mistaken_for("suite", "suite")
    document = with_plugins(document.with_overrides(overrides), plugins)
    if seed is not None:
        document = document.with_value(("common_args", "random_seed"), seed, f"--seed {seed}")
    if download:
        document = document.with_value(("calfat", "dataset", "download"), True, "--download")
    experiment = assemble(document, Registry.for_recipe(document))
    supported_runtime(experiment)
    return experiment
