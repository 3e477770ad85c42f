"""The functions for Python programs and notebooks: make a run, read it, judge it, load its model or a data set."""

from __future__ import annotations

import dataclasses
import math
import shlex
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Literal

from calfat_plugin.analyses.attack import planned
from calfat_plugin.analyses.in_memory import experiment_of, images_of
from calfat_plugin.analyses.replay import Replay, open_evidence, write_pictures
from calfat_plugin.analyses.replay import replay as check_evidence
from calfat_plugin.datasets import Dataset, ImageData
from calfat_plugin.datasets.entries import MEMORY
from calfat_plugin.datasets.findings import dataset_findings, image_findings
from calfat_plugin.errors import DataError, OptionError, RecipeError, RunError, one_line
from calfat_plugin.exact import exact_text, scalar
from calfat_plugin.experiment import assemble
from calfat_plugin.exporting.folder import Export, write_export
from calfat_plugin.host.runtimes import runtime_of
from calfat_plugin.judging.examine import FILE, examine, examine_module
from calfat_plugin.judging.verdict import Verdict
from calfat_plugin.maths.torch_state import fresh_torch_state
from calfat_plugin.progress import ShownProgress, choose_progress, verbatim_console
from calfat_plugin.recipe.document import Document, from_python, read_document
from calfat_plugin.recipe.plugin_files import PluginFile, with_plugins
from calfat_plugin.recipe.schema import MPI, PROCESSES
from calfat_plugin.registry import Registry
from calfat_plugin.runs.directory import RunDirectory
from calfat_plugin.runs.loaded_run import LoadedRun, find_checkpoint, recipe_of
from calfat_plugin.runs.request import Request, checked_experiment, named_device
from calfat_plugin.runs.workers import mpi_workers, with_workers
from calfat_plugin.stored_run import Run
from calfat_plugin.threat import Norm

if TYPE_CHECKING:
    import torch
    from torch import nn

    from calfat_plugin.analyses.in_memory import Images, Labels


@fresh_torch_state()
def run(
    recipe: str | Path | Mapping[str, Any],
    *,
    seed: int | None = None,
    set: Mapping[str, Any] | None = None,
    plugins: str | Path | Sequence[str | Path] = (),
    run_dir: str | Path | None = None,
    resume: bool = False,
    download: bool = False,
    progress: bool = True,
    workers: int | Literal["auto"] | None = None,
    data: Dataset | None = None,
) -> Run:
    """Run a recipe in this process, as ``calfat run`` does. Ctrl-C keeps finished rounds; ``resume`` continues them.

    Args:
        recipe: a recipe file, the name of a shipped one, or its sections as a mapping.
        seed: instead of the recipe's.
        set: dotted key to value, such as ``{"train_args.comm_round": 5}``, instead of the recipe's.
        plugins: a file with plugins, or several, as ``calfat run --plugin`` takes them.
        run_dir: where to write; None: ``runs/<recipe>/<seed>-<time>`` in the current folder.
        resume: continue the run in ``run_dir``, or the newest unfinished one of this recipe and seed.
        download: fetch a missing data set.
        progress: whether to show progress: bars on a terminal and in a notebook, elsewhere a line for each round.
        workers: train the clients of a round in so many processes of this machine, with the same result; ``"auto"``: as
            many as fit. None: in this one.
        data: a data set in memory, such as ``load_dataset(train=..., test=...)`` makes, in place of the recipe's. The
            run's recipe then has ``data_args.dataset: memory`` with the SHA-256 of the images and labels; to resume it,
            pass the same data.

    Raises:
        CalfatError: with what to do about it. Finished rounds stay on disk.
    """
    from calfat_plugin.runs import session

    if not isinstance(set or {}, Mapping):
        raise OptionError(f"set: got {one_line(set)}; expected keys with values, {{'train_args.comm_round': 5}}.")
    if isinstance(recipe, Mapping):
        document, recipe_file = Document("recipe", from_python(recipe)), "RECIPE"
    else:
        document, recipe_file = read_document(recipe, piped=True), str(recipe)
    changes = _changes(from_python(set or {}), from_python(seed), download)
    if data is not None:
        data = _on_cpu(data)
        digest = session.data_digest((data.train, data.test))
        changes.append((("data_args", "dataset"), MEMORY, "data"))
        changes.append((("calfat", "dataset"), {"sha256": digest}, "the digest of data"))
    document = document.with_values(changes)
    experiment = checked_experiment(document, plugins=_paths(plugins))
    runtime = runtime_of(experiment)
    if data is not None:
        other_executor = experiment.executor != PROCESSES
        if workers is not None or other_executor or runtime.trains_elsewhere or runtime.num_processes > 1:
            raise RunError(
                "data: this run has further processes, which have no part in the memory of this one. Simulate in this "
                "process (fedml, simulation, sp, no workers), or offer the data as a data set plugin (plugins=...)."
            )
        entry = dataclasses.replace(experiment.dataset.entry, build=lambda root, sha256: data)
        experiment = dataclasses.replace(experiment, dataset=dataclasses.replace(experiment.dataset, entry=entry))
    if workers is None and runtime.num_processes > 1:
        command = shlex.join(["calfat", "run", recipe_file, "--local"])
        raise RunError(
            f"{document.file}: this recipe runs in {runtime.num_processes} processes. Start them in a shell: {command}"
        )
    request = Request(experiment, _path(run_dir), resume, ["calfat_plugin.run"])
    notes: list[str] = []
    if workers is not None:
        request = with_workers(request, runtime, str(workers), notes.append, "workers")
    elif experiment.executor == MPI:
        mpi_workers()
    directory = RunDirectory.open(request)
    observer = choose_progress(verbatim_console(sys.stdout)) if progress else ShownProgress()
    try:
        with observer:
            for warning in (*experiment.warnings, *notes):
                observer.warn(warning)
            session.run(request, directory, observer)
    except BaseException as error:
        if not resume:
            directory.discard(keep_log=observer.in_rounds and isinstance(error, Exception))
        raise
    return load_run(directory.path)


