"""A page in headless Chromium: laid out at some widths, measured by a script that only the test's copy of it has."""

from __future__ import annotations

import html
import json
import re
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from tests.programs import CHROMIUM

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",  # as on a phone, where they take no room
    "--allow-file-access-from-files",
    "--virtual-time-budget=3000",
)
# Runs inside the page before anything else, and again when all is there.
_LISTEN = """
<script>
  window.troubles = [];
  const what = e => e.message || (e.target && e.target.outerHTML);
  window.addEventListener("error", e => troubles.push("error: " + what(e)), true);
  for (const name of ["error", "warn"]) {
    const original = console[name];
    console[name] = (...words) => { troubles.push(name + ": " + words.join(" ")); original.apply(console, words); };
  }
  document.addEventListener("securitypolicyviolation", e => troubles.push("policy: " + e.blockedURI));
</script>
"""
_MEASURE = """
<script>
  window.addEventListener("load", () => {
    const box = e => { const r = e.getBoundingClientRect(); return [r.left, r.width, r.right, r.height]; };
    // A figure's words have no size in an <img>: its drawing is laid out once more, as wide, in the page itself.
    const words = img => {
      const drawing = new DOMParser().parseFromString(atob(img.src.split(",")[1]), "image/svg+xml").documentElement;
      drawing.removeAttribute("height");
      drawing.setAttribute("width", img.getBoundingClientRect().width);
      document.body.append(drawing);
      const heights = [...drawing.querySelectorAll("text")].map(t => t.getBoundingClientRect().height);
      drawing.remove();
      return heights;
    };
    const shown = e => e.getBoundingClientRect().height > 0;
    const bare = grid => {  // whether half of the last row of figures is empty
      const middle = (box(grid)[0] + box(grid)[2]) / 2, last = grid.lastElementChild.getBoundingClientRect();
      const parts = [...grid.querySelectorAll("img, figcaption")].map(e => e.getBoundingClientRect());
      const below = parts.filter(r => r.bottom > last.top + 1);
      return !(below.some(r => r.left < middle) && below.some(r => r.right > middle));
    };
    const outside = [...document.querySelectorAll("body *")].filter(e =>
      shown(e) && !e.closest(".scroll, pre, svg, details:not([open])") &&
      box(e)[2] > document.documentElement.clientWidth + 0.5).map(e => e.outerHTML.slice(0, 120));
    const style = getComputedStyle(document.body);
    parent.postMessage(JSON.stringify({
      inner: window.innerWidth,
      scroll: document.documentElement.scrollWidth,
      outside: outside,
      figures: [...document.querySelectorAll("figure > img")].map(e =>
        ({box: box(e), text: Math.min(...words(e)), filter: getComputedStyle(e).filter})),
      bare: [...document.querySelectorAll(".figures")].filter(bare).map(e => e.innerText.slice(0, 60)),
      tables: [...document.querySelectorAll(".scroll")].filter(shown).map(e =>
        ({name: e.ariaLabel, hidden: e.scrollWidth - e.clientWidth,
          right: box(e)[2], top: e.getBoundingClientRect().top, height: box(e)[3]})),
      broken: [...document.images].filter(i => !i.complete || !i.naturalWidth).length,
      background: style.backgroundColor, color: style.color,
      fetched: performance.getEntriesByType("resource").map(e => e.name).filter(n => !n.startsWith("data:")),
      troubles: window.troubles,
    }), "*");
  });
</script>
"""
# Chromium's own window is never narrower than 500 pixels, a frame in it can be.
_FRAME = """<!doctype html><title>frame</title><meta name="color-scheme" content="light dark"><body style="margin: 0">
<script>
  const seen = [];
  addEventListener("message", e => {
    const frames = [...document.querySelectorAll("iframe")];
    seen[frames.findIndex(frame => frame.contentWindow === e.source)] = JSON.parse(e.data);
    document.getElementById("measured").textContent = JSON.stringify(seen);
  });
</script>
<div style="white-space: nowrap">FRAMES</div>
<pre id="measured"></pre>
"""


@dataclass(frozen=True)
class Seen:
    """What a browser made of a page.

    Attributes:
        inner: width of the view in CSS pixels.
        scroll: width of what is in it; more means a horizontal scroll bar.
        outside: elements that reach beyond the right edge, outside of boxes that scroll by themselves.
        figures: per figure the box (left, width, right, height), the height of its smallest text, and its CSS filter.
        bare: groups of figures that leave half of their last row empty.
        tables: per visible table its name, how many pixels of its width are hidden, and its right, top and height.
        broken: images that did not load.
        background, color: of the page, as computed.
        fetched: addresses that were asked for.
        troubles: errors and warnings, from the page and from the console.
    """

    inner: int
    scroll: int
    outside: list[str]
    figures: list[dict[str, Any]]
    bare: list[str]
    tables: list[dict[str, Any]]
    broken: int
    background: str
    color: str
    fetched: list[str]
    troubles: list[str]


def look(page: Path, *widths: int, dark: bool = False) -> dict[int, Seen]:
    """Lay ``page`` out at each width in CSS pixels and measure it; troubles are those at any of them."""
    with tempfile.TemporaryDirectory() as folder:
        source = page.read_text(encoding="utf-8").replace("<head>", f"<head>{_LISTEN}", 1)
        copy = source.replace("</body>", f"{_MEASURE}</body>", 1)
        done = _browse(Path(folder), copy, widths, 900, dark, "--enable-logging=stderr", "--dump-dom")
    found = re.search(r'<pre id="measured">(.+?)</pre>', done.stdout, flags=re.DOTALL)
    assert found is not None, f"the page was not measured\n{done.stdout[-500:]}\n{done.stderr[-2000:]}"
    said = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    measured = dict(zip(widths, json.loads(html.unescape(found[1])), strict=True))
    return {width: Seen(**{**seen, "troubles": seen["troubles"] + said}) for width, seen in measured.items()}


def picture(page: Path, *widths: int, height: int, dark: bool = False) -> Image.Image:
    """The top of ``page`` as it looks at each width in CSS pixels, side by side."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "picture.png"
        source = page.read_text(encoding="utf-8")
        done = _browse(Path(folder), source, widths, height, dark, f"--screenshot={file}")
        assert file.is_file(), done.stderr[-2000:]
        with Image.open(file) as image:
            return image.convert("RGB").crop((0, 0, sum(widths), height))


def _browse(
    folder: Path, source: str, widths: Sequence[int], height: int, dark: bool, *options: str
) -> subprocess.CompletedProcess[str]:
    assert CHROMIUM is not None, 'mark the test with @pytest.mark.needs("chromium")'
    (folder / "copy.html").write_text(source, encoding="utf-8")
    frame = folder / "frame.html"
    style = f"border: 0; height: {height}px"
    frames = "".join(f'<iframe src="copy.html" style="{style}; width: {width}px"></iframe>' for width in widths)
    frame.write_text(_FRAME.replace("FRAMES", frames), encoding="utf-8")
    command = [CHROMIUM, *FLAGS, f"--user-data-dir={folder}/profile"]
    command.append(f"--window-size={max(sum(widths), 500) + 40},{height + 100}")
    if dark:
        command.append("--blink-settings=preferredColorScheme=0")
    return subprocess.run([*command, *options, frame.as_uri()], capture_output=True, text=True)
