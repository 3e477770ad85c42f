"""``calfat board``: an honest entry verifies; which forged ones are found, by whom and in which words; challenges."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from calfat_plugin import disk
from calfat_plugin.board import verify
from calfat_plugin.board.entry import ENTRY, FILES, Entry, add, misfits, read_entry
from calfat_plugin.board.own import Means, own_experiment, own_recipe
from calfat_plugin.board.standing import standing
from calfat_plugin.board.tracks import Board, open_board
from calfat_plugin.board.verify import IMAGES, Line, chosen_images, relative_distance, verify_seed
from calfat_plugin.errors import CalfatError, PluginError, RecipeError
from calfat_plugin.evaluators.base import fixed_subset
from calfat_plugin.evaluators.evidence import Evidence
from calfat_plugin.evaluators.evidence_file import read_evidence, write_evidence
from calfat_plugin.host import installed
from calfat_plugin.host.launch import fedml
from calfat_plugin.recipe import read_document
from calfat_plugin.runs.checkpoints import load_checkpoint, named_files, save_checkpoint
from calfat_plugin.runs.directory import RunDirectory
from calfat_plugin.runs.request import checked_experiment
from tests.cli.runner import Ended, calfat

RECIPE = """\
common_args: {training_type: simulation}
data_args: {dataset: digits, partition_alpha: 1, max_train_examples: 200, max_test_examples: 100}
model_args: {model: cnn_small}
train_args: {client_num_in_total: 3, client_num_per_round: 2, comm_round: 4, batch_size: 32, learning_rate: 0.03}
calfat:
  trainer: fedpgd
  aggregator: scaffold
  threat: {norm: linf, eps: 0.1, step_size: eps/2, steps: 2}
  evaluators: [natural, fgsm, pgd5]
  monitor: {evaluators: [natural]}
  evaluation: {batch_size: 100}
  runtime: {threads: 1}
