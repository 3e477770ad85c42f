"""A page in headless Chromium: laid out at some widths, measured by a script that only the test's copy of it has."""

from __future__ import annotations

import html
import json
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
        broken: images that did not load.
        background, color: of the page, as computed.
        fetched: addresses that were asked for.
        troubles: errors and warnings, from the page and from the console.
    """

    inner: int
    scroll: int
    outside: list[str]
    figures: list[dict[str, Any]]
    broken: int
    background: str
    color: str
    fetched: list[str]
    troubles: list[str]


def look(page: Path, *widths: int, dark: bool = False) -> dict[int, Seen]:
    """Lay ``page`` out at each width in CSS pixels and measure it; troubles are those at any of them."""
    assert CHROMIUM is not None, 'mark the test with @pytest.mark.needs("chromium")'
    source = page.read_text(encoding="utf-8").replace("<head>", f"<head>{_LISTEN}", 1)
    frames = "".join(
        f'<iframe src="copy.html" style="border: 0; height: 900px; width: {w}px"></iframe>' for w in widths
    )
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "copy.html").write_text(source.replace("</body>", f"{_MEASURE}</body>", 1), encoding="utf-8")
        outer = Path(folder, "frame.html")
        outer.write_text(_FRAME.replace("FRAMES", frames), encoding="utf-8")
        command = [CHROMIUM, *FLAGS, f"--user-data-dir={folder}/profile", f"--window-size={sum(widths) + 40},1000"]
        command += ["--blink-settings=preferredColorScheme=0"] if dark else []
        command += ["--enable-logging=stderr", "--dump-dom", outer.as_uri()]
        done = subprocess.run(command, capture_output=True, text=True)
    found = re.search(r'<pre id="measured">(.+?)</pre>', done.stdout, flags=re.DOTALL)
    assert found is not None, f"the page was not measured\n{done.stdout[-500:]}\n{done.stderr[-2000:]}"
    said = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    measured = dict(zip(widths, json.loads(html.unescape(found[1])), strict=True))
    return {width: Seen(**{**seen, "troubles": seen["troubles"] + said}) for width, seen in measured.items()}
