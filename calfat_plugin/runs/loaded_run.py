"""A model read back from disk: a checkpoint of a run, or weights of the user's own."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from calfat_plugin.disk import expanded
from calfat_plugin.errors import ModelError, OptionError, RunError, UpdateError, did_you_mean, one_line
from calfat_plugin.experiment import Experiment, assemble
from calfat_plugin.experiment.resolve import recipe_of_own_model
from calfat_plugin.peer_text import printable
from calfat_plugin.recipe.document import Document, read_document
from calfat_plugin.recipe.plugin_files import PLUGINS, PluginFile, plugin_files, with_plugins
from calfat_plugin.registry import Registry
from calfat_plugin.run_files import Partition
from calfat_plugin.runs.directory import RunDirectory
from calfat_plugin.typed_json import read_typed

if TYPE_CHECKING:
    import torch
    from torch import nn

    from calfat_plugin.datasets import Dataset
    from calfat_plugin.federation.server import Snapshot
    from calfat_plugin.interfaces import SetUpTask
    from calfat_plugin.models.building import ImageShape

Trust = Callable[[PluginFile], bool]  #: whether to execute a plugin file that this user has not run before

_OTHERWISE = (
    "`calfat attack` takes it with its model: --model package.module:factory --weights {target} --dataset NAME."
)
_TRUST = "add --trust-plugins (from Python: trust_plugins=True)."
_NESTED = ("state_dict", "model_state_dict", "model_state", "model", "net")  # where training scripts put the weights
#: What wrappers put in front of every name: DataParallel, torch.compile, and modules that hold the network (Lightning).
_WRAPPERS = ("module.", "_orig_mod.", "model.", "net.")
_AVERAGED = "n_averaged"  # the count that torch's AveragedModel has beside the weights
_REFUSED = re.compile(r"GLOBAL (\S+) was not an allowed global")  # torch's words


def find_checkpoint(target: Path, checkpoint: str | None = None, otherwise: str = _OTHERWISE) -> tuple[Path, Path]:
    """(checkpoint, run directory) of a finished or unfinished run."""
    if target.is_dir():
        run = RunDirectory(target)
        if not run.recipe.is_file():
            raise RunError(f"{target}: there is no run here (no recipe.yaml). Give a run directory or a checkpoint.")
        name = checkpoint or "last"
        path = run.checkpoint(name)
        if not path.is_file():
            names = sorted(file.stem for file in path.parent.glob("*.safetensors"))
            if not names:
                raise RunError(f"{target}: this run has no checkpoint yet; it has not finished a round.")
            hint = did_you_mean(name, names)
            raise RunError(f"{path}: no such checkpoint.{hint} There are: {', '.join(names)}.")
        return path, target
    if not target.is_file():
        raise RunError(f"{target}: no such checkpoint or run directory.{near(target)}")
    if checkpoint is not None:
        raise OptionError(f"--checkpoint {checkpoint}: {target} is a checkpoint already; leave one of the two out.")
    for run_path in (target.parent.parent, target.resolve().parent.parent):
        if RunDirectory(run_path).recipe.is_file():
            return target, run_path
    raise RunError(
        f"{target}: this file lies in no run directory, so nothing says what model it is of. "
        + otherwise.format(target=target)
    )


def distrust(file: PluginFile) -> bool:
    return False


def recipe_of(run: Path, plugins: Iterable[Path], trust: Trust, todo: str = _TRUST) -> Document:
    """The recipe of a run directory, if its plugin files may be executed.

    Those that this user has run before may be, by their content, and those that ``plugins`` name; about each other
    file, ``trust`` is asked, and ``todo`` says how to trust it. A run directory from somebody else names code of its
    own.
    """
    document = read_document(RunDirectory(run).recipe)
    named = {Path(file).stem for file in plugins}
    for name, file in plugin_files(document).items():
        if name in named or file.is_known():
            continue
        if not file.path.is_file():
            raise document.error(
                (*PLUGINS, name),
                f"this run executes {file.path}, which is not here. Get {file.path.name} from whoever made the run, "
                "read it, and name it with --plugin FILE.",
            )
        if not trust(file):
            raise document.error(
                (*PLUGINS, name),
                f"this run executes {file.path} (SHA-256 {file.sha256}), which you have not run before. It would act "
                f"with your permissions: read it, and if you trust it, {todo}",
            )
    return with_plugins(document, plugins)


def near(path: Path) -> str:
    """A hint at the file beside ``path`` whose name is nearest to it."""
    if not path.parent.is_dir():
        return ""
    return did_you_mean(str(path), map(str, path.parent.iterdir()))


@dataclass(frozen=True)
class LoadedRun:
    """A run, or a model of the user's own, as far as its files say; each is read on first use."""

    experiment: Experiment  # the recipe as run, or the one made up for the model
    weights: Path  # a checkpoint of the run, or a state dict
    run: Path | None  # the run's directory; None for a model of the user's own
    device: torch.device

    @cached_property
    def dataset(self) -> Dataset:
        """The data of the run. An attack may have another seed, but the run's seed chose ``max_test_examples``."""
        experiment = self.experiment
        if self.run is not None:
            seed = read_document(RunDirectory(self.run).recipe).get(("common_args", "random_seed")) or 0
            experiment = replace(experiment, common=replace(experiment.common, random_seed=seed))
        return experiment.load_dataset()

    @cached_property
    def images(self) -> ImageShape:
        """The shape of its images: as ``partition.json`` has it, so that none is read; else that of ``dataset``."""
        from calfat_plugin.interfaces import SetUpTask

        partition = None
        if self.run is not None:
            partition = read_typed(Partition, RunDirectory(self.run).partition)
        if partition is None or not partition.image_shape:
            return self.dataset
        channels, height, width = partition.image_shape
        return SetUpTask(len(partition.class_names), channels, (height, width), self.device)

    @cached_property
    def checkpoint(self) -> tuple[Snapshot, Mapping[str, Any]]:
        """(snapshot, notes); weights of the user's own count as round 0, with nothing noted."""
        from calfat_plugin.federation.server import Snapshot
        from calfat_plugin.runs.checkpoints import load_checkpoint

        if self.run is not None:
            snapshot, notes = load_checkpoint(self.weights)
            RunDirectory(self.run).check_own(self.weights, notes)
            RunDirectory(self.run).check_finished(self.weights, snapshot.round)
            return snapshot, notes
        return Snapshot(0, _read_weights(self.weights)), {}

    def model(self, images: ImageShape | None = None) -> nn.Module:
        from calfat_plugin.maths.averaging import check_update
        from calfat_plugin.maths.tied import each_once, load_state, moved, state_of

        trainer = self.experiment.build_trainer()
        model = self.experiment.build_model(images or self.images, trainer, weights_follow=True)
        state = self.checkpoint[0].global_state
        if self.run is None:
            state = _without_wrappers(state, state_of(model))
        try:
            state = each_once(state, model, who="the file")  # of one's own it may have all names of a tied tensor
            check_update(state, state_of(model), who="the file")
        except UpdateError as error:
            problem = str(error)
            if not problem.endswith("?"):
                problem += "."
            if not set(state) & set(state_of(model)):
                problem += f" It holds {one_line(list(state))}: save the state dict among them alone, if there is one."
            raise ModelError(
                f"{self.weights}: these are not weights of the model '{self.experiment.model.name}': {problem}"
            ) from None
        load_state(model, state)
        return moved(model, self.device).eval()