_Change = tuple[tuple[str, ...], Any, str]  # the steps of a key, its value, and how an error names it


def _changes(values: Mapping[str, Any], seed: Any, download: bool) -> list[_Change]:
    """The changes of a recipe that arguments of :func:`run` ask for."""
    changes: list[_Change] = []
    for key, value in values.items():
        steps, place = tuple(key.split(".")), f"set {key}={one_line(value)}"
        if len(steps) < 2 or not all(steps):
            raise RecipeError(f"{place}: expected a key such as train_args.comm_round.")
        changes.append((steps, value, place))
    if seed is not None:
        changes.append((("common_args", "random_seed"), seed, f"seed={one_line(seed)}"))
    if download:
        changes.append((("calfat", "dataset", "download"), True, "download=True"))
    return changes


def _on_cpu(data: Dataset) -> Dataset:
    """A data set in memory, checked, with its images on the CPU."""
    problem = ""
    if not isinstance(data, Dataset):
        problem = f"a {type(data).__name__}"
    elif data.validation is not None:
        problem = "one with a validation split"
    if problem:
        expected = "expected a calfat.Dataset without validation split, as calfat.load_dataset makes it"
        raise OptionError(f"data: got {problem}; {expected}.")
    return dataclasses.replace(data, train=data.train.to("cpu"), test=data.test.to("cpu"))


