"""A run directory: created once, written while the run lasts, and found again by ``--resume``.

::

    runs/<recipe>/<seed>-<time>/
        recipe.yaml       as run, every default and derived value written out
        environment.json  versions, device, threads, commit
        partition.json    training examples per client and class (simulations only)
        rounds.jsonl      a finished round a line; the record that this package reads
        rounds.csv        the same as a table for people; of many clients, their values are in clients.csv
        results.json      the final evaluation; its presence says that the run is finished
        evidence.safetensors  adversarial images of the final evaluation
        checkpoints/      last, best-natural, best-robust; clients/ has what each client keeps (simulations)
        evaluation/       how far a final evaluation had come, until results.json is written
        log.txt           the log of the host and of ours
        report.html       the page, with figures/ beside it
"""

from __future__ import annotations

import hashlib
import re
import shlex
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import yaml

from calfat_plugin.disk import lock, opened, read_json, refuse_link, temporary_of, write_text
from calfat_plugin.errors import RecipeError, RunError
from calfat_plugin.experiment import Experiment, assemble, changes, evaluators_of, same_but_rounds, why_not
from calfat_plugin.experiment.differences import unchanging_digest
from calfat_plugin.federation.early_stopping import is_more_patient
from calfat_plugin.peer_text import peer_text
from calfat_plugin.recipe.document import AS_RUN, END_AS_RUN, read_document, read_text
from calfat_plugin.results import RoundRecord
from calfat_plugin.rounds import RoundsFile, number_of_rounds
from calfat_plugin.rounds_csv import RoundTables
from calfat_plugin.run_files import Results, read_results
from calfat_plugin.runs.request import Request
from calfat_plugin.stored_run import RunPaths

D = TypeVar("D", bound="RunDirectory")

DEFAULT_ROOT = Path("runs")
CHECKPOINTS = ("last", "best-natural", "best-robust")
RECIPE = "recipe"  # in a checkpoint's notes: the digest that recipe.yaml has, too
_DIGEST = "# SHA-256 of what no resumed run may change:"
_ATTEMPTS = 100


