"""Planted mistakes in how the parts are put together; each must turn a test red. From the root: python tests/mutants.py

Each is planted in a copy of the working tree, one at a time. Arguments select mistakes by a part of their name. Exits
with 1 where a mistake survived; a text that is no longer found once is an error here, and in ``tests/test_mutants.py``.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
TIMEOUT = 600  # seconds for the tests of one mistake

TRAINING = "tests/reference/test_federation.py"
EVALUATION = "tests/reference/test_evaluation.py"
STREAMS = "tests/reference/test_streams.py"
SELECTION = "tests/runs/test_selection.py"
DATA = "tests/runs/test_data.py"
REFUSALS = "tests/runs/test_refusals.py"
RESUME = "tests/runs/test_resume.py"
POOL = "tests/host/test_pool.py"
WORKERS = "tests/runs/test_workers.py"
PLUGIN_WORDS = "tests/cli/test_plugin_files.py"
PLUGIN_RUNS = "tests/runs/test_plugin_file.py"
CHECKS = "tests/contract/test_testing.py"
GRAPHS = "tests/maths/test_graphs.py"
CHOICES = "tests/suites/test_choices.py"
FINALISTS = "tests/suites/test_finalists.py"
EXTENSIONS = "tests/suites/test_extend.py"
SUITE_VERDICTS = "tests/suites/test_trust.py"
VERSUS = "tests/suites/test_versus.py"
GRAPHS_OF_METHODS = "tests/methods/test_graphs.py"
OPTIMIZERS = "tests/methods/test_optimizers.py"
TRUST = "tests/evaluators/test_trust.py"
VERDICTS = "tests/evaluators/test_trust_verdict.py"
CORRUPTED = "tests/evaluators/test_corruptions.py"
INTERVALS = "tests/maths/test_intervals.py"
TABLES = "tests/suites/test_tables.py"
CONSOLE = "tests/runs/test_progress.py"
PAGE = "tests/report/test_measures.py"
FLOODS = "tests/silo/test_floods.py"
OUTLIERS = "tests/host/test_outliers.py"
DISCOVERY = "tests/contract/test_registry.py"


class Mutant(NamedTuple):
    """A mistake: ``old``, which is in ``file`` once, becomes ``new``; ``tests`` must fail."""

    name: str
    file: str
    old: str
    new: str
    tests: str


_AVERAGED = "weighted_average(states, list(weights.values()))"
_PARAMETERS_ALONE = f"{{k: v for k, v in {_AVERAGED}.items() if k in task.parameter_names}}"
_CORRECTED = "        correction.after_backward(model)\n"
_CLIPPED = "        if max_norm is not None:\n            nn.utils.clip_grad_norm_(model.parameters(), max_norm)\n"
_BEGIN = "            self.com_manager.begin_round()\n"
_FINISH = "            self.aggregator.finish_round(self.aggregator.aggregated)\n"

MUTANTS = (
    Mutant("a graph is replayed on old inputs", "maths/graphs.py", "own.copy_(given)", "pass", GRAPHS),
    Mutant(
        "a graph reads weights that were replaced",
        "maths/graphs.py",
        "if captured.addresses != _addresses(self._model):",
        "if False:",
        GRAPHS,
    ),
    Mutant(
        "a step takes the gradients that a graph did not write",
        "trainers/loop.py",
        "parameter.grad = gradient  #",
        "pass  #",
        GRAPHS_OF_METHODS,
    ),
    Mutant(
        "FedAvg ignores the clients' batch-norm buffers",
        "aggregators/fedavg.py",
        f"Aggregate({_AVERAGED}, weights",
        f"Aggregate({{**task.global_state, **{_PARAMETERS_ALONE}}}, weights",
        TRAINING,
    ),
    Mutant(
        "class counts are shifted by one class",
        "federation/worker.py",
        "minlength=self._dataset.num_classes).cpu()",
        "minlength=self._dataset.num_classes).cpu().roll(1)",
        TRAINING,
    ),
    Mutant(
        "the aggregator's N is this round's clients",
        "federation/server.py",
        "num_clients=self.experiment.num_clients,",
        "num_clients=len(usable),",
        TRAINING,
    ),
    Mutant(
        "SCAFFOLD divides by this round's clients",
        "aggregators/scaffold.py",
        "1.0 / task.num_clients,",
        "1.0 / len(updates),",
        TRAINING,
    ),
    Mutant(
        "clients are not given the augmentation",
        "federation/worker.py",
        "            augment=self._dataset.augment,\n",
        "            augment=type(self._dataset.augment)(),\n",
        TRAINING,
    ),
    Mutant("the loop does not augment", "trainers/loop.py", "        augment=task.augment,\n", "", TRAINING),
    Mutant(
        "the same attack noise in every epoch",
        "trainers/loop.py",
        "extra=epoch, device=task.device)",
        "device=task.device)",
        TRAINING,
    ),
    Mutant("the same order in every epoch", "trainers/loop.py", "extra=epoch),", "extra=0),", TRAINING),
    Mutant("a stream of training is renamed", "trainers/loop.py", '"attack", round', '"noise", round', TRAINING),
    Mutant("the stream of batches is renamed", "trainers/loop.py", '"batches", epoch', '"shuffle", epoch', STREAMS),
    Mutant(
        "the stream of the initial weights is renamed",
        "experiment/experiment.py",
        '"weights"))',
        '"initial weights"))',
        STREAMS,
    ),
    Mutant(
        "the stream of an evaluation is renamed",
        "evaluators/base.py",
        'f"evaluate/{label}"',
        'f"attack/{label}"',
        STREAMS,
    ),
    Mutant("all streams change", "seeds.py", '"calfat-seed-1"', '"calfat-seed-2"', STREAMS),
    Mutant("restarts of PGD do nothing", "evaluators/gradient.py", "in range(how.restarts)", "in range(1)", EVALUATION),
    Mutant(
        "restarts of PGD share one start",
        "evaluators/gradient.py",
        "start = threat.random_start(x, noise) if",
        "start = threat.random_start(x, noise.clone_state()) if",
        EVALUATION,
    ),
    Mutant(
        "the final evaluation is on the monitored images",
        "federation/measurements.py",
        "state, self._test, self._experiment.evaluators",
        "state, self.subset, self._experiment.evaluators",
        EVALUATION,
    ),
    Mutant(
        "the rounds are evaluated on all images",
        "federation/measurements.py",
        "state, self.subset, self._experiment.monitor",
        "state, self._test, self._experiment.monitor",
        EVALUATION,
    ),
    Mutant(
        "iid does not shuffle",
        "partitions/split.py",
        "_random_state(seed).permutation(len(checked)).astype",
        "np.arange(len(checked)).astype",
        STREAMS,
    ),
    Mutant("best-robust is by the first attack", "runs/writer.py", "robust[-1]", "robust[0]", SELECTION),
    Mutant(
        "SFAT begins one round late",
        "aggregators/sfat.py",
        "task.round < self.options.start_round",
        "task.round <= self.options.start_round",
        TRAINING,
    ),
    Mutant(
        "clients lose their personal tensors",
        "federation/worker.py",
        "load_state_dict({**received, **own})",
        "load_state_dict(received)",
        TRAINING,
    ),
    Mutant(
        "the method's broadcast is not sent",
        "federation/server.py",
        "{**aggregate.broadcast, **extras}",
        "{**aggregate.broadcast}",
        TRAINING,
    ),
    Mutant(
        "a round of at clients alone broadcasts nothing",
        "trainers/fedrbn.py",
        "if not self.options.some_borrow:",
        "if len(self._sources(updates)) == len(updates):",
        TRAINING,
    ),
    Mutant(
        "the aggregator forgets between rounds",
        "federation/server.py",
        "server_state=self.server_state,\n                        parameter_names",
        "server_state={},\n                        parameter_names",
        TRAINING,
    ),
    Mutant(
        "evaluation takes the averaged personal tensors as they are",
        "federation/server.py",
        "state = {**aggregate.state, **personal}",
        "state = {**aggregate.state}",
        TRAINING,
    ),
    Mutant(
        "corrections move personal tensors, too",
        "federation/worker.py",
        "personal=self._personal,",
        "personal=frozenset(),",
        TRAINING,
    ),
    Mutant("weights are never decayed", "trainers/optimizers.py", ", settings.weight_decay\n", ", 0.0\n", TRAINING),
    Mutant(
        "the loss is that of all epochs",
        "trainers/loop.py",
        "        meter.begin_epoch(epoch, length)\n",
        "        epoch or meter.begin_epoch(epoch, length)\n",
        TRAINING,
    ),
    Mutant(
        "a single last example is a batch",
        "trainers/loop.py",
        "=_has_batch_norm(task.model),\n    )",
        "=False,\n    )",
        TRAINING,
    ),
    Mutant(
        "all clients weigh the same",
        "aggregators/fedavg.py",
        "1.0 if even else float(update.num_examples)",
        "1.0",
        TRAINING,
    ),
    Mutant(
        "the same clients in every round",
        "federation/server.py",
        '"sample clients", round=round))',
        '"sample clients"))',
        TRAINING,
    ),
    Mutant(
        "clients train against the default budget",
        "federation/worker.py",
        "threat=self.experiment.recipe.threat,",
        "threat=type(self.experiment.recipe.threat)(),",
        TRAINING,
    ),
    Mutant(
        "the partition follows the run's seed",
        "experiment/experiment.py",
        'if arguments.get("seed", 0) is None:',
        'if "seed" in arguments:',
        TRAINING,
    ),
    Mutant(
        "the release's partition has no cap",
        "partitions/split.py",
        "len(checked) / num_clients if balanced else None",
        "None",
        STREAMS,
    ),
    Mutant(
        "GAIRAT weighs one round late",
        "trainers/fedgairat.py",
        "batch.task.round >= options.start_round",
        "batch.task.round > options.start_round",
        TRAINING,
    ),
    Mutant(
        "AutoAttack has one seed for all runs",
        "evaluators/autoattack/autoattack.py",
        "task.seed if self.options.seed is None",
        "0 if self.options.seed is None",
        STREAMS,
    ),
    Mutant(
        "a resume compares no training images",
        "runs/data.py",
        "_digest(filter(None, (dataset.train, dataset.test, dataset.validation)))",
        "_digest((dataset.test,))",
        DATA,
    ),
    Mutant(
        "a resume compares no partition",
        "runs/data.py",
        "_digest(shards.values())",
        "_digest((dataset.train,))",
        DATA,
    ),
    Mutant(
        "a resume accepts other data",
        "runs/session.py",
        "            directory.check_data(data)",
        "            pass",
        REFUSALS,
    ),
    Mutant(
        "the best checkpoint is forgotten on resume",
        "runs/session.py",
        "RunWriter(directory, experiment, best, snapshot)",
        "RunWriter(directory, experiment, None, snapshot)",
        RESUME,
    ),
    Mutant(
        "the server is not restored on resume",
        "host/task.py",
        "            server.restore(self.resume_from)",
        "            pass",
        RESUME,
    ),
    Mutant(
        "the longest client is handed out last",
        "host/transports/pool.py",
        "-self._num_examples[",
        "self._num_examples[",
        POOL,
    ),
    Mutant(
        "the client of a dead worker is lost",
        "host/transports/pool.py",
        "self._waiting.insert(0, lost)",
        "pass",
        POOL,
    ),
    Mutant(
        "a client's state does not travel to its worker",
        "host/mpi_simulation.py",
        "add_client_state(message.get(_MODEL), kept)",
        "add_client_state(message.get(_MODEL), {})",
        WORKERS,
    ),
    Mutant(
        "workers wait while the server evaluates",
        "host/mpi_simulation.py",
        _BEGIN + _FINISH,
        _FINISH + _BEGIN,
        WORKERS,
    ),
    Mutant(
        "a plugin file that has changed is loaded",
        "recipe/plugin_files.py",
        "hexdigest()) != self.sha256:",
        'hexdigest()) == "":',
        PLUGIN_WORDS,
    ),
    Mutant(
        "a recipe as run forgets its plugin files",
        "experiment/experiment.py",
        "if recipe.plugins:",
        "if not recipe.plugins:",
        PLUGIN_WORDS,
    ),
    Mutant(
        "an installed plugin is not replaced by its file",
        "registry.py",
        "                if found.module in files:\n                    continue\n",
        "",
        PLUGIN_WORDS,
    ),
    Mutant(
        "a plugin file must stay where it was",
        "experiment/compare.py",
        "key.startswith(free) or PLUGIN_PLACE.fullmatch(key)",
        "key.startswith(free)",
        PLUGIN_RUNS,
    ),
    Mutant(
        "a run is resumed with another version of its plugin file",
        "experiment/compare.py",
        r"plugins\.\w+\.file",
        r"plugins\.\w+\.\w+",
        PLUGIN_RUNS,
    ),
    Mutant(
        "the runs of a suite do not get --plugin",
        "suites/runner.py",
        'words += ["--plugin", str(file.path)]',
        "words += []",
        PLUGIN_RUNS,
    ),
    Mutant("a lost choice run counts as the best", "suites/tuning.py", "LOST = 0.0", "LOST = 1.0", CHOICES),
    Mutant(
        "choice runs are evaluated on the test split",
        "suites/tuning.py",
        '{("calfat", "evaluators"): [], ("calfat", "monitor"): monitor}',
        '{("calfat", "monitor"): monitor}',
        CHOICES,
    ),
    Mutant(
        "the runs of a table do not use what was chosen",
        "suites/plan.py",
        "settings = (*cell.settings, *choice.best.point)",
        "settings = cell.settings",
        CHOICES,
    ),
    Mutant(
        "the last round's value is the best round's",
        "suites/tuning.py",
        'rows[-1:] if choose.by == "last" else rows',
        "rows",
        CHOICES,
    ),
    Mutant(
        "finalists are the worst by the first seed",
        "suites/tuning.py",
        "key=lambda index: -(firsts[index] or LOST)",
        "key=lambda index: (firsts[index] or LOST)",
        FINALISTS,
    ),
    Mutant(
        "finalists are picked before the first seed has tried all",
        "suites/tuning.py",
        "known = None not in firsts",
        "known = any(firsts)",
        FINALISTS,
    ),
    Mutant(
        "a value that was lost with the first seed is a finalist",
        "suites/tuning.py",
        'if each.runs[0].state != "lost"',
        "if True",
        FINALISTS,
    ),
    Mutant(
        "a value that is no finalist is chosen",
        "suites/tuning.py",
        "if each.lost < len(each.runs) == self.seeds",
        "if each.lost < len(each.runs)",
        FINALISTS,
    ),
    Mutant(
        "the finals are not run",
        "cli/suite.py",
        "- seen):",
        "- seen) and False:",
        FINALISTS,
    ),
    Mutant(
        "a value beyond an end of the grid is preferred to its equal",
        "suites/tuning.py",
        "(*choice.grid[setting.path], added)",
        "(added, *choice.grid[setting.path])",
        EXTENSIONS,
    ),
    Mutant(
        "a verdict on another budget is the row's",
        "suites/record.py",
        '(asked["norm"], asked["eps"]) != (threat.norm, exact_text(threat.eps))',
        "False",
        SUITE_VERDICTS,
    ),
    Mutant(
        "the cost leaves the finals out",
        "cli/suite.py",
        "len(plan.choosing.left) + plan.num_finals,",
        "len(plan.choosing.left),",
        FINALISTS,
    ),
    Mutant(
        "--versus compares with the first row instead of the named one",
        "suites/summary.py",
        "wanted = (*labels[:axis], label, *labels[axis + 1 :])",
        "wanted = next(iter(rows))",
        VERSUS,
    ),
    Mutant(
        "--versus pairs seeds by their order",
        "suites/summary.py",
        "dict(zip(self.seeds, self.values, strict=True))",
        "dict(enumerate(self.values))",
        VERSUS,
    ),
    Mutant(
        "--versus takes the named row from the others",
        "suites/summary.py",
        "paired(one.by_seed, other.by_seed)",
        "paired(other.by_seed, one.by_seed)",
        VERSUS,
    ),
    Mutant(
        "--versus does not say that the problems differ",
        "suites/summary.py",
        "yield Beside(row, pairs, _unlike(row, named))",
        "yield Beside(row, pairs, ())",
        VERSUS,
    ),
    Mutant(
        "who resumes a run is not told its --plugin",
        "cli/run.py",
        'for word in ("--plugin", str(plugin))]',
        "for word in ()]",
        PLUGIN_RUNS,
    ),
    Mutant(
        "calfat attack ignores --plugin",
        "analyses/attack_plan.py",
        "with_plugins(_with_attacks(document, request), request.plugins)",
        "_with_attacks(document, request)",
        PLUGIN_RUNS,
    ),
    Mutant(
        "the check of a trainer compares an update with itself",
        "testing/trainers.py",
        "again = trained(trainer, tiny_task())",
        "again = update",
        CHECKS,
    ),
    Mutant(
        "the check's federation is not resumed",
        "testing/federation.py",
        "resumed = TinyFederation(experiment, whole.snapshot())",
        "resumed = whole",
        CHECKS,
    ),
    Mutant(
        "clients train at the first round's learning rate",
        "federation/worker.py",
        "train_settings(round)",
        "train_settings(1)",
        OPTIMIZERS,
    ),
    Mutant(
        "the recorded learning rate is the first round's",
        "federation/server.py",
        "learning_rate_of(round)",
        "learning_rate_of(1)",
        OPTIMIZERS,
    ),
    Mutant(
        "a learning rate comes a round late",
        "recipe/training.py",
        "past = round - 1 -",
        "past = round - 2 -",
        "tests/recipe/test_training.py",
    ),
    Mutant("local steps end with whole epochs", "trainers/loop.py", "*([rest] if rest else [])", "*[]", OPTIMIZERS),
    Mutant(
        "gradients are clipped before the aggregator's part",
        "trainers/loop.py",
        f"{_CORRECTED}{_CLIPPED}",
        f"{_CLIPPED}{_CORRECTED}",
        OPTIMIZERS,
    ),
    Mutant(
        "Adam decays weights as AdamW does", "trainers/optimizers.py", '"adam": Adam,', '"adam": AdamW,', OPTIMIZERS
    ),
    Mutant(
        "SGD forgets Nesterov's form",
        "trainers/optimizers.py",
        "decay, nesterov=settings.nesterov)",
        "decay)",
        OPTIMIZERS,
    ),
    Mutant(
        "SCAFFOLD forgets Nesterov's form",
        "aggregators/scaffold.py",
        "nesterov=settings.nesterov",
        "nesterov=False",
        "tests/methods/test_aggregators.py",
    ),
    Mutant(
        "a method with a rate of its own does not hear of a schedule",
        "experiment/experiment.py",
        "has_schedule=train.has_schedule,",
        "has_schedule=False,",
        OPTIMIZERS,
    ),
    Mutant(
        "a cosine is continued with other rounds",
        "experiment/compare.py",
        "if COSINE in (flat_first",
        "if None in (flat_first",
        REFUSALS,
    ),
    Mutant(
        "what is far below PGD-20 overstates nothing",
        "judging/verdict.py",
        "if difference > TOLERANCE and",
        "if difference < TOLERANCE and",
        VERDICTS,
    ),
    Mutant(
        "a number holds where its interval reaches beyond the tolerance",
        "judging/verdict.py",
        '"holds" if interval.high < TOLERANCE',
        '"holds" if interval.low < TOLERANCE',
        VERDICTS,
    ),
    Mutant("no masking makes a number unusable", "judging/verdict.py", "usable=not masked", "usable=True", VERDICTS),
    Mutant("memory is no cause", "judging/verdict.py", "if remembered > ZERO", "if remembered > 2 + ZERO", VERDICTS),
    Mutant(
        "what only a fresh copy gets wrong is not broken",
        "judging/trial.py",
        "(logits.argmax(dim=1) != y) | (again.argmax(dim=1) != y)",
        "(logits.argmax(dim=1) != y)",
        TRUST,
    ),
    Mutant(
        "the surrogate learns the true labels",
        "judging/surrogate.py",
        "labels = labels_of(trial, asked.x)",
        "labels = asked.y",
        TRUST,
    ),
    Mutant(
        "nan is class 0",
        "evaluators/base.py",
        "    wrong = int((~logits.isfinite())",
        "    wrong = 0 * int((~logits.isfinite())",
        TRUST,
    ),
    Mutant("the battery does without Square", "judging/battery.py", "(BlackBox(),) if square else ()", "()", VERDICTS),
    Mutant(
        "random noise has twice the budget",
        "judging/attacks.py",
        "points = threat.random_start(x, noise)",
        "points = x + 2 * (threat.random_start(x, noise) - x)",
        TRUST,
    ),
    Mutant(
        "the last model of --transfer is not tried",
        "judging/independent_checks.py",
        "in trial.surrogates.items():",
        "in list(trial.surrogates.items())[:-1]:",
        TRUST,
    ),
    Mutant(
        "a killed battery starts again",
        "judging/record.py",
        "facts, evidence, robust, content.get",
        "facts, (), None, content.get",
        TRUST,
    ),
    Mutant(
        "a resumed battery forgets what was broken",
        "judging/examine.py",
        "trial.robust = record.robust.clone()",
        "pass",
        TRUST,
    ),
    Mutant(
        "in l1 the grey image is as near as in l2",
        "judging/white_box.py",
        '"l1": values * half',
        '"l1": math.isqrt(values) * half',
        VERDICTS,
    ),
    Mutant(
        "the interval of what is left is of the images that the last attack had",
        "judging/evidence.py",
        "wilson(self.left, self.of or self.examples)",
        "wilson(self.left, self.examples)",
        VERDICTS,
    ),
    Mutant("Wilson's interval is one-sided", "maths/intervals.py", "(1 + CONFIDENCE) / 2", "CONFIDENCE", INTERVALS),
    Mutant(
        "the worst clients are the best",
        "maths/worst.py",
        "worst = sorted(known)[",
        "worst = sorted(known, reverse=True)[",
        "tests/maths/test_worst.py",
    ),
    Mutant(
        "the worst case of a panel is its last threat",
        "evaluators/panel.py",
        "robust[where[broken]] = False",
        "robust[where] = ~broken",
        CORRUPTED,
    ),
    Mutant(
        "the mean of a panel is its worst threat",
        "evaluators/panel.py",
        "sum(figures.values()) / len(figures)",
        "min(figures.values())",
        CORRUPTED,
    ),
    Mutant(
        "a threat of a panel forgets the clean image",
        "evaluators/panel.py",
        "result.accuracy) for name",
        "result.accuracy_release) for name",
        CORRUPTED,
    ),
    Mutant(
        "the budget curve keeps the step of the budget on trial",
        "judging/white_box.py",
        "threat.step_size * eps / threat.eps)",
        "threat.step_size)",
        VERDICTS,
    ),
    Mutant(
        "any option of the data set may change on resume",
        "experiment/compare.py",
        '"calfat.dataset.download"',
        '"calfat.dataset."',
        "tests/recipe/test_shipped.py",
    ),
    Mutant(
        "a client that returns has forgotten what it kept",
        "host/silo/client.py",
        "state_after(used)",
        "state_after(round - 1)",
        "tests/silo/test_parity.py",
    ),
    Mutant(
        "a table's seeds are not those of its values",
        "suites/tables.py",
        '" ".join(map(str, score.seeds))',
        '" ".join(map(str, range(len(score.seeds) + 1)))',
        TABLES,
    ),
    Mutant(
        "a table's values are fractions",
        "suites/tables.py",
        '" ".join(_in_hundredths(score.values if score.is_accuracy else ()))',
        '" ".join(map(str, score.values))',
        TABLES,
    ),
    Mutant(
        "a run without a final evaluation shows an empty table",
        "cli/results.py",
        "    if results:\n",
        "    if True:\n",
        CONSOLE,
    ),
    Mutant(
        "the console does not say whom a model fails",
        "cli/results.py",
        "    for line in worst_lines(results):\n",
        "    for line in ():\n",
        CONSOLE,
    ),
    Mutant(
        "the console leaves the alarms out",
        "cli/results.py",
        "    show_alarms(console, alarms)\n",
        "",
        CONSOLE,
    ),
    Mutant(
        "a page's first numbers say that they are of the test split",
        "report/run_page.py",
        'split = f"{run.monitored_split} split"',
        'split = "test split"',
        PAGE,
    ),
    Mutant(
        "a page's first numbers are of the first round",
        "report/run_page.py",
        "run.curve(label)[-1]",
        "run.curve(label)[0]",
        PAGE,
    ),
    Mutant(
        "connections of a party are those of its address",
        "host/transports/guard.py",
        "party, ranks + _SPARE_OF_A_PARTY",
        "host, ranks + _SPARE_OF_A_PARTY",
        FLOODS,
    ),
    Mutant(
        "a round's record lacks the weights",
        "federation/server.py",
        "            weights=aggregate.weights,\n        )",
        "        )",
        OUTLIERS,
    ),
    Mutant(
        "damage of a distribution ends the import of torch",
        "compat.py",
        "            Distribution.discover = staticmethod(_undamaged)  # type: ignore[method-assign]\n",
        "",
        DISCOVERY,
    ),
)


def planted(mutant: Mutant, package: Path) -> str:
    """The file's text with the mistake in it.

    Raises:
        LookupError: the text to replace is not there, or more than once.
    """
    text = (package / mutant.file).read_text()
    if text.count(mutant.old) != 1:
        raise LookupError(
            f"{mutant.name}: {mutant.file} has {mutant.old!r} {text.count(mutant.old)} times, expected once. "
            "The code has changed: plant the same mistake in the new code (tests/mutants.py)."
        )
    return text.replace(mutant.old, mutant.new)


def copied(target: Path) -> None:
    """Copy what the tests need: the files that git knows or would add."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        check=True,
    )
    for name in listed.stdout.decode().split("\0")[:-1]:
        if (ROOT / name).exists():  # not one that was just deleted
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            (target / name).unlink(missing_ok=True)  # a link of an earlier copy cannot be written over
            shutil.copyfile(ROOT / name, target / name, follow_symlinks=False)


