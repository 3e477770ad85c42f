"""Strips of adversarial images, and two runs compared image by image."""

from __future__ import annotations

import base64
import io
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image

from calfat_plugin.evaluators.evidence import Evidence, write_evidence
from calfat_plugin.maths.intervals import mcnemar
from calfat_plugin.report import write_comparison, write_run_report
from calfat_plugin.report.images import perturbation, png, strips
from tests.report.made import draw_nothing, made_run

NAMES = tuple("abc")


def evidence(broken: list[bool], *, channels: int = 1, data: str = "d") -> Evidence:
    """Six images, two a class; the first of class b is wrong when clean; ``pgd2`` broke some of the others."""
    label = torch.tensor([0, 0, 1, 1, 2, 2])
    clean = torch.tensor([0, 0, 2, 1, 2, 2])
    broke = torch.tensor(broken)
    index = (broke & (clean == label)).nonzero().flatten()
    x = torch.full((6, channels, 4, 4), 0.5)
    return Evidence(
        label=label,
        clean=clean,
        attacks=("fgsm", "pgd2"),
        tried={"fgsm": torch.ones(6, dtype=torch.bool), "pgd2": torch.ones(6, dtype=torch.bool)},
        broken={"fgsm": torch.zeros(6, dtype=torch.bool), "pgd2": broke},
        covered=torch.arange(6),
        index=index,
        by=torch.ones(len(index), dtype=torch.int64),
        x_adv=x[index] + 0.1,
        prediction=(label[index] + 1) % 3,
        shown=torch.arange(6),
        x_shown=x,
        facts={"norm": "linf", "eps": "0.1", "data": data, "weights": "w"},
    )


def test_a_strip_a_class_and_the_weakest_class_first() -> None:
    found = strips([evidence([False, True, False, False, True, True])], NAMES)
    assert [(strip.class_name, strip.accuracy, strip.image) for strip in found] == [
        ("c", 0, 4),
        ("a", 0.5, 1),
        ("b", 0.5, 2),
    ]
    ((a,), (b,), (c,)) = (found[1].runs, found[2].runs, found[0].runs)
    assert (a.before, a.after, a.attack, round(a.factor, 3)) == ("a", "b", "pgd2", 5)
    assert (c.before, c.after) == ("c", "a")
    assert (b.before, b.x_adv) == ("c", "")  # wrong when clean


def test_two_runs_show_the_same_images() -> None:
    one, other = evidence([True, False, False, False, False, False]), evidence([True, True, False, True, False, False])
    for strip in strips([one, other], NAMES):
        assert len(strip.runs) == 2
    a = next(strip for strip in strips([one, other], NAMES) if strip.class_name == "a")
    assert (a.image, bool(a.runs[0].x_adv), bool(a.runs[1].x_adv)) == (0, True, True)
    assert strips([one, replace(other, facts={**other.facts, "data": "others"})], NAMES) == []


def test_pictures_are_grey_or_in_colour() -> None:
    colour = torch.stack([torch.full((2, 2), value) for value in (0.0, 0.5, 1.0)])
    for image, mode, pixel in ((colour, "RGB", (0, 128, 255)), (colour[:1] + 0.2, "L", 51), (colour[:2], "L", 64)):
        picture = Image.open(io.BytesIO(png(image)))
        assert (picture.mode, picture.getpixel((0, 0))) == (mode, pixel)
    shown, factor = perturbation(torch.zeros(1, 1, 2), torch.tensor([[[0.1, -0.05]]]))
    assert (shown.tolist(), round(factor, 4)) == ([[[1.0, 0.25]]], 5)


def test_the_pages_of_a_run_and_of_two_show_them(tmp_path: Path) -> None:
    runs = [made_run(tmp_path / name, f"calfat.trainer={name}") for name in ("calfat", "fedpgd")]
    write_evidence(runs[0] / "evidence.safetensors", evidence([True, False, False, False, False, False]))
    page = write_run_report(runs[0]).read_text(encoding="utf-8")
    assert '<section id="images">' in page
    assert re.search(r"zero → one \(pgd2\)", page)
    source = re.search(r'<img src="data:image/png;base64,([^"]+)" alt="adversarial image">', page)
    assert source is not None
    assert Image.open(io.BytesIO(base64.b64decode(source[1]))).size == (4, 4)

    write_evidence(runs[1] / "evidence.safetensors", evidence([True, True, False, True, True, False]))
    page = write_comparison(runs, tmp_path / "page.html").read_text(encoding="utf-8")
    row = page[page.index('<section id="images">') :].split('<th scope="row">pgd2')[1].split("</tr>")[0]
    assert re.findall(r'number">([^<]*)<', row) == ["6", "3", "0", "+50.00", f"{mcnemar(3, 0):.2g}"]

    (runs[1] / "evidence.safetensors").write_bytes(b"damaged")
    assert '<section id="images">' not in write_comparison(runs, tmp_path / "page.html").read_text(encoding="utf-8")


def rows_of(runs: list[Path], tmp_path: Path) -> dict[str, list[str]]:
    """Of the table image by image: evaluator to images, first alone, second alone, difference, p."""
    page = write_comparison(runs, tmp_path / "page.html").read_text(encoding="utf-8")
    table = page[page.index('<section id="images">') :]
    rows = re.findall(r'<th scope="row">(.*?)</th>(.*?)</tr>', table[: table.index("</table>")], re.DOTALL)
    return {name.strip(): re.findall(r'number">([^<]*)<', row) for name, row in rows}


@pytest.mark.parametrize(
    ("changes", "alike"),
    [
        ((), ["natural", "fgsm", "pgd2", "worst-case"]),
        (("calfat.threat.eps=0.05",), ["natural"]),
        (("calfat.threat.step_size=eps",), ["natural"]),
        (("calfat.threat.steps=7",), ["natural", "fgsm", "pgd2", "worst-case"]),  # of training
        (("calfat.evaluators=[natural, fgsm, {name: pgd2, restarts: 3}]",), ["natural", "fgsm"]),
    ],
)
def test_only_what_was_attacked_alike_is_compared(
    changes: tuple[str, ...], alike: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the worst case is that of the attacks of both: the second run alone has a strong one."""
    draw_nothing(monkeypatch)
    evaluators = "calfat.evaluators=[natural, fgsm, pgd2]"
    runs = [
        made_run(tmp_path / "one", evaluators, "calfat.trainer=calfat"),
        made_run(tmp_path / "other", evaluators, "calfat.trainer=fedpgd", *changes),
    ]
    one, other = evidence([True, False, False, False, False, False]), evidence([True, True, False, False, False, False])
    every = torch.ones(6, dtype=torch.bool)
    other = replace(other, tried={**other.tried, "strong": every}, broken={**other.broken, "strong": every})
    for run, kept in zip(runs, (one, replace(other, attacks=(*other.attacks, "strong"))), strict=True):
        write_evidence(run / "evidence.safetensors", kept)
    found = rows_of(runs, tmp_path)
    assert list(found) == alike
    assert found["natural"][:3] == ["6", "0", "0"]
    assert all(found[name][:3] == ["6", "1", "0"] for name in alike if name in ("pgd2", "worst-case"))


def test_mcnemars_exact_test() -> None:
    # The binomial distribution by hand: 2 P(X <= 1) of ten fair coins, and one in which nothing differs.
    assert mcnemar(1, 9) == mcnemar(9, 1) == 2 * (1 + 10) / 2**10
    assert mcnemar(0, 0) == mcnemar(5, 5) == 1