@fresh_torch_state()
def trust(
    target: str | Path | nn.Module | None = None,
    x: Images | None = None,
    y: Labels | None = None,
    *,
    full: bool = False,
    transfer: str | Path | Sequence[str | Path] = (),
    plugins: str | Path | Sequence[str | Path] = (),
    trust_plugins: bool = False,
    eps: str | float | None = None,
    norm: Norm | None = None,
    step_size: str | float | None = None,
    checkpoint: str | None = None,
    model: str | None = None,
    weights: str | Path | None = None,
    dataset: str | None = None,
    data_dir: str | Path | None = None,
    download: bool = False,
    batch_size: int | None = None,
    device: str | torch.device | None = None,
    seed: int | None = None,
    examples: int | None = None,
    output: str | Path | None = None,
) -> Verdict:
    """Judge whether a robust accuracy may be believed, as ``calfat trust`` does, with the names of its options.

    The evidence is in ``trust.json`` of the run, beside the weights, or in ``output``; a stopped call continues there.
    Of a module it is kept in ``output`` alone, if that is given.

    Args:
        target: a run directory, or one of its checkpoints; or ``model``, ``weights`` and ``dataset``; or a torch module
            as ``evaluate`` takes it, of which copies are asked, on the device where it is.
        x: of a module: the images to try it on, as ``evaluate`` takes them. The training images of a ``Dataset``, or
            else what ``examples`` leave of these images, help to train the surrogate.
        y: (N,) the labels of ``x``, if that has none.
        full: run every check, and AutoAttack on all images, also if the verdict is clear.
        transfer: a run directory or checkpoint of another model, or several, whose adversarial examples are tried, too.
        plugins: a file with plugins, or several.
        trust_plugins: whether plugin files of the run may be executed that this user has not run before.
        eps: the budget, such as 0.1 or ``"8/255"``; None: the recipe's. A module needs it.
        norm: of the budget; None: the recipe's, else ``linf``.
        step_size: of the attacks, a number or a multiple of eps such as ``"eps/10"``; None: the recipe's.
        checkpoint: of a run directory: ``last`` (which None means), ``best-natural`` or ``best-robust``.
        model: ``package.module:factory``, or a built-in name.
        weights: its state dict.
        dataset: the name of the data set that it is judged on.
        data_dir: where data sets are; None: the recipe's.
        download: fetch a missing data set.
        batch_size: images a batch; None: the recipe's.
        device: where to compute; None: as the recipe says.
        seed: of random starts; None: the recipe's.
        examples: so many test images; None: 500, or all if there are fewer.
        output: the file; None: ``trust.json`` of the run, or beside the weights.

    Raises:
        CalfatError: with what to fix; nothing is written then.
    """

    examples = scalar(examples)
    if examples is not None and (isinstance(examples, bool) or not isinstance(examples, int) or examples < 1):
        raise OptionError(f"examples={one_line(examples)}: expected a whole number of test images, 1 or more.")
    how: dict[str, Any] = {"full": full, "command": ["calfat_plugin.trust"], "observer": ShownProgress()}
    if target is not None and not isinstance(target, (str, Path)):
        of_models_on_disk = {
            "plugins": plugins or None,
            "data_dir": data_dir,
            "download": download or None,
            "checkpoint": checkpoint,
            "model": model,
            "weights": weights,
            "dataset": dataset,
            "device": device,
        }
        for name, value in of_models_on_disk.items():
            if value is not None:
                raise OptionError(f"{name}: is for a model on disk, and this one is in memory; leave it out.")
        if x is None or eps is None:
            missing = "x" if x is None else "eps"
            raise OptionError(f"{missing} is missing: a module needs its images and a budget.")
        batch_size = 500 if batch_size is None else batch_size
        data = images_of(x, y)
        for text in image_findings(data, "images"):
            warnings.warn(text, stacklevel=3)  # the caller, outside of the decorator
        experiment = experiment_of([], eps, norm or "linf", step_size, batch_size, seed or 0)
        with TemporaryDirectory() as folder:
            return examine_module(
                target,
                data,
                x.train if isinstance(x, Dataset) else None,
                _paths(transfer),
                experiment,
                examples=examples,
                trust=lambda file: trust_plugins,
                output=_path(output) or Path(folder) / FILE,
                **how,
            ).verdict
    if x is not None or y is not None:
        raise OptionError("x, y: are for a module in memory, and the target is on disk; leave them out.")
    plan = planned(
        _path(target),
        checkpoint=checkpoint,
        model=model,
        weights=_path(weights),
        dataset=dataset,
        attacks=(),
        eps=() if eps is None else (_exact(eps),),
        norm=norm,
        step_size=None if step_size is None else _exact(step_size),
        examples=examples,
        batch_size=batch_size,
        seed=seed,
        device=None if device is None else str(device),
        data_dir=None if data_dir is None else str(data_dir),
        download=download,
        plugins=_paths(plugins),
        trust=lambda file: trust_plugins,
    )
    for message in plan.experiments[0].warnings:
        warnings.warn(message, stacklevel=3)  # the caller, outside of the decorator
    return examine(plan, _paths(transfer), output=_path(output), **how).verdict


def _exact(value: str | float) -> str:
    """A number as a text that is the same number: 8 / 255 is 8/255."""
    if isinstance(value, float) and math.isfinite(value):
        return exact_text(value)
    return str(value)


def _path(path: str | Path | None) -> Path | None:
    return None if path is None else Path(path)


def _paths(paths: str | Path | Sequence[str | Path]) -> tuple[Path, ...]:
    """Several paths; a single text is a path, although it is a sequence, too."""
    if isinstance(paths, (str, Path)):
        return (Path(paths),)
    return tuple(map(Path, paths or ()))