def model_loader(
    dataset: str | None, images: ImageShape, device: torch.device, trust: Trust | None = None
) -> Callable[[str, str | None], nn.Module]:
    """What loads other models for evaluators, each once; see ``interfaces.SetUpTask``."""

    @cache
    def load(source: str, model: str | None) -> nn.Module:
        path = expanded(source)
        if model is not None:
            if not path.is_file():
                raise RunError(f"{path}: no such file.{near(path)}")
            weights, run = path, None
            document = recipe_of_own_model(source, [(("model_args", "model"), model, source)])
        else:
            otherwise = "Say how its model is built: model: package.module:factory beside the source."
            weights, run = find_checkpoint(path, otherwise=otherwise)
            if trust is None:
                once = f"run once: {shlex.join(['calfat', 'attack', str(run), '--trust-plugins'])}"
                document = recipe_of(run, (), distrust, once)
            else:
                document = recipe_of(run, (), trust)
        experiment = assemble(document, Registry.for_recipe(document))
        if run is not None and dataset not in (None, experiment.dataset.name):
            raise RunError(
                f"{path}: the data set of this run is '{experiment.dataset.name}'; the model to be measured has images "
                f"of '{dataset}'. Name a run of the same data set."
            )
        return LoadedRun(experiment, weights, run, device).model(images=images)

    return load


def set_up_task(run: LoadedRun, trust: Trust = distrust) -> SetUpTask:
    """What evaluators of this model are set up with; ``trust`` is asked about plugin files of other runs."""
    from calfat_plugin.interfaces import SetUpTask

    data, name = run.dataset, run.experiment.dataset.name
    return SetUpTask(
        data.num_classes, data.in_channels, data.image_size, run.device, model_loader(name, data, run.device, trust)
    )


def _read_weights(path: Path) -> Mapping[str, Any]:
    """A state dict without running any code that the file may hold."""
    import torch

    from calfat_plugin.tensor_files import read_tensors, refuse_endless

    try:
        refuse_endless(path)
        if path.suffix == ".safetensors":
            tensors, _ = read_tensors(path)
            content: Any = {name: tensor for name, tensor in tensors.items() if "/" not in name}
        else:
            content = torch.load(path, map_location="cpu", weights_only=True)
    except RunError:
        raise
    except Exception as error:  # a damaged file may fail in any way; torch's text would advise to trust the file
        raise RunError(f"{path}: {_why_unreadable(path, error)}") from None
    for key in _NESTED:
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
    if not isinstance(content, Mapping) or not content:
        raise RunError(f"{path}: holds a {type(content).__name__}; expected a state dict, tensors by name.")
    return content


def _why_unreadable(path: Path, error: Exception) -> str:
    refused = _REFUSED.search(str(error))
    if "TorchScript" in str(error):
        return (
            "this is a TorchScript archive, which is a network and not a state dict. Save its weights, "
            f"torch.save(torch.jit.load('{path}').state_dict(), 'weights.pt'), or load it in Python and give it to "
            "calfat.evaluate, attack or trust."
        )
    if refused:
        return (
            f"the file holds an object of {printable(refused[1])}, and reading such may run code. Where you trust "
            "the file, load it and save the state dict alone: torch.save(model.state_dict(), 'weights.pt')."
        )
    return (
        f"the weights cannot be read ({type(error).__name__}). Expected a safetensors file, or a state "
        "dict written by torch.save that holds tensors and nothing else."
    )


def _without_wrappers(state: Mapping[str, Any], expected: Mapping[str, Any]) -> Mapping[str, Any]:
    """A state dict under the names of the model, as ``expected`` has them, if only names of wrappers are in front."""
    tensors = {name: tensor for name, tensor in state.items() if name != _AVERAGED or name in expected}
    while not tensors.keys() & expected.keys():
        for prefix in _WRAPPERS:
            if all(str(name).startswith(prefix) for name in tensors):
                tensors = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
                break
        else:
            return state  # it is of another model: the error shows the names as they are
    return tensors