"""
SEEDS = (0, 1, 2, 3, 4)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with runs of five seeds, judged, and a board with them as the entry ``honest``."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("board")
        patch.chdir(folder)
        Path("mine.yaml").write_text(RECIPE)
        for seed in SEEDS:
            for words in (
                ("run", "mine.yaml", "--seed", seed, "--run-dir", f"runs/{seed}", "--no-page"),
                ("trust", f"runs/{seed}", "--examples", 50),
            ):
                done = calfat(*words)
                assert done.code == 0, done
        assert calfat("board", "init", "board", "runs/0").code == 0
        runs = [f"runs/{seed}" for seed in SEEDS]
        done = calfat("board", "add", "board", *runs, "--name", "honest", "--by", "Ada")
        assert done.code == 0, done
        yield folder


@pytest.fixture
def board(made: Path, tmp_path: Path) -> Path:
    """The board, in a copy of its own."""
    return Path(shutil.copytree(made / "board", tmp_path / "board"))


def folder_of(board: Path) -> Path:
    return board / "entries" / "main" / "honest"


def signed(board: Path) -> None:
    """What an entrant does after a change: entry.json names all files as they are."""
    folder = folder_of(board)
    facts = json.loads((folder / ENTRY).read_text())
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != ENTRY]
    facts["files"] = {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files
    }
    (folder / ENTRY).write_text(json.dumps(facts))


def entry_of(board: Path) -> Entry:
    return read_entry(open_board(board), "main", "honest")


def against(board: Path, seed: int = 0, **how: Any) -> str:
    """What speaks against the model of one seed."""
    found = verify_seed(entry_of(board), seed, "revision", Means(), **how)
    return "; ".join(line.text for line in found if line.against)


def edited(path: Path, change: Callable[[Any], None]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def changed(path: Path, **values: object) -> None:
    edited(path, lambda content: content.update(values))


def recipes(board: Path, old: str, new: str) -> None:
    """Replace a text in the recipes of all seeds."""
    for path in folder_of(board).glob("seed-*/recipe.yaml"):
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new, 1))
    signed(board)


# --- an honest entry --------------------------------------------------------------------------------------------------


def test_an_honest_entry_verifies_and_the_page_says_so(board: Path) -> None:
    calfat("board", "page", board)
    assert "not yet" in (board / "index.html").read_text()
    done = calfat("board", "verify", board, "--json")
    (found,) = json.loads(done.out)
    assert (done.code, found["reasons"]) == (0, [])
    assert sum("two rounds trained again: the same bits" in line for line in found["found"]) == len(SEEDS)
    assert sum(f"of {IMAGES} images" in line for line in found["found"]) == len(SEEDS)
    calfat("board", "page", board)
    page = (board / "index.html").read_text()
    assert ">yes<" in page
    assert f"at {found['revision'][:12]}" in page
    (folder_of(board) / "challenges").mkdir()
    kept = folder_of(board) / "seed-0" / "evidence.safetensors"
    shutil.copy(kept, folder_of(board) / "challenges" / "eve.safetensors")
    calfat("board", "page", board)
    assert "it has changed since" in (board / "index.html").read_text()


def test_a_run_keeps_the_model_two_rounds_before_its_end_and_what_its_clients_kept(made: Path) -> None:
    run = made / "runs" / "0" / "checkpoints"
    assert load_checkpoint(run / "two-rounds-left.safetensors")[0].round == 2
    named = named_files(run / "two-rounds-left.safetensors")
    assert named
    for client, state in named.items():
        assert (run / "clients" / f"client-{client}-round-{state.round}.safetensors").is_file()


def test_every_round_trained_again_gives_the_same_bits(board: Path) -> None:
    found = [*verify_seed(entry_of(board), 1, "revision", Means(), from_start=True)]
    assert found[-1] == Line("4 rounds trained again: the same bits")
    assert not any(line.against for line in found)


def test_the_images_are_chosen_by_entry_revision_and_seed(board: Path) -> None:
    entry, tried = entry_of(board), list(range(1000))
    chosen = chosen_images(entry, "a", 0, tried)
    assert len(set(chosen)) == IMAGES == len(chosen)
    assert chosen == sorted(chosen) == chosen_images(entry, "a", 0, tried)
    others = [(entry, "b", 0), (entry, "a", 1), (replace(entry, digest="0"), "a", 0)]
    for each in others:
        assert chosen_images(*each, tried) != chosen
    assert set(chosen_images(entry, "a", 0, [3, 5])) == {3, 5}


def test_the_revision_is_the_commit_or_a_digest_of_the_files(board: Path) -> None:
    before = open_board(board).revision()
    (folder_of(board) / "seed-0" / "rounds.csv").write_text("")
    assert open_board(board).revision() != before


def test_the_distance_is_a_share_of_the_way() -> None:
    zero, one = {"w": torch.zeros(4)}, {"w": torch.ones(4)}
    assert relative_distance(zero, one, one) == 0
    assert relative_distance(zero, one, {"w": torch.full((4,), 1.5)}) == pytest.approx(0.5)
    assert relative_distance(one, one, zero) == float("inf")
    with pytest.raises(CalfatError, match="other names"):
        relative_distance(zero, {"v": torch.ones(4)}, one)


# --- files that cannot be ---------------------------------------------------------------------------------------------


def linked(path: Path) -> None:
    """What was there is a link to it."""
    elsewhere = path.parents[len(path.parts) - path.parts.index("board") - 2] / "elsewhere"
    shutil.move(path, elsewhere)
    path.symlink_to(elsewhere)


def a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize(
    ("damage", "is_signed", "text"),
    [
        (lambda seed: (seed / "trust.json").unlink(), False, "seed-1/trust.json: is missing"),
        (lambda seed: (seed / "trust.json").unlink(), True, "seed-1/trust.json: is missing"),
        (lambda seed: (seed / "setup.py").touch(), False, "setup.py: is not named in entry.json"),
        (lambda seed: (seed / "setup.py").touch(), True, "setup.py: has no place in an entry"),
        (lambda seed: (seed / "rounds.csv").write_text("round"), False, "rounds.csv: is not the file that entry.json"),
        (lambda seed: linked(seed / "results.json"), False, "results.json: is a link"),
        (linked, False, "seed-1: is a link"),
        (lambda seed: a_pipe(seed / "results.json"), False, "results.json: is no file"),
        (lambda seed: os.truncate(seed / "results.json", 10**8), False, "100,000,000 bytes"),
        (lambda seed: changed(seed / "partition.json", class_counts=[[float("nan")]]), True, "class_counts[0][0]"),
        (lambda seed: changed(seed.parent / ENTRY, seeds=[0, 1, 2, 3, 4, 4]), False, "names a seed twice"),
        (lambda seed: changed(seed.parent / ENTRY, seeds=[]), False, "names no seed"),
        (lambda seed: changed(seed.parent / ENTRY, name="other"), False, "is about 'main/other'"),
        (lambda seed: (seed.parent / "seed-0/recipe.yaml").write_text("a: ["), True, "recipe.yaml:1: not valid YAML"),
        (lambda seed: edited(seed.parent / ENTRY, lambda of: of["files"].update({"../../../board.yaml": "0" * 64})),
         False, "board.yaml: is missing"),
    ],
)  # fmt: skip
def test_a_damaged_entry_does_not_stand(
    board: Path, damage: Callable[[Path], None], is_signed: bool, text: str
) -> None:
    damage(folder_of(board) / "seed-1")
    if is_signed:
        signed(board)
    done = calfat("board", "verify", board, "--json")
    (found,) = json.loads(done.out)
    assert done.code == 1
    assert text in found["reasons"][0]
    calfat("board", "page", board)
    assert "1 alarm" in (board / "index.html").read_text() or "An alarm" in (board / "index.html").read_text()


def of_another_class(seed: Path) -> None:
    evidence = read_evidence(seed / "evidence.safetensors")
    write_evidence(seed / "evidence.safetensors", replace(evidence, label=evidence.label + 90))


def of_no_image(seed: Path) -> None:
    evidence = read_evidence(seed / "evidence.safetensors")
    tried = {name: torch.zeros_like(of) for name, of in evidence.tried.items()}
    write_evidence(seed / "evidence.safetensors", replace(evidence, tried=tried))


def of_fewer_images(seed: Path) -> None:
    """The verdict's evidence has one at a position beyond them."""
    evidence = read_evidence(seed / "evidence.safetensors")
    few = {name: getattr(evidence, name)[:0] for name in ("covered", "index", "by", "x_adv", "prediction", "shown")}
    rows = {name: {attack: of[:1] for attack, of in getattr(evidence, name).items()} for name in ("tried", "broken")}
    fewer = replace(evidence, label=evidence.label[:1], clean=evidence.clean[:1], x_shown=evidence.x_shown[:0])
    write_evidence(seed / "evidence.safetensors", replace(fewer, **few, **rows))