def ended_with(mutant: Mutant, tree: Path) -> subprocess.CompletedProcess[str]:
    """Plant the mistake in ``tree``, run its tests, and put the file back.

    Raises:
        RuntimeError: the tests did not run at all.
    """
    file = tree / "calfat_plugin" / mutant.file
    good = file.read_text()
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-p", "no:cacheprovider", "-m", "not slow"]
    environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        file.write_text(planted(mutant, tree / "calfat_plugin"))
        ended = subprocess.run(
            [*command, mutant.tests], cwd=tree, env=environment, timeout=TIMEOUT, capture_output=True, text=True
        )
    finally:
        file.write_text(good)
    if ended.returncode not in (0, 1) or (ended.returncode == 1 and "FAILED" not in ended.stdout):
        raise RuntimeError(f"{mutant.name}: the tests did not run:\n{ended.stdout}{ended.stderr}")
    return ended


def turns_red(mutant: Mutant, tree: Path) -> bool:
    """Whether the tests find the mistake."""
    return ended_with(mutant, tree).returncode == 1


def main(words: list[str]) -> int:
    chosen = [mutant for mutant in MUTANTS if not words or any(word in mutant.name for word in words)]
    survived = []
    with TemporaryDirectory() as folder:
        copied(Path(folder))
        for mutant in chosen:
            red = turns_red(mutant, Path(folder))
            print(f"{'red     ' if red else 'SURVIVED'}  {mutant.name}", flush=True)
            survived += [] if red else [mutant.name]
    print(f"{len(chosen) - len(survived)} of {len(chosen)} planted mistakes turn a test red")
    return 1 if survived or not chosen else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