@fresh_torch_state()
def load_dataset(
    name: str | None = None,
    *,
    train: Images | tuple[Images, Labels] | None = None,
    test: Images | tuple[Images, Labels] | None = None,
    root: str | Path | None = None,
    plugins: str | Path | Sequence[str | Path] = (),
    **options: Any,
) -> Dataset:
    """A data set whole, ``train`` and ``test`` with ``x`` and ``y``: as a recipe that names it gets it, or in memory.

    Args:
        name: of a data set; ``calfat plugins`` lists them. Of one in memory: what errors call it.
        train: of one in memory the training images as ``evaluate`` takes them: ``(x, y)`` with x (N, C, H, W) in [0, 1]
            or uint8 and y (N,) labels from 0, or an ``ImageData`` or a ``DataLoader``. The classes are 0 to the largest
            label; ``Dataset`` takes other numbers of classes, their names, and an augmentation.
        test: the test images, likewise.
        root: the folder that holds data sets and receives downloads; None: ``data_args.data_cache_dir``'s default.
        plugins: a file with plugins, or several, as ``calfat run --plugin`` takes them.
        options: of the data set, as ``calfat.dataset`` takes them, such as ``download=True``.

    Raises:
        CalfatError: there is no such data set or option, its files are missing or damaged, or images and labels do not
            fit.

    Warns:
        UserWarning: what looks wrong: images nearly black or of one colour, a class without test images, test images
            that are training images.
    """
    if train is not None or test is not None:
        splits: dict[str, ImageData] = {}
        for split, images in (("train", train), ("test", test)):
            if images is None:
                raise OptionError(f"{split} is missing: a data set in memory has train=(x, y) and test=(x, y).")
            if isinstance(images, Dataset):  # images_of would take its test images, also for training
                raise OptionError(f"{split}: got a whole Dataset; expected images, such as its {split}.")
            x, y = images if isinstance(images, (tuple, list)) and len(images) == 2 else (images, None)
            try:
                splits[split] = images_of(x, y).to("cpu")
            except DataError as error:
                raise DataError(f"{split}: {error}") from None
        if root is not None or plugins or options:
            raise OptionError("root, plugins and options are of a data set on disk; calfat.Dataset takes others.")
        num_classes = 1 + max(int(data.y.max()) for data in splits.values())
        loaded = Dataset(MEMORY if name is None else name, splits["train"], splits["test"], num_classes)
    elif name is None:
        raise OptionError("there is no data set: give its name, or train=(x, y) and test=(x, y).")
    else:
        document = with_plugins(Document("load_dataset", {"calfat": {}}), _paths(plugins))
        document = document.with_value(("data_args", "dataset"), name, f"load_dataset({one_line(name)})")
        if root is not None:
            document = document.with_value(("data_args", "data_cache_dir"), str(root), f"root={str(root)!r}")
        for key, value in from_python(options).items():
            document = document.with_value(("calfat", "dataset", key), value, f"{key}={one_line(value)}")
        loaded = assemble(document, Registry.for_recipe(document)).load_dataset()
    for text in dataset_findings(loaded):
        warnings.warn(f"data set {loaded.name}: {text}", stacklevel=3)  # the caller, outside of the decorator
    return loaded


def load_run(directory: str | Path) -> Run:
    """Read a run directory, of a finished run or of one that is not.

    Args:
        directory: the run directory.

    Raises:
        CalfatError: there is no run in it, or a file of it is damaged.
    """
    return Run.load(Path(directory))


@fresh_torch_state()
def load_model(
    path: str | Path,
    *,
    checkpoint: str | None = None,
    device: str | torch.device = "cpu",
    plugins: str | Path | Sequence[str | Path] = (),
    trust_plugins: bool = False,
) -> nn.Module:
    """The global model of a run (with ``calfat.ema`` its average), in evaluation mode.

    It takes pixels in [0, 1] and returns raw logits.

    Args:
        path: a run directory, or one of its checkpoints.
        checkpoint: of a run directory: ``last`` (which None means), ``best-natural`` or ``best-robust``.
        device: where to put the model.
        plugins: a file with plugins, or several, for those that the run has elsewhere.
        trust_plugins: whether plugin files of the run may be executed that this user has not run before.

    Raises:
        CalfatError: there is no such checkpoint or device, or the weights do not fit the recipe's model.
    """
    where = named_device(str(device), "device")
    weights, run = find_checkpoint(Path(path), checkpoint)
    document = recipe_of(run, _paths(plugins), lambda file: trust_plugins)
    return LoadedRun(assemble(document, Registry.for_recipe(document)), weights, run, where).model()