class RunDirectory(RunPaths):
    """Writes and keeps the files of one run. Use :meth:`open`, or name one that exists."""

    #: What to do instead where there is no run to resume.
    without_resume = "Start one without --resume, or point to one with --run-dir."
    #: Whether the newest finished run is resumed where none is unfinished.
    finished_too = False

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._new_folders: list[Path] = []  # that create() made, innermost first

    def rounds_file(self, experiment: Experiment) -> RoundsFile:
        """What appends rounds, with the columns of this experiment."""
        labels = experiment.monitor.labels
        tables = RoundTables(self.path, labels, experiment.num_clients, experiment.metric_columns)
        return RoundsFile(self.rounds, tables)

    @property
    def finished(self) -> bool:
        return self.results.exists()

    def not_measured(self, experiment: Experiment) -> tuple[str, ...]:
        """Labels of the evaluators of ``experiment`` that a finished run with as many rounds has not measured.

        None of a run that is not finished: its final evaluation will measure all. An evaluator counts as measured only
        where the run's recipe has it, for nothing else says with which options that was.
        """
        if not self.finished:
            return ()
        if read_document(self.recipe).get(("train_args", "comm_round")) != experiment.num_rounds:
            return ()
        results = read_results(self.results) or Results()
        measured = self._recorded_evaluators.keys() & results.by_label.keys()
        return tuple(pick.label for pick in experiment.evaluators if pick.label not in measured)

    @property
    def without_page(self) -> str:
        """A hint for messages about a finished run without a page, with a space before it; empty where there is one."""
        if self.page.exists():
            return ""
        command = shlex.join(["calfat", "report", str(self.path)])
        return f" There is no page of {self.path} yet; make it with: {command}"

    @classmethod
    def open(cls: type[D], request: Request, parent: Path | None = None) -> D:
        """A new directory with the recipe as run, or the one to resume."""
        experiment, path = request.experiment, request.run_dir
        if not request.resume:
            return cls.create(experiment, path, parent)
        if path is None:
            directory = cls.latest_unfinished(experiment, parent)
        else:
            directory = cls(path)
        if not directory.recipe.exists():
            raise RunError(f"{path}: there is no run here to resume (no recipe.yaml).")
        directory.check_same(experiment)
        return directory

    @classmethod
    def create(cls: type[D], experiment: Experiment, path: Path | None, parent: Path | None = None) -> D:
        """Make the directory, at ``path`` or new in ``parent`` (``runs/<recipe>``), and write the recipe as run."""
        parent = parent or DEFAULT_ROOT / experiment.name
        outermost = path or parent
        new_folders = [folder for folder in (outermost, *outermost.parents) if not folder.exists()]
        if path is None:
            path = new_path(experiment, parent)
            new_folders = [path, *new_folders]
        directory = cls(path)
        directory._new_folders = new_folders
        directory._refuse_another_run()
        try:
            directory.last_checkpoint.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunError(f"{path}: the run directory cannot be created ({error.strerror}).") from None
        with directory.locked():
            directory._refuse_another_run()  # of two processes that are started at once, one comes later
            directory.write_recipe(experiment, unchanging_digest(experiment.as_run()))
        return directory

    def _refuse_another_run(self) -> None:
        if self.recipe.exists():
            raise RunError(
                f"{self.path}: there is a run in this directory already. Add --resume to continue it, or choose "
                "another --run-dir."
            )
        for path in (self.last_checkpoint, self.rounds, *self.tables, self.results):
            if path.exists():  # a new run would go on from this model, or replace what is measured
                raise RunError(
                    f"{self.path}: there is {path.relative_to(self.path)} of another run in this directory, and no "
                    "recipe.yaml that says which. Choose another --run-dir, or remove it."
                )

    @classmethod
    def latest_unfinished(cls: type[D], experiment: Experiment, parent: Path | None = None) -> D:
        """The newest unfinished run of this recipe and seed in ``parent``; default: ``runs/<recipe>``.

        A finished one counts as unfinished where the recipe asks for more rounds, or for evaluators that it lacks.
        Where there is none, and :attr:`finished_too`, it is the newest of all.
        """
        parent = parent or DEFAULT_ROOT / experiment.name
        runs = sorted(parent.glob(f"{experiment.seed}-*/recipe.yaml"), reverse=True)
        for recipe in runs:
            run = cls(recipe.parent)
            if not run.finished or run.goes_further(experiment) or run.not_measured(experiment):
                return run
        there, remedy = "none at all", cls.without_resume
        if runs:
            newest = cls(runs[0].parent)
            if cls.finished_too:
                return newest
            there = f"{len(runs)} finished"
            remedy += newest.without_page
        raise RunError(f"{parent}: no unfinished run with seed {experiment.seed} to resume ({there}). {remedy}")

    def goes_further(self, experiment: Experiment) -> bool:
        """Whether a finished run has rounds to do by a recipe that asks for more of them, or has more patience."""
        recipe = read_document(self.recipe)
        rounds = recipe.get(("train_args", "comm_round"))
        if not isinstance(rounds, int) or rounds < experiment.num_rounds:
            return True
        results = read_results(self.results)
        if results is None or results.stopped_early is None:
            return False
        patience = recipe.get(("train_args", "patience"))
        return isinstance(patience, int) and is_more_patient(experiment.train.patience, patience)

    @classmethod
    def left_behind(cls: type[D], experiment: Experiment) -> D | None:
        """The newest unfinished run of this recipe and seed, if it can be resumed and no process is at it."""
        parent = DEFAULT_ROOT / experiment.name
        for recipe in sorted(parent.glob(f"{experiment.seed}-*/recipe.yaml"), reverse=True):
            run = cls(recipe.parent)
            if run.finished or run.busy or not run.last_checkpoint.exists():
                continue
            with suppress(RunError):  # of another recipe, or damaged
                run.check_same(experiment)
                return run
        return None

    def check_same(self, experiment: Experiment) -> None:
        try:
            document = read_document(self.recipe)
            text, _, last = read_text(self.recipe, "recipe").rpartition(END_AS_RUN)
            if last.strip() != _digest_line(text):
                raise RecipeError(
                    f"{self.recipe}: the file was changed after the run had written it (its last line has the SHA-256 "
                    "of another text), so nothing says how the finished rounds were trained. Undo the change, and "
                    "give other values with --set."
                )
            started = assemble(document, experiment.registry)
        except RecipeError as error:
            raise RunError(f"{self.path}: cannot be resumed: {error}") from None
        then, now = started.as_run(), experiment.as_run()
        different = same_but_rounds(then, now)
        if different:
            raise RunError(
                f"{self.path}: the recipe is not the one this run was started with. "
                f"{changes(then, now, different, 'when started')}. "
                f"{why_not(different)}Resume with the run's own recipe: "
                + shlex.join(["calfat", "run", str(self.recipe), "--resume", "--run-dir", str(self.path)])
            )

    def check_data(self, now: Mapping[str, Any]) -> None:
        for key, value in read_json(self.partition).items():
            if key in now and value != now[key]:
                then, current = first_difference(value, now[key])
                raise RunError(
                    f"{self.path}: the data are not those this run was started with. {key} in {self.partition.name}: "
                    f"{then} when started, {current} now. Resume with the same data and partition, or start again "
                    "without --resume."
                )

    @property
    def recipe_digest(self) -> str | None:
        """The digest in ``recipe.yaml``, which the run's checkpoints have, too: so one of another run is recognised.

        It is that of the recipe with which the run was started. A resumed run changes only what the digest leaves out,
        and one that a newer version resumes may have new defaults in its recipe. None: the recipe has none.
        """
        if not self.recipe.exists():
            return None
        line = re.search(rf"^{re.escape(_DIGEST)} ([0-9a-f]{{64}})$", read_text(self.recipe, "recipe"), re.MULTILINE)
        if line is None:
            return None
        return line[1]

    def check_own(self, checkpoint: Path, notes: Mapping[str, Any]) -> None:
        """Refuse a checkpoint of another run, by its notes."""
        if notes.get(RECIPE) != self.recipe_digest:
            raise RunError(
                f"{checkpoint}: is of another run: it was made with another recipe or seed than {self.recipe} has. "
                "Restore this run's own checkpoint from a copy, or start the run again in another directory."
            )

    def check_finished(self, checkpoint: Path, round: int) -> None:
        """Refuse a checkpoint of a round that this run has not finished."""
        rounds = number_of_rounds(self.rounds)
        if 0 < rounds < round:  # without any rounds it is a model that was passed on alone
            raise RunError(
                f"{checkpoint}: is of round {round}, but {self.rounds} has {rounds} rounds. Restore both from one copy."
            )

    def check_latest(self, round: int) -> None:
        """Refuse to continue after a round that is neither the last of this run nor the one before it.

        A crash leaves at most one round without its checkpoint. Any earlier one was changed, or is of an older copy.
        """
        rounds = number_of_rounds(self.rounds)
        if rounds > round + 1:
            raise RunError(
                f"{self.last_checkpoint}: is of round {round}, but {self.rounds} has {rounds} rounds; expected "
                f"{round}, or {round + 1} after a crash. Restore both from one copy, or start the run again in another "
                "directory."
            )

    def check_rounds(self, records: Sequence[RoundRecord], last_round: int) -> None:
        """Refuse to continue after a round where the lines of those before are not all there."""
        if [record.round for record in records] != list(range(1, last_round + 1)):
            raise RunError(
                f"{self.rounds}: the lines of rounds 1 to {last_round}, which the checkpoint continues from, are not "
                "all there; the file was changed by hand. Start the run again without --resume."
            )

    def write_recipe(
        self, experiment: Experiment, digest: str | None = None, measured_before: Iterable[Mapping[str, Any]] = ()
    ) -> None:
        """Write the recipe as run.

        Args:
            digest: what the run's checkpoints name (:attr:`recipe_digest`).
            measured_before: further evaluators whose results the run has.
        """
        header = f"# {peer_text(experiment.document.file)}{AS_RUN}\n"  # a line of text, whatever the file's name
        content = experiment.as_run()
        section = content["calfat"]
        section["evaluators"] = [*section["evaluators"], *measured_before]
        content["calfat"] = {"name": experiment.name, **section}  # without it, the name would be the file's: "recipe"
        text = f"{header}{yaml.safe_dump(content, sort_keys=False, width=120)}"
        if digest:
            text += f"{_DIGEST} {digest}\n"
        write_text(self.recipe, f"{text}{END_AS_RUN} {_digest_line(text)}\n")

    def begin(self, behind: Sequence[RoundRecord], experiment: Experiment) -> None:
        """Bring the files to the end of the finished rounds ``behind``, whatever a crash left after them."""
        self.rounds_file(experiment).rewrite(behind)
        for path in self._files():
            temporary_of(path).unlink(missing_ok=True)

    def reopen(self, experiment: Experiment) -> None:
        """Make it a run that is not finished, with the recipe as run now.

        The results are removed first: those of fewer rounds beside the new recipe would look like its own. What a
        stopped final evaluation had done is removed where the recipe has lost an evaluator, which may come back with
        other options.
        """
        self.results.unlink(missing_ok=True)
        self.evidence.unlink(missing_ok=True)
        if self.removed_evaluators(experiment):
            shutil.rmtree(self.evaluation, ignore_errors=True)
        self.write_recipe(experiment, self.recipe_digest)

    def refuse_links(self) -> None:
        """Refuse folders of the run that are links: what is written there would land in another place."""
        for folder in (self.last_checkpoint.parent, self.client_states, self.evaluation):
            refuse_link(folder)

    def removed_evaluators(self, experiment: Experiment) -> list[Mapping[str, Any]]:
        """Evaluators of this run's recipe that another recipe no longer has."""
        labels = {pick.label for pick in experiment.evaluators}
        return [pick for label, pick in self._recorded_evaluators.items() if label not in labels]

    @property
    def _recorded_evaluators(self) -> Mapping[str, Mapping[str, Any]]:
        """Label to evaluator, as the run's recipe has it."""
        return evaluators_of({"calfat": {"evaluators": read_document(self.recipe).get(("calfat", "evaluators"))}})

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes from writing this run at the same time. The system frees the lock of a dead process."""
        with opened(self.path) as handle:
            if not lock(handle):
                raise RunError(
                    f"{self.path}: another process is writing this run. Let it finish, or stop it before you resume."
                )
            yield

    @property
    def busy(self) -> bool:
        if not self.path.exists():
            return False
        try:
            with self.locked():
                return False
        except RunError:
            return True

    def discard(self, *, keep_log: bool = False) -> bool:
        """Remove a run in which no round was finished: its own files, and the folders that were made for it.

        Other files in a ``--run-dir`` that existed before are kept.
        """
        if self.last_checkpoint.exists() or self.busy:
            return False
        leftovers = [self.client_states]
        for file in self._files():
            leftovers += [file, temporary_of(file)]
        if self.path in self._new_folders and self.path.exists():
            # Then nobody else's files are below: loggers and plugins may have left some.
            leftovers += self.path.iterdir()
        for path in leftovers:
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            elif path != self.log or not keep_log:
                path.unlink(missing_ok=True)
        for folder in (self.last_checkpoint.parent, *self._new_folders):
            with suppress(OSError):  # it holds something else
                folder.rmdir()
        return True

    def _files(self) -> list[Path]:
        files = [self.recipe, self.environment, self.partition, self.rounds, *self.tables]
        files += [self.results, self.evidence, self.profile, self.log]
        return [*files, *map(self.checkpoint, CHECKPOINTS)]


def _digest_line(text: str) -> str:
    return f"SHA-256 of the lines above: {hashlib.sha256(text.encode()).hexdigest()}"


def new_path(experiment: Experiment, parent: Path | None = None) -> Path:
    parent = parent or DEFAULT_ROOT / experiment.name
    stem = f"{experiment.seed}-{time.strftime('%Y%m%d-%H%M%S')}"
    for attempt in range(_ATTEMPTS):
        path = parent / stem
        if attempt:
            path = parent / f"{stem}-{attempt}"
        try:
            path.mkdir(parents=True)
            return path
        except FileExistsError:
            continue
        except OSError as error:
            raise RunError(f"{path}: the run directory cannot be created ({error.strerror}).") from None
    raise RunError(f"{parent / stem}: {_ATTEMPTS} runs were started in this second; choose a --run-dir.")


def first_difference(then: Any, now: Any) -> tuple[Any, Any]:
    """The first entries in which two different lists differ; both values where they are no lists of one length."""
    if isinstance(then, list) and isinstance(now, list) and len(then) == len(now):
        for entry_then, entry_now in zip(then, now, strict=True):
            if entry_then != entry_now:
                return first_difference(entry_then, entry_now)
    return then, now