@pytest.mark.parametrize("damage", [of_another_class, of_no_image, of_fewer_images])
def test_evidence_that_no_evaluation_wrote_is_an_alarm_of_its_entry(
    board: Path, damage: Callable[[Path], None]
) -> None:
    damage(folder_of(board) / "seed-1")
    signed(board)
    with pytest.raises(CalfatError, match="honest: its files cannot be used"):
        standing(entry_of(board))
    assert calfat("board", "page", board).code == 0
    assert "main/honest: " in (board / "index.html").read_text()


def test_a_recipe_that_makes_no_sense_is_a_reason_against_its_entry(made: Path, board: Path) -> None:
    """To a challenge of the entry it is an error."""
    for path in folder_of(board).glob("seed-*/recipe.yaml"):
        recipe = yaml.safe_load(path.read_text())
        recipe["calfat"]["monitor"]["evaluators"] = 5
        path.write_text(yaml.safe_dump(recipe))
    signed(board)
    done = calfat("board", "verify", board, "--json")
    (found,) = json.loads(done.out)
    assert (done.code, len(found["reasons"])) == (1, len(SEEDS))
    assert "its files cannot be used (TypeError: 'int' object is not iterable)" in found["reasons"][0]
    done = challenge(board, made / "runs" / "0" / "evidence.safetensors")
    assert (done.code, "honest: its files cannot be used (TypeError" in done.err.replace("\n", " ")) == (2, True)


# --- runs that are none of the track ----------------------------------------------------------------------------------


def of_track(board: Path, **changes: Any) -> str:
    """What speaks against the entry when the track is another one."""
    path = board / "board.yaml"
    content = yaml.safe_load(path.read_text())
    content["tracks"]["main"].update(changes)
    path.write_text(yaml.safe_dump(content))
    return "; ".join(misfits(entry_of(board), open_board(board).tracks["main"]))


def test_the_track_may_prescribe_the_seeds_so_that_nobody_picks(board: Path) -> None:
    assert of_track(board, seeds=[0, 1, 2, 3, 4]) == ""
    assert "has the seeds 0, 1, 2, 3, 4; the track prescribes 5, 6, 7, 8, 9" in of_track(board, seeds=[5, 6, 7, 8, 9])
    assert "asks for 6 or more" in of_track(board, seeds=None, at_least=6)


def test_the_track_limits_passes(board: Path) -> None:
    used = standing(entry_of(board)).by_seed[0].passes
    assert used > 0
    assert of_track(board, passes=used * 2) == ""
    assert "the track allows" in of_track(board, passes=used / 2)


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        ("eps: '0.1'", "eps: '0.05'", "calfat.threat.eps is '0.05'; the track has '0.1'"),
        ("model: cnn_small", "model: os:system", "model_args.model is 'os:system'"),
        ("random_seed: ", "random_seed: 1", "its recipe has the seed 1"),
        ("name: pgd5", "name: pgd10", "calfat.evaluators is"),
        ("clients: []", "clients: [{name: bad, ids: [0], attacker: {name: sign_flip}}]", "clients has attackers"),
        ("clients: []", "clients: 5", "its files cannot be used (TypeError"),
    ],
)
def test_another_recipe_is_none_of_the_track(board: Path, old: str, new: str, text: str) -> None:
    recipes(board, old, new)
    done = calfat("board", "verify", board, "honest")
    assert done.code == 1
    assert text in done.out.replace("\n", " ")


def test_the_recipes_of_an_entry_differ_in_their_seeds_alone(board: Path) -> None:
    path = folder_of(board) / "seed-3" / "recipe.yaml"
    path.write_text(path.read_text().replace("learning_rate: 0.03", "learning_rate: 0.04"))
    signed(board)
    found = list(misfits(entry_of(board), open_board(board).tracks["main"]))
    assert found == ["seed 3: train_args.learning_rate is 0.04; seed 0 has 0.03"]


# --- numbers and models that are none of the recipe's -----------------------------------------------------------------


def test_a_better_number_than_the_evidence_shows_is_found(board: Path) -> None:
    path = folder_of(board) / "seed-0" / "results.json"
    edited(path, lambda results: results["evaluations"][-1].update(accuracy=0.9))
    signed(board)
    assert "worst-case does not stand: 90.0 % said" in against(board)


def test_clean_images_that_are_said_to_be_right_are_asked_again(board: Path) -> None:
    run = folder_of(board) / "seed-0"
    evidence = read_evidence(run / "evidence.safetensors")
    wrong = (~evidence.correct).nonzero().flatten()
    clean = evidence.clean.clone()
    clean[wrong] = evidence.label[wrong]
    write_evidence(run / "evidence.safetensors", replace(evidence, clean=clean))
    better = {"accuracy": 1.0, "per_class": [1.0] * 10}
    edited(run / "results.json", lambda results: results["evaluations"][0].update(better))
    signed(board)
    assert "natural does not stand: 100.0 % said, 100.0 % shown" in against(board)


def test_evidence_about_the_model_of_another_seed_is_found(board: Path) -> None:
    for name in ("evidence.safetensors", "results.json"):
        shutil.copy(folder_of(board) / "seed-1" / name, folder_of(board) / "seed-0" / name)
    signed(board)
    assert "is about other" in against(board)