@fresh_torch_state()
def replay(
    path: str | Path,
    *,
    checkpoint: str | None = None,
    model: str | None = None,
    weights: str | Path | None = None,
    dataset: str | None = None,
    data_dir: str | Path | None = None,
    device: str | None = None,
    plugins: str | Path | Sequence[str | Path] = (),
    trust_plugins: bool = False,
    pictures: str | Path | None = None,
    model_file: str | Path | None = None,
    eight_bit: bool = False,
) -> Replay:
    """Check the numbers of a finished evaluation by the adversarial images that it kept, as ``calfat replay`` does.

    Args:
        path: a run directory, or a file of evidence that ``calfat attack`` or ``calfat trust`` wrote.
        checkpoint: of the run: ``last`` (which None means), ``best-natural`` or ``best-robust``.
        model: of evidence about a model of one's own: ``package.module:factory``, or the name of a built-in model.
        weights: its state dict.
        dataset: the name of the data set that it was attacked on.
        data_dir: where data sets are; None: as the recipe says.
        device: where to compute; None: as the recipe says.
        plugins: a file with plugins, or several.
        trust_plugins: whether plugin files of the run may be executed that this user has not run before.
        pictures: a folder for PNG files of each image; None: none are written.
        model_file: a ``.pt2`` or ``.onnx`` file that ``export`` wrote, which is asked in the model's place.
        eight_bit: whether images are rounded to 8 bits a value, as cameras and browsers deliver them, before they are
            shown.

    Returns:
        ``stands`` says whether all numbers do, ``numbers`` which, and ``doubts`` names images that speak against it.

    Raises:
        CalfatError: there is no evidence, it is damaged, or it is about another model, other data or another ball: the
            text says what, and at which image. Likewise for ``model_file``.
    """

    def trust(file: PluginFile) -> bool:
        return trust_plugins

    run, evidence = open_evidence(
        Path(path),
        checkpoint=checkpoint,
        model=model,
        weights=_path(weights),
        dataset=dataset,
        data_dir=None if data_dir is None else str(data_dir),
        device=device,
        plugins=_paths(plugins),
        trust=trust,
    )
    result = check_evidence(run, evidence, model_file=_path(model_file), eight_bit=eight_bit, trust=trust)
    if pictures is not None:
        write_pictures(result, Path(pictures))
    return result


@fresh_torch_state()
def export(
    path: str | Path,
    to: str | Path | None = None,
    *,
    checkpoint: str | None = None,
    card: str | Path | None = None,
    data_dir: str | Path | None = None,
    download: bool = False,
    plugins: str | Path | Sequence[str | Path] = (),
    trust_plugins: bool = False,
) -> Export:
    """Write a trained model as files that other programs load without this package, as ``calfat export`` does.

    The folder gets ``model.safetensors``, ``model.pt2`` (of ``torch.export``), ``model.onnx`` (with the extra
    ``onnx``), ``config.json``, ``README.md`` (the card) and ``provenance.json``. At the end, the adversarial images
    that the run kept are shown to the exported files, each in its own runtime.

    Args:
        path: a run directory, or one of its checkpoints.
        to: a new folder; None: ``export`` in the run directory.
        checkpoint: of a run directory: ``last`` (which None means), ``best-natural`` or ``best-robust``.
        card: a Markdown file with text of your own for the card, such as intended use and limits.
        data_dir: where data sets are; None: as the recipe says. Without its data a model is exported, but not checked.
        download: fetch a missing data set.
        plugins: a file with plugins, or several.
        trust_plugins: whether plugin files of the run may be executed that this user has not run before.

    Returns:
        ``folder``, ``files``, ``left_out`` with why a file is not there, and ``stands``: whether every number stands on
        every exported file.

    Raises:
        CalfatError: there is no such run or checkpoint, or the folder exists.
    """
    return write_export(
        Path(path),
        _path(to),
        notes=_path(card),
        command=["calfat_plugin.export", str(path)],
        observer=ShownProgress(),
        checkpoint=checkpoint,
        data_dir=None if data_dir is None else str(data_dir),
        download=download,
        plugins=_paths(plugins),
        trust=lambda file: trust_plugins,
    )
