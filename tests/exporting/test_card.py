"""The card: its numbers are those of the files on disk, and names in it stay texts."""

from __future__ import annotations

import html
import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import yaml
from markdown import markdown
from markdown_it import MarkdownIt

from calfat_plugin.disk import sha256_of
from calfat_plugin.exporting.markdown import escaped
from calfat_plugin.maths.intervals import wilson
from tests.cli.runner import calfat

#: What would be HTML, a link, an image, a cell, a fence, a heading, or the end of the metadata.
HOSTILE = (
    "<img src=x onerror=alert(1)> | `code` ![i](http://e.vil/i.png) [l](javascript:alert(1)) **b** _i_ ~~s~~ "
    "<!-- c --> &lt;b&gt; http://e.vil www.e.vil a@e.vil $x$ \\ # h"
)


class Tags(HTMLParser):
    """The tags of a page, with what they lead to."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.leads: list[str] = []
        self.texts: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.leads += [str(value) for name, value in attributes if name in ("href", "src")]
        assert not any(name.startswith("on") for name, _ in attributes)

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join("".join(self.texts).split())


def parts(card: str) -> tuple[dict[str, Any], str]:
    """(metadata, Markdown) of a card."""
    _, block, body = card.split("---\n", 2)
    metadata = yaml.safe_load(block)
    assert isinstance(metadata, dict)
    return metadata, body


def rendered(body: str) -> list[Tags]:
    """The card as two renderers of Markdown make it."""
    github = MarkdownIt("gfm-like", {"html": True, "linkify": False}).render(body)
    return [Tags(github), Tags(markdown(body, extensions=["tables", "fenced_code"]))]


def cells(body: str, heading: str) -> list[list[str]]:
    """The rows of the table whose head begins with a text, as they are read."""
    lines = body[body.index(f"| {heading} |") :].splitlines()
    rows = []
    for line in lines[2:]:
        if not line.startswith("|"):
            break
        rows.append([html.unescape(cell.strip()).replace("\\", "") for cell in line.strip("|").split(" | ")])
    return rows


def facts(body: str, section: str) -> dict[str, str]:
    """The table of two columns with which a section begins."""
    lines = body[body.index(f"## {section}\n") :].splitlines()
    assert lines[2:4] == ["| fact | as the run noted it |", "| --- | --- |"]
    rows: dict[str, str] = {}
    for line in lines[4:]:
        if not line.startswith("|"):
            break
        key, value = line.strip("| ").split(" | ")
        rows[key] = html.unescape(value).replace("\\", "")
    return rows


def card_in(folder: Path) -> str:
    """The card; its spaces are the usual ones."""
    return (folder / "README.md").read_text(encoding="utf-8").replace("&nbsp;", " ")


@pytest.fixture
def card(run: Path) -> str:
    return card_in(run / "export")


def percent(share: float) -> str:
    return f"{share * 100:.1f} %"


# --- numbers ----------------------------------------------------------------------------------------------------------


def test_every_accuracy_is_that_of_results_json(run: Path, card: str) -> None:
    results = json.loads((run / "results.json").read_text())
    rows = cells(card, "evaluator")
    assert len(rows) == len(results["evaluations"]) == 4
    for row, found in zip(rows, results["evaluations"], strict=True):
        number, share = found["num_examples"], found["accuracy"]
        right = [round(share_of_class * 36) for share_of_class in found["per_class"]]
        assert abs(sum(right) - share * number) < 12, "digits has 34 to 37 test images a class"
        low, high = wilson(share, number)
        worst = min(range(10), key=lambda label: found["per_class"][label])
        assert row[0] == found["label"]
        assert row[1] == ("" if found["label"] == "natural" else "linf, eps 0.1")
        assert row[2] == percent(share)
        assert row[3] == f"[{100 * low:.1f}, {100 * high:.1f}]"
        assert row[4] == str(number)
        assert row[5:7] == [str(worst), percent(found["per_class"][worst])]
        assert row[7] == str(found["worst_clients"]["ids"][0])
        assert row[8] == percent(found["worst_clients"]["accuracy"])


def test_the_summary_has_the_natural_accuracy_and_the_lowest_of_all(run: Path, card: str) -> None:
    evaluations = json.loads((run / "results.json").read_text())["evaluations"]
    lowest = min(evaluations, key=lambda found: found["accuracy"])
    (line,) = [line for line in card.splitlines() if line.startswith("**It gets")]
    text = line.replace("\\", "")
    assert text.startswith(f"**It gets {percent(evaluations[0]['accuracy'])} [")
    assert f"at most {percent(lowest['accuracy'])} [" in text
    assert text.endswith(f"within the linf ball of eps 0.1 ({lowest['label']}).**")
    metadata, _ = parts(card)
    (result,) = metadata["model-index"][0]["results"]
    assert [metric["value"] for metric in result["metrics"]] == [evaluations[0]["accuracy"], lowest["accuracy"]]


def test_an_attack_that_comes_later_and_goes_lower_is_in_the_summary(run: Path) -> None:
    assert calfat("attack", run, "--attacks", "pgd100", "--examples", "20").code == 0
    path = run / "attacks" / "last.json"
    content = json.loads(path.read_text())
    for found in content["evaluations"]:
        if found["label"] == "pgd100":
            found["accuracy"] = 0.0123
    path.write_text(json.dumps(content))
    assert calfat("export", run, "--to", run / "again").code == 0
    card = card_in(run / "again")
    assert "From attacks/last.json:" in card
    (line,) = [line for line in card.splitlines() if line.startswith("**It gets")]
    assert "at most 1.2 % " in line
    assert "(pgd100)" in line


def test_data_and_clients_are_those_of_partition_json(run: Path, card: str) -> None:
    partition = json.loads((run / "partition.json").read_text())
    counts = partition["class_counts"]
    rows = facts(card, "Data and clients")
    assert rows["SHA-256 of all its images and labels"] == partition["dataset_sha256"]
    assert rows["SHA-256 of the split"] == partition["partition_sha256"]
    assert rows["training images"] == f"{sum(map(sum, counts)):,}"
    assert rows["test images"] == "359"
    assert rows["classes"] == "10: 0, 1, 2, 3, 4, 5, 6, 7, 8, 9"
    assert rows["clients"] == "3"
    assert rows["split among the clients"].startswith("dirichlet (alpha 0.5")
    assert rows["licence of the data"].startswith("CC BY 4.0")
    sizes, shares = [sum(row) for row in counts], [max(row) / sum(row) for row in counts]
    assert rows["skew"] == (
        f"clients have {min(sizes)} to {max(sizes)} images (median {median(sizes)}); the largest class of a client is "
        f"{percent(median(shares))} of its images (median)"
    )
    table = cells(card, "client")
    assert len(table) == 3
    for client, (row, of_client) in enumerate(zip(table, counts, strict=True)):
        largest = max(of_client)
        present = sum(count > 0 for count in of_client)
        share = percent(largest / sum(of_client))
        assert row == [str(client), str(sum(of_client)), str(present), str(of_client.index(largest)), share]


def test_how_it_was_trained_is_what_the_run_noted(run: Path, card: str) -> None:
    environment = json.loads((run / "environment.json").read_text())
    results = json.loads((run / "results.json").read_text())
    rows = facts(card, "How it was trained")
    assert rows["method"].startswith("calfat: ")
    assert "Chen et al." in rows["its paper"]
    assert rows["network"] == "cnn_small (norm none)"
    assert rows["budget of training"] == "linf, eps 0.1, 2 steps"
    assert rows["rounds"] == "2 of 2"
    assert rows["seed"] == "3"
    assert rows["time"] == f"{results['seconds']:.1f} s"
    assert rows["processor"] == environment["processor"]
    for name in ("torch", "numpy", "calfat-plugin"):
        assert f"{name} {environment['versions'][name]}" in rows["versions"]
    assert yaml.safe_load(card[card.index("```yaml") + 7 :].split("```")[0])["train_args"]["comm_round"] == 2


def test_the_replays_are_those_of_the_command(run: Path, card: str) -> None:
    for name, row in zip(("model.pt2", "model.onnx"), cells(card, "file"), strict=True):
        exact, eight_bit = (
            json.loads(calfat("replay", run, "--model-file", run / "export" / name, *options, "--json").out)
            for options in ([], ["--eight-bit"])
        )
        fallen = ", ".join(number["label"] for number in eight_bit["numbers"] if not number["stands"])
        assert row[:2] == [name, exact["runtime"]]
        assert row[2:4] == [f"{exact['fall']} of {exact['images']}", "none"]
        assert row[4:6] == [f"{eight_bit['fall']} of {eight_bit['images']}", fallen or "none"]
        assert float(row[6]) == pytest.approx(exact["logit_difference"], rel=0.06, abs=1e-9)


def test_the_sha_256_are_those_of_the_files(run: Path, card: str) -> None:
    names = ["config.json", "model.onnx", "model.pt2", "model.safetensors"]
    assert cells(card, "file | SHA-256") == [[name, sha256_of(run / "export" / name)] for name in names]


def test_no_other_number_is_on_the_card(run: Path, card: str) -> None:
    """Whatever is a number in the measured part is one of those that the tests above recompute, or a constant."""
    _, body = parts(card)
    start, end = body.index("## What was measured"), body.index("### What these numbers do not say")
    known = {cell for row in cells(card, "evaluator") for cell in row}
    known |= {"95", "10"}
    known |= {alarm["text"] for alarm in json.loads((run / "results.json").read_text())["alarms"]}
    numbers = re.findall(r"\d+(?:\.\d+)?", html.unescape(body[start:end]).replace("\\", ""))
    flat = set(re.findall(r"\d+(?:\.\d+)?", " ".join(known)))
    assert set(numbers) <= flat


def test_the_verdict_of_trust_is_on_the_card(run: Path, card: str) -> None:
    assert "*not judged*" in card
    sentence = "The 70.0 % under PGD-20 within linf 0.1 hold."
    trust = {
        "attack": "pgd20",
        "checkpoint": str(run / "checkpoints" / "last.safetensors"),
        "round": 2,
        "examples": 359,
        "finished": True,
        "threat": {"norm": "linf", "eps": "0.1"},
        "verdict": {"word": "holds", "text": "holds", "sentence": sentence, "causes": []},
        "checks": [],
    }
    for number, (change, judged) in enumerate(
        [
            ({}, True),
            ({"round": 1}, False),
            ({"finished": False}, False),
            ({"checkpoint": "best-robust.safetensors"}, False),
        ]
    ):
        (run / "trust.json").write_text(json.dumps({**trust, **change}))
        assert calfat("export", run, "--to", run / str(number)).code == 0
        text = card_in(run / str(number))
        assert (sentence in text) is judged
        assert ("*not judged*" in text) is not judged


# --- names ------------------------------------------------------------------------------------------------------------


def test_the_metadata_is_what_hubs_read(card: str) -> None:
    metadata, _ = parts(card)
    assert metadata["library_name"] == "pytorch"
    assert metadata["pipeline_tag"] == "image-classification"
    assert {"federated-learning", "adversarial-robustness", "calfat"} <= {*metadata["tags"]}
    assert metadata["datasets"] == ["digits"]
    assert metadata["metrics"] == ["accuracy"]
    assert metadata["model-index"][0]["name"] == "exported"


@pytest.mark.parametrize("sign", list("&<>|:@~$`"))
def test_a_sign_of_html_or_markdown_is_written_as_an_entity(sign: str) -> None:
    """Each by itself: a renderer may take a tag that has no end."""
    assert escaped(sign) == f"&#{ord(sign)};"


def test_hostile_names_are_shown_as_text(run: Path) -> None:
    partition = json.loads((run / "partition.json").read_text())
    results = json.loads((run / "results.json").read_text())
    worst = results["evaluations"][1]["worst_class"]["ids"][0]
    partition["class_names"][worst] = f"class {HOSTILE}"
    (run / "partition.json").write_text(json.dumps(partition))
    results["recipe"] = f"recipe {HOSTILE}\n---\n# not a heading"
    results["citations"] = [{"text": f"paper {HOSTILE}", "bibtex": f"@misc{{x,\n```\n# out {HOSTILE}\n````\n}}"}]
    results["alarms"] = [{"code": "x", "text": f"alarm {HOSTILE}", "labels": []}]
    (run / "results.json").write_text(json.dumps(results))
    before = rendered(parts((run / "export" / "README.md").read_text())[1])
    assert calfat("export", run, "--to", run / "hostile").code in (0, 1)
    metadata, body = parts((run / "hostile" / "README.md").read_text())
    assert metadata["model-index"][0]["name"] == f"recipe {HOSTILE} --- # not a heading"
    for page, harmless in zip(rendered(body), before, strict=True):
        assert page.tags <= harmless.tags | {"ul", "li"}, "the alarm is an item of a list"
        assert sorted(page.leads) == sorted(harmless.leads)
        for what in ("class", "paper", "alarm", "recipe"):
            assert f"{what} {HOSTILE}" in page.text
        assert "out <img" in page.text, "BibTeX is a block of code, whatever is in it"


def test_the_users_own_text_is_kept_apart(run: Path, tmp_path: Path) -> None:
    notes = tmp_path / "notes.md"
    notes.write_text("# Intended use\n\nFor *tests*.\n\n</blockquote><script>alert(1)</script>\n\n## Check it\n")
    assert calfat("export", run, "--to", run / "noted", "--card", notes).code == 0
    _, body = parts((run / "noted" / "README.md").read_text())
    own = body[body.index("## Notes of whoever exported it") :]
    assert "Nothing in it was measured or checked." in own
    assert "> # Intended use" in own
    assert "> ## Check it" in own
    for page in rendered(body):
        assert "script" not in page.tags
    assert "Intended use" not in body[: body.index("## Notes of whoever exported it")]


@pytest.mark.parametrize(
    ("content", "text"),
    [(None, "No such file"), (b"\xff\xfe", "is no UTF-8 text"), (b"x" * 1_000_001, "more than 1,000,000 bytes")],
)
def test_notes_that_cannot_be_taken_are_said(run: Path, content: bytes | None, text: str) -> None:
    notes = run / "notes.md"
    if content is not None:
        notes.write_bytes(content)
    done = calfat("export", run, "--to", run / "x", "--card", notes)
    assert done.code == 2
    assert f"--card {notes}: " in done.err
    assert text in done.err
    assert not (run / "x").exists()


def test_no_secret_and_no_folder_of_the_user_is_on_the_card(run: Path) -> None:
    environment = json.loads((run / "environment.json").read_text())
    environment["command"] = ["calfat", "run", "x.yaml", "--set", "tracking_args.wandb_key=S3CRET"]
    (run / "environment.json").write_text(json.dumps(environment))
    assert calfat("export", run, "--to", run / "x").code == 0
    for path in (run / "x").iterdir():
        if path.is_file():
            assert b"S3CRET" not in path.read_bytes(), path
    assert str(run) not in (run / "x" / "README.md").read_text()


def test_a_run_that_is_not_finished_says_so(run: Path) -> None:
    (run / "results.json").unlink()
    shutil.rmtree(run / "export")
    assert calfat("export", run).code == 0
    card = (run / "export" / "README.md").read_text()
    assert "**Not measured:** the run is not finished." in card
    assert "model-index" not in parts(card)[0]