def counted_over(board: Path, tried: Callable[[Evidence], dict[str, torch.Tensor]]) -> None:
    """Evidence whose attacks were run on these images alone, with the results that follow from it."""
    run = folder_of(board) / "seed-0"
    evidence = read_evidence(run / "evidence.safetensors")
    chosen = tried(evidence)
    fewer = replace(evidence, tried=chosen, broken={name: evidence.broken[name] for name in chosen})
    write_evidence(run / "evidence.safetensors", fewer)

    def follow(results: Any) -> None:
        results["evaluations"] = [each for each in results["evaluations"] if each["label"] not in evidence.tried]
        for each in results["evaluations"][1:]:
            results["evaluations"].remove(each)
        for label in (*chosen, "worst-case"):
            of, right = fewer.verdicts(label)
            number, settings = int(of.sum()), {"norm": "linf", "eps": "0.1", "attack": label}
            facts = {"label": label, "num_examples": number, "accuracy": int(right.sum()) / number}
            results["evaluations"].append({**facts, "settings": settings})

    edited(run / "results.json", follow)
    signed(board)


@pytest.mark.parametrize(
    ("tried", "text"),
    [
        (
            lambda evidence: dict.fromkeys(evidence.tried, evidence.verdicts("worst-case")[1]),
            "says that fgsm was run on images that no evaluation chooses",
        ),
        (
            lambda evidence: dict.fromkeys(evidence.tried, torch.arange(100)[:, None].eq(fixed_subset(100, 20)).any(1)),
            "fgsm was run on 20 images; by its recipe it is 100",
        ),
        (lambda evidence: {"fgsm": evidence.tried["fgsm"]}, "pgd5 was run on 0 images; by its recipe it is 100"),
    ],
)
def test_an_entry_whose_attacks_left_images_out_is_found(
    board: Path, tried: Callable[[Evidence], dict[str, torch.Tensor]], text: str
) -> None:
    before = standing(entry_of(board)).by_seed[0]
    counted_over(board, tried)
    after = standing(entry_of(board)).by_seed[0]
    assert (after.images, after.worst) != (before.images, before.worst) or "pgd5" in text
    assert text in against(board)


def nothing_broken(board: Path, seed: int = 0) -> None:
    """Evidence of attacks that broke nothing, with the results and the verdict that follow from it."""
    run = folder_of(board) / f"seed-{seed}"
    for file in ("evidence.safetensors", "trust.evidence.safetensors"):
        evidence = read_evidence(run / file)
        none = {name: torch.zeros_like(of) for name, of in evidence.broken.items()}
        empty = {name: getattr(evidence, name)[:0] for name in ("index", "by", "x_adv", "prediction")}
        write_evidence(run / file, replace(evidence, broken=none, **empty))

    def better(results: Any) -> None:
        natural, *others = results["evaluations"]
        for each in others:
            each.update({key: natural[key] for key in ("accuracy", "per_class")})

    edited(run / "results.json", better)
    edited(run / "trust.json", lambda trust: trust["verdict"].update(worst=trust["verdict"]["natural"]))
    signed(board)


def test_an_entry_of_weak_attacks_is_found_by_attacks_on_other_images(board: Path) -> None:
    nothing_broken(board)
    found = against(board)
    assert "withstand by the entry, and" in found
    assert "points fewer [" in found
    assert "does not stand:" not in found


