"""The lines at the top of docs/python.md, in a script and in a notebook, from a folder outside the clone."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests.api.test_public import PAGE
from tests.cli.runner import ROOT

RECIPE = """\
data_args: {dataset: digits, partition_method: iid}
model_args: {model: cnn_small}
train_args: {client_num_in_total: 2, comm_round: 20, batch_size: 256, learning_rate: 0.05}
calfat:
  trainer: fedpgd
  threat: {eps: 0.1, step_size: eps, steps: 1}
  evaluators: [natural, {name: pgd20, max_examples: 20}]
  monitor: {evaluators: [natural]}
  runtime: {threads: 1}
"""
ALL_IMAGES = 'calfat.load_dataset("digits").test'
RESULTS = """\
print(run.results["pgd20"].num_examples, list(run.rounds["round"]))
print(type(model).__name__, model.training)
print(float(abs(x_adv - data.x).max()) <= 0.1 + 1e-6, x_adv.shape)
"""
PRINTED = "20 [1, 2, 3, 4, 5]\nCNNSmall False\nTrue torch.Size([4, 1, 8, 8])\n"


@pytest.fixture
def lines(tmp_path: Path) -> str:
    """Those of the page, on a recipe that takes seconds, and without the attacks on the whole test set."""
    (tmp_path / "small.yaml").write_text(RECIPE)
    found = re.search(r"^```python\n(import calfat_plugin as calfat\n.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    assert found is not None
    assert len(found[1].replace("\n\n", "\n").splitlines()) == 7  # the import and six lines
    assert ALL_IMAGES in found[1]
    few = found[1].replace(ALL_IMAGES, f"{ALL_IMAGES}.subset(range(4))")
    return few.replace("recipes/calfat_digits.yaml", str(tmp_path / "small.yaml"))


@pytest.mark.slow
def test_the_lines_of_the_page_run_in_a_notebook_with_bars(
    lines: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    cells = [nbformat.v4.new_code_cell(source) for source in (lines, RESULTS, "run")]
    client = NotebookClient(
        nbformat.v4.new_notebook(cells=cells), timeout=300, resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute()
    course, printed, shown = cells
    told = "\n".join(output.data["text/plain"] for output in course.outputs)  # KeyError: nothing but displays
    assert re.findall(r"^round (\d)/5  natural", told, re.MULTILINE) == list("12345")
    (bars,) = (state["outputs"] for state in client.widget_state.values() if state["_model_name"] == "OutputModel")
    last_picture = re.sub(r"\x1b\[[0-9;]*m", "", bars[0]["data"]["text/plain"])
    assert re.match(r"run +━+ 5/5 rounds .*\nfinal +━+ pgd20 ", last_picture)
    assert printed.outputs[0].text == PRINTED
    assert "<table><tr><td>evaluator</td>" in shown.outputs[0].data["text/html"]