def test_a_verdict_is_held_to_its_own_evidence_and_not_to_other_images(
    board: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of honest models one in forty withstands less on 64 images than the interval of these allows of the rest."""
    trust = folder_of(board) / "seed-0" / "trust.json"
    natural, worst = (json.loads(trust.read_text())["verdict"][name] for name in ("natural", "worst"))
    fallen = read_evidence(folder_of(board) / "seed-0" / "evidence.safetensors").verdicts("worst-case")[1].logical_not()
    monkeypatch.setattr(verify, "chosen_images", lambda *_: fallen.nonzero().flatten().tolist())
    assert against(board) == ""
    edited(trust, lambda content: content["verdict"].update(worst=natural))
    signed(board)
    assert f"worst-case does not stand: {100 * natural:.1f} % said, {100 * worst:.1f} % shown" in against(board)
    edited(trust, lambda content: content["verdict"].pop("worst"))
    signed(board)
    assert "trust.evidence.safetensors supports no number" in against(board)


two_arithmetics = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in verify._OTHER_UNITS, reason="this processor has one arithmetic"
)


@two_arithmetics
def test_weights_that_the_recipe_did_not_make_are_found(board: Path) -> None:
    recipes(board, "momentum: 0.9", "momentum: 0.0")
    found = against(board)
    assert "two rounds trained again end elsewhere" in found
    assert "two arithmetics of this processor end" in found
    assert "withstand" not in found


@two_arithmetics
@pytest.mark.parametrize("from_start", [False, True])
def test_weights_of_another_processor_are_as_far_as_two_arithmetics_are(
    board: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, from_start: bool
) -> None:
    """The last model is made again as a processor without vector units makes it, and the board is not told."""
    monkeypatch.setattr(verify, "_OTHER_UNITS", dict.fromkeys(verify._OTHER_UNITS, "default"))
    last = folder_of(board) / "seed-0" / "checkpoints" / "last.safetensors"
    if from_start:  # then nobody reads what the model was two rounds before
        before = last.with_name("two-rounds-left.safetensors")
        snapshot, notes = load_checkpoint(before)
        lost = {name: tensor * float("nan") for name, tensor in snapshot.global_state.items()}
        save_checkpoint(before, replace(snapshot, global_state=lost), notes)
        signed(board)
    theirs = verify._other_arithmetic(entry_of(board), 0, Means(), tmp_path / "theirs", from_start=from_start)
    snapshot, notes = load_checkpoint(last)
    assert any(not torch.equal(theirs[name], tensor) for name, tensor in snapshot.global_state.items())
    save_checkpoint(last, replace(snapshot, global_state=theirs), notes)
    signed(board)
    monkeypatch.undo()
    (found,) = verify._trained_again(entry_of(board), 0, Means(), tmp_path, from_start, None)
    assert found.text.startswith("4 rounds" if from_start else "two rounds")
    assert "of the way that they moved the weights apart; two arithmetics of this processor end" in found.text
    assert not found.against
    _, *with_bits = verify._trained_again(entry_of(board), 0, Means(), tmp_path / "0", from_start, 0)
    assert "end elsewhere" in with_bits[0].text
    assert with_bits[0].against


@pytest.mark.parametrize(
    ("moved", "drift", "stands"),
    [(1, 0.0, False), (1, 0.49, False), (1, 0.51, True), (0.04, 0.0, True), (0.06, 0.0, False), (50, 0.6, False)],
)
def test_how_far_weights_may_end_follows_from_what_is_measured_here(
    board: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moved: float, drift: float, stands: bool
) -> None:
    """The entry's weights go farther by a share of what the rounds moved them, the other arithmetic's by another."""
    run = folder_of(board) / "seed-0" / "checkpoints"
    before = load_checkpoint(run / "two-rounds-left.safetensors")[0].global_state
    snapshot, notes = load_checkpoint(run / "last.safetensors")
    mine = dict(snapshot.global_state)
    said = {name: tensor + moved * (tensor - before[name]) for name, tensor in mine.items()}
    save_checkpoint(run / "last.safetensors", replace(snapshot, global_state=said), notes)
    signed(board)
    otherwise = {name: tensor + drift * (tensor - before[name]) for name, tensor in mine.items()}
    monkeypatch.setattr(verify, "_other_arithmetic", lambda *_: otherwise)
    _, *reasons = verify._trained_again(entry_of(board), 0, Means(), tmp_path, False, None)
    assert (reasons == []) is stands
    assert stands or "(at most" in reasons[0].text


def test_a_processor_with_one_arithmetic_says_that_it_cannot_judge(
    board: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is no fault of the entry's: nothing is noted against it."""
    recipes(board, "momentum: 0.9", "momentum: 0.0")
    monkeypatch.setattr(verify, "_OTHER_UNITS", {})
    done = calfat("board", "verify", board)
    assert (done.code, "does not stand" in done.out + done.err) == (2, False)
    assert f"{folder_of(board) / 'seed-0'}: its weights are not those that this processor" in done.err
    assert "say with --within how far the weights may end" in done.err
    assert not open_board(board).record("main", "honest").exists()
    assert "end elsewhere" not in against(board, within=2)


def test_what_was_seen_before_a_processor_cannot_judge_is_said(board: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seed 0 is accepted, seed 1 refused, and seed 2 has weights of which nobody here can say what they mean."""
    results = folder_of(board) / "seed-1" / "results.json"
    edited(results, lambda content: content["evaluations"][2].update(accuracy=1.0))
    before = folder_of(board) / "seed-2" / "checkpoints" / "two-rounds-left.safetensors"
    snapshot, notes = load_checkpoint(before)
    moved = {name: tensor * 1.01 for name, tensor in snapshot.global_state.items()}
    save_checkpoint(before, replace(snapshot, global_state=moved), notes)
    signed(board)
    monkeypatch.setattr(verify, "_OTHER_UNITS", {})
    done = calfat("board", "verify", board)
    said = done.out.splitlines()
    assert (done.code, sum("does not stand" in line for line in said)) == (2, 1)
    for line in (
        "  seed 0: two rounds trained again: the same bits",
        "  does not stand: seed 1: pgd5 does not stand: 100.0 % said",
        "  seed 1: two rounds trained again: the same bits",
        "  seed 2: evidence.safetensors: ",
        f"  seed 2: of {IMAGES} images",
    ):
        assert sum(each.startswith(line) for each in said) == 1, line
    assert not any("seed 3" in line for line in said)
    assert "seed-2: its weights are not those that this processor" in done.err
    assert not open_board(board).record("main", "honest").exists()


def no_fedml(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed, "version_of", lambda distribution: None)


def another_fedml(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fedml, "__version__", "0.9.7")


def full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(paths: object, also: object = ()) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(disk, "put_in_place", no_room)


def full_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(*given: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(verify, "_trained_again", no_room)


def no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "_OTHER_UNITS", dict.fromkeys([torch.backends.cpu.get_cpu_capability()], "default"))
    monkeypatch.setattr(sys, "executable", shutil.which("false"))


@pytest.mark.parametrize(
    ("fails", "text"),
    [
        (no_fedml, "FedML is not installed"),
        (another_fedml, "fedml 0.9.7 is installed"),
        (full_disk, "cannot be written (No space left on device)"),
        (full_gpu, "the memory of the device is not enough (CUDA out of memory.)"),
        (no_process, "its rounds cannot be trained in a process of their own"),
    ],
)
def test_what_fails_here_is_not_noted_against_the_entry(
    board: Path, monkeypatch: pytest.MonkeyPatch, fails: Callable[[pytest.MonkeyPatch], None], text: str
) -> None:
    """Although the entry's weights are not those of its recipe, which nobody here has found out."""
    recipes(board, "momentum: 0.9", "momentum: 0.0")
    fails(monkeypatch)
    done = calfat("board", "verify", board)
    assert (done.code, "does not stand" in done.out + done.err) == (2, False)
    assert text in done.err
    assert not open_board(board).record("main", "honest").exists()


def test_a_start_that_is_not_the_recipes_is_found_from_the_start_alone(board: Path) -> None:
    """Two honest rounds from weights of anybody's: the documented limit of a verification without --from-start."""
    recipes(board, "warmup_rounds: 0", "warmup_rounds: 1")
    assert against(board, within=0) == ""
    assert "4 rounds trained again end elsewhere" in against(board, from_start=True, within=0)


@pytest.mark.parametrize("file", ["last", "two-rounds-left"])
def test_a_model_with_nan_or_of_another_round_is_found(board: Path, file: str) -> None:
    path = folder_of(board) / "seed-0" / "checkpoints" / f"{file}.safetensors"
    snapshot, notes = load_checkpoint(path)
    save_checkpoint(path, replace(snapshot, round=3), notes)
    signed(board)
    assert "its models are of the rounds" in against(board)
    name = next(iter(snapshot.global_state))
    state = {**snapshot.global_state, name: snapshot.global_state[name] * float("nan")}
    save_checkpoint(path, replace(snapshot, global_state=state), notes)
    signed(board)
    assert against(board)


@pytest.mark.parametrize(("round", "from_start"), [(4, False), (1, True)])
def test_passes_that_the_rounds_trained_again_do_not_make_are_found(board: Path, round: int, from_start: bool) -> None:
    path = folder_of(board) / "seed-0" / "rounds.csv"
    lines = path.read_text().splitlines()
    fields = lines[round].split(",")
    fields[lines[0].split(",").index("passes")] = "1.0"
    lines[round] = ",".join(fields)
    path.write_text("\n".join(lines) + "\n")
    signed(board)
    assert "its rounds.csv says 1.0" in against(board, from_start=from_start)


def test_other_training_data_are_found(board: Path) -> None:
    path = folder_of(board) / "seed-0" / "partition.json"
    edited(path, lambda partition: partition.update(dataset_sha256="0" * 64))
    signed(board)
    assert "the data are not those this run was started with" in against(board)


@pytest.mark.parametrize("from_start", [False, True])
def test_clients_that_are_called_attackers_are_those_of_the_recipe(board: Path, from_start: bool) -> None:
    """The worst clients of a row are of all others."""
    before = standing(entry_of(board)).by_seed[0]
    path = folder_of(board) / "seed-0" / "partition.json"
    edited(path, lambda partition: partition.update(attackers=[0, 1]))
    signed(board)
    assert standing(entry_of(board)).by_seed[0].worst_clients != before.worst_clients
    assert "says attackers [0, 1]; here: []" in against(board, from_start=from_start)


# --- nothing of an entry is followed ----------------------------------------------------------------------------------


@pytest.mark.parametrize("download", [False, True])
@pytest.mark.parametrize("theirs", ["download=false", "download=true"])
def test_whether_data_are_fetched_is_the_verifiers_choice(tmp_path: Path, theirs: str, download: bool) -> None:
    """Where they can be: the workflow of a board has --download, whatever its data set is."""
    for name, sets in {"calfat_digits": [], "calfat_fmnist": [f"calfat.dataset.{theirs}"]}.items():
        entry = Entry(tmp_path / name, "main", name, "Ada", (0,), "", ())
        entry.of(0).mkdir(parents=True)
        RunDirectory(entry.of(0)).write_recipe(checked_experiment(read_document(name), sets))
        own = own_experiment(own_recipe(entry, 0, Means(download=download)))
        assert getattr(own.dataset.options, "download", None) == (download if sets else None)


def test_places_of_the_entrant_are_not_followed(board: Path) -> None:
    recipes(board, "data_cache_dir: ~/data", "data_cache_dir: /somewhere/else")
    recipes(board, "using_gpu: false", "using_gpu: true")
    recipes(board, "loggers: []", "loggers: [tensorboard]")
    recipe = own_recipe(entry_of(board), 0, Means(data_dir="/mine"))
    assert recipe.get(("data_args", "data_cache_dir")) == "/mine"
    assert recipe.get(("device_args", "using_gpu")) is False
    assert recipe.get(("calfat", "loggers")) is None


def test_an_evaluator_that_reads_a_file_is_refused(board: Path) -> None:
    old = "  monitor:\n    every: 1\n    max_examples: null\n    evaluators:\n"
    recipes(board, old, "  monitor:\n    evaluators:\n    - {name: transfer, source: /etc}\n")
    with pytest.raises(CalfatError, match="reads /etc, which is not followed"):
        own_recipe(entry_of(board), 0, Means())


def test_plugin_code_is_named_and_executed_only_if_trusted(board: Path) -> None:
    code = f"from pathlib import Path\nPath({str(board / 'executed')!r}).touch()\n"
    (folder_of(board) / "plugins").mkdir()
    (folder_of(board) / "plugins" / "their_code.py").write_text(code)
    sha256 = hashlib.sha256(code.encode()).hexdigest()
    entry = f"calfat:\n  plugins:\n    their_code: {{file: /nowhere/their_code.py, sha256: {sha256}}}\n"
    recipes(board, "calfat:\n", entry)
    assert "add --trust-plugins their_code" in against(board)
    assert sha256 in against(board)
    assert not (board / "executed").exists()
    recipe = own_recipe(entry_of(board), 0, Means(trusted=("their_code",)))
    assert recipe.get(("calfat", "plugins", "their_code", "file")).startswith(str(board))
    (folder_of(board) / "plugins" / "their_code.py").write_text(code + "\n")
    signed(board)
    with pytest.raises(CalfatError, match="the recipe was run with"):
        own_recipe(entry_of(board), 0, Means(trusted=("their_code",)))


# --- challenges -------------------------------------------------------------------------------------------------------


def challenge(board: Path, evidence: Path, by: str = "eve") -> Ended:
    return calfat("board", "challenge", board, "honest", "--evidence", evidence, "--by", by, "--json")


def test_a_challenge_lowers_the_row_and_names_the_challenger(made: Path, board: Path) -> None:
    genuine = made / "runs" / "0" / "evidence.safetensors"
    before = standing(entry_of(board)).by_seed
    assert challenge(board, genuine).code == 2  # it shows what is known
    nothing_broken(board)
    assert standing(entry_of(board)).by_seed[0].worst > before[0].worst
    done = challenge(board, genuine)
    assert done.code == 0, done
    found = json.loads(done.out)
    assert found["after"]["seeds"]["0"]["worst"] == before[0].worst < found["before"]["seeds"]["0"]["worst"]
    assert found["after"]["seeds"]["0"]["worst_class"] <= found["before"]["seeds"]["0"]["worst_class"]
    for seed in "1234":
        assert found["after"]["seeds"][seed] == found["before"]["seeds"][seed]
    broken = found["after"]["challengers"]["eve"]
    assert broken == len(read_evidence(genuine).index)
    calfat("board", "page", board)
    assert f"lowered by eve ({broken} images)" in (board / "index.html").read_text()
    again = challenge(board, genuine)
    assert again.code == 2
    assert "--by eve-2" in again.err
    assert "end elsewhere" not in against(board)


def test_a_challenge_that_proves_nothing_is_refused(made: Path, board: Path, tmp_path: Path) -> None:
    nothing_broken(board)
    evidence = read_evidence(made / "runs" / "0" / "evidence.safetensors")
    clean = evidence.x_adv.clone()
    at = next(row for row, image in enumerate(evidence.index.tolist()) if image in evidence.shown)
    clean[at] = evidence.x_shown[evidence.shown == evidence.index[at]][0]
    beyond = evidence.x_adv.clone()
    beyond[0, 0, 0, 0] += 0.5
    for forged, text in (
        (replace(evidence, x_adv=clean), "does not fall"),
        (replace(evidence, x_adv=beyond), "left the"),
        (replace(evidence, facts={**evidence.facts, "weights": "0" * 64}), "other weights"),
        (replace(evidence, facts={**evidence.facts, "eps": "0.5"}), "the track's is linf 0.1"),
        (replace(evidence, clean=evidence.clean.roll(1)), "image"),
    ):
        write_evidence(tmp_path / "evidence.safetensors", forged)
        done = challenge(board, tmp_path / "evidence.safetensors")
        assert done.code == 2
        assert text in done.err
        assert not (folder_of(board) / "challenges" / "eve.safetensors").exists()
    assert challenge(board, tmp_path / "evidence.safetensors", "../eve").code == 2


def test_a_challenge_that_was_put_there_is_checked_by_verify(made: Path, board: Path) -> None:
    evidence = read_evidence(made / "runs" / "0" / "evidence.safetensors")
    write_evidence(
        folder_of(board) / "challenges" / "eve.safetensors", replace(evidence, facts={**evidence.facts, "eps": "0.5"})
    )
    assert "eve.safetensors: is about the ball linf 0.5" in against(board)
    assert "eve" not in against(board, 1)


def test_a_challenge_on_a_full_disk_leaves_no_half_of_it(
    made: Path, board: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half a file would be a challenge that proves nothing, and with it the entry would not verify."""
    nothing_broken(board)
    copyfile = shutil.copyfile

    def until_it_is_full(source: Path, target: Path) -> None:
        if target.is_relative_to(board):
            target.write_bytes(source.read_bytes()[:100])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(source))
        copyfile(source, target)

    monkeypatch.setattr(shutil, "copyfile", until_it_is_full)
    done = challenge(board, made / "runs" / "0" / "evidence.safetensors")
    kept = folder_of(board) / "challenges" / "eve.safetensors"
    assert list(kept.parent.iterdir()) == list(board.rglob(".*.tmp")) == []
    assert (done.code, f"{kept}: cannot be written (No space left on device)" in done.err) == (2, True)


# --- boards -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        ("at_least: 5", "at_least: 4", "tracks.main.at_least"),
        ("seeds: null", "seeds: [1, 2]", "tracks.main.seeds: has 2 different seeds"),
        ("passes: null", "pases: 3", "Did you mean 'passes'?"),
        ("  main:", "  Main track:", "it names a folder"),
        ("      calfat.threat.eps: '0.1'\n", "", "lacks calfat.threat.eps"),
    ],
)
def test_a_wrong_board_is_refused_with_its_place(board: Path, old: str, new: str, text: str) -> None:
    path = board / "board.yaml"
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(RecipeError, match=r"board\.yaml:\d+: ") as caught:
        open_board(board)
    assert text in str(caught.value)
    assert calfat("board", "verify", board).code == 2


def test_the_page_replaces_no_file_that_is_none(board: Path) -> None:
    notes = board / "notes.html"
    notes.write_text("mine")
    done = calfat("board", "page", board, "--out", notes)
    assert (done.code, notes.read_text()) == (2, "mine")
    assert "there is a file that calfat did not make" in done.err


def test_of_two_that_add_one_name_at_once_the_later_leaves_the_other_s_entry(
    made: Path, board: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = board / "entries" / "main" / "other"

    def meanwhile(path: Path) -> str:
        other.mkdir(parents=True, exist_ok=True)
        (other / "theirs").touch()
        return "0" * 64

    monkeypatch.setattr("calfat_plugin.board.entry.sha256_of", meanwhile)
    done = calfat("board", "add", board, *(made / "runs" / str(seed) for seed in SEEDS), "--name", "other")
    assert done.code == 2
    assert [path.name for path in other.iterdir()] == ["theirs"]
    assert not list(other.parent.glob(".*"))


def test_a_plugin_that_is_no_longer_the_one_of_the_run_is_not_added(tmp_path: Path) -> None:
    run, code = tmp_path / "run", tmp_path / "my_code.py"
    (run / "checkpoints").mkdir(parents=True)
    for file in FILES:
        (run / file).write_text("{}")
    plugin = f"{{file: {code}, sha256: {hashlib.sha256(b'x = 1').hexdigest()}}}"
    (run / "recipe.yaml").write_text(f"calfat: {{plugins: {{my_code: {plugin}}}}}\n")
    nothing = Board(tmp_path / "board", "", {})
    with pytest.raises(PluginError, match=r"my_code\.py: the plugin file cannot be read"):
        add(nothing, "main", "mine", "Ada", [run])
    code.write_text("x = 2")
    with pytest.raises(PluginError, match=r"my_code\.py: this plugin has changed: its SHA-256 was .*Restore it"):
        add(nothing, "main", "mine", "Ada", [run])
    assert not any(path.is_file() for path in (tmp_path / "board").rglob("*"))


def test_what_a_killed_add_left_is_no_entry(board: Path) -> None:
    (board / "entries" / "main" / ".other.tmp" / "seed-0").mkdir(parents=True)
    assert open_board(board).entries() == [("main", "honest")]


def test_a_board_needs_no_git(board: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert len(open_board(board).revision()) == 64


@pytest.mark.parametrize("within", ["nan", "inf"])
def test_a_distance_that_is_no_number_is_refused(board: Path, within: str) -> None:
    """No weights are as near as nan, and all are nearer than inf."""
    done = calfat("board", "verify", board, "--within", within)
    assert (done.code, done.err) == (2, f"error: --within {within}: expected a number, 0 or more.\n")
    assert not open_board(board).record("main", "honest").exists()


def test_what_is_no_board_and_no_entry_is_said(board: Path, tmp_path: Path) -> None:
    assert calfat("board", "verify", tmp_path).code == 2
    done = calfat("board", "verify", board, "honst")
    assert done.code == 2
    assert "Did you mean" in done.err
    assert calfat("board", "init", board, board).code == 2
    again = calfat("board", "init", board, folder_of(board) / "seed-0")
    assert again.err == f"error: {board}: it is there already. Add an entry: calfat board add {board} RUN...\n"


def test_runs_that_lack_something_are_not_added(made: Path, board: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(made / "runs" / "0", tmp_path / "my run"))

    def refused() -> str:
        done = calfat("board", "add", board, run, "--name", "other")
        assert done.code == 2
        assert not (board / "entries" / "main" / "other").exists()
        assert not list((board / "entries" / "main").glob(".*"))
        return done.err

    assert "has 1 seeds; the track asks for 5" in refused()
    for file, text in (
        ("checkpoints/two-rounds-left.safetensors", "two rounds before the end"),
        ("trust.evidence.safetensors", "Remove trust.json and judge it anew: calfat trust"),
        ("trust.json", f"Judge it first: calfat trust '{run}'"),
        ("evidence.safetensors", "evidence_mb"),
        ("results.json", f"Finish it: calfat run '{run}/recipe.yaml' --resume --run-dir '{run}'"),
    ):
        (run / file).unlink()
        assert text in refused()
        if file == "trust.evidence.safetensors":  # a battery that was killed has none yet, and continues
            changed(run / "trust.json", finished=False)
            assert f"Judge it to the end: calfat trust '{run}'" in refused()
    assert "is there already" in calfat("board", "add", board, run, "--name", "honest").err


def test_the_continuous_integration_verifies(board: Path) -> None:
    steps = yaml.safe_load((board / ".github" / "workflows" / "verify.yml").read_text())["jobs"]["verify"]["steps"]
    assert any(step.get("run", "").startswith("calfat board verify .") for step in steps)
    assert load_file(folder_of(board) / "seed-0" / "checkpoints" / "last.safetensors")
