"""Look at the site in headless Chromium: what leaves its page, and screenshots.

python docs/hooks/look.py build/site                    # elements that leave their page
python docs/hooks/look.py build/site --shots FOLDER     # and a picture of each page
python docs/hooks/look.py build/site --shots FOLDER --sheet SHEET.png     # and all in one picture

Each page is opened at the widths of a desktop and a telephone, in light and dark. `bash
launch/docs.sh` builds the site; Chromium is a package of Debian. The sheet needs Pillow, which
`launch/setup.sh` installs with Matplotlib.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import html
import http.server
import json
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

WIDTHS = (1280, 390)
SCHEMES = {"light": 1, "dark": 0}  # Chromium's numbers
SHEET_COLUMNS = 4  # pages in a row of the sheet
THUMB_HEIGHT = 400
TIMEOUT_S = 600
# Opens the pages one after the other in a frame, which takes each width, and writes what leaves it.
_PROBE = """<!doctype html><body><script>
const pages = %s, widths = %s, found = [];
const wait = (ms) => new Promise((done) => setTimeout(done, ms));
async function look(page) {
  const frame = document.createElement("iframe");
  frame.style.cssText = `width:${widths[0]}px;height:900px;border:0`;
  frame.src = page;
  await new Promise((done) => { frame.onload = done; document.body.append(frame); });
  for (const width of widths) {
    frame.style.width = `${width}px`;
    await wait(60);
    measure(frame, page, width);
  }
  frame.remove();
}
function measure(frame, page, width) {
  const view = frame.contentDocument;
  const scrolls = (part) => {
    for (let at = part; at && at !== view.body; at = at.parentElement) {
      if (at.matches("pre, code, .gear-output")) return true;
      if (at.matches(".md-tabs, .md-sidebar, .md-search, .md-header")) return true;
    }
    return false;
  };
  for (const part of view.querySelectorAll("article *")) {
    const box = part.getBoundingClientRect();
    if (box.width && (box.right > width + 1 || box.left < -1) && !scrolls(part)) {
      const words = part.textContent.trim().slice(0, 60);
      found.push({page, width, tag: part.tagName, right: Math.round(box.right), words});
      break;
    }
  }
}
(async () => {
  for (const page of pages) await look(page);
  const out = document.createElement("pre");
  out.id = "found";
  out.textContent = JSON.stringify(found);
  document.body.append(out);
})();
</script></body>"""


def chromium() -> str | None:
    """Return the path of Chromium, or None where there is none."""
    return shutil.which("chromium") or shutil.which("chromium-browser")


def pages_of(site: Path) -> list[str]:
    """Return the addresses of the pages of docs/, relative to the site."""
    found = sorted(path.relative_to(site) for path in site.rglob("index.html"))
    return [
        path.parent.as_posix().removeprefix(".") for path in found if path.parts[0] != "repository"
    ]


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        """Write no line for each request."""


@contextlib.contextmanager
def served(site: Path) -> Iterator[str]:
    """Serve a site on a free port of loopback; yield its address."""
    handler = functools.partial(_Quiet, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


def _run(browser: str, *arguments: str) -> str:
    with tempfile.TemporaryDirectory() as profile:
        command = [browser, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        command += [f"--user-data-dir={profile}", *arguments]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    return ran.stdout


def overflows(site: Path, browser: str) -> list[dict[str, Any]]:
    """Return the first element of each page and width that leaves its page."""
    copy = site / "look.html"
    copy.write_text(_PROBE % (json.dumps([f"/{page}" for page in pages_of(site)]), list(WIDTHS)))
    try:
        with served(site) as address:
            budget = 1000 * TIMEOUT_S
            text = _run(
                browser, "--dump-dom", f"--virtual-time-budget={budget}", f"{address}/look.html"
            )
    finally:
        copy.unlink()
    result = re.search(r'<pre id="found">(.*?)</pre>', text, re.DOTALL)
    if result is None:
        raise RuntimeError(f"{browser} must open all pages; it printed {text[-500:]!r}")
    found: list[dict[str, Any]] = json.loads(html.unescape(result[1]))
    return found


def shoot(site: Path, browser: str, folder: Path) -> None:
    """Write a picture of each page: light and dark, at both widths."""
    folder.mkdir(parents=True, exist_ok=True)
    with served(site) as address:
        for page in pages_of(site):
            for width in WIDTHS:
                for scheme, setting in SCHEMES.items():
                    _run(
                        browser,
                        f"--blink-settings=preferredColorScheme={setting}",
                        f"--window-size={width},2000",
                        "--virtual-time-budget=4000",
                        f"--screenshot={folder / _shot_name(page, width, scheme)}",
                        f"{address}/{page}",
                    )


def _shot_name(page: str, width: int, scheme: str) -> str:
    return f"{page.replace('/', '_') or 'index'}-{width}-{scheme}.png"


def contact_sheet(pages: list[str], folder: Path, sheet: Path) -> None:
    """Write the screenshots of all pages as one picture, each page's beside each other."""
    from PIL import Image, ImageDraw

    margin = 12
    label = 16
    sizes = [width * THUMB_HEIGHT // 2000 for width in WIDTHS for _ in SCHEMES]
    cell_width = sum(sizes) + 4 * len(sizes) + margin
    cell_height = THUMB_HEIGHT + label + margin
    rows = -(-len(pages) // SHEET_COLUMNS)
    picture = Image.new("RGB", (SHEET_COLUMNS * cell_width, rows * cell_height), "#888888")
    draw = ImageDraw.Draw(picture)
    for index, page in enumerate(pages):
        row, column = divmod(index, SHEET_COLUMNS)
        left = column * cell_width + margin // 2
        top = row * cell_height
        draw.text((left, top + 2), page or "index", fill="black")
        for width in WIDTHS:
            for scheme in SCHEMES:
                with Image.open(folder / _shot_name(page, width, scheme)) as shot:
                    thumb_width = width * THUMB_HEIGHT // 2000
                    thumb = shot.convert("RGB").resize((thumb_width, THUMB_HEIGHT))
                picture.paste(thumb, (left, top + label))
                left += thumb_width + 4
    picture.save(sheet)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("site", type=Path)
    parser.add_argument("--shots", type=Path, metavar="FOLDER")
    parser.add_argument("--sheet", type=Path, metavar="FILE")
    options = parser.parse_args()
    if options.sheet is not None and options.shots is None:
        parser.error("--sheet must come with --shots, the folder of the screenshots")
    browser = chromium()
    if browser is None:
        print(
            "look.py: error: chromium must be installed: apt-get install chromium", file=sys.stderr
        )
        return 2
    if options.shots is not None:
        shoot(options.site, browser, options.shots)
        if options.sheet is not None:
            contact_sheet(pages_of(options.site), options.shots, options.sheet)
    found = overflows(options.site, browser)
    for row in found:
        print(
            f"{row['page']} at {row['width']}: {row['tag']} ends at {row['right']}: {row['words']}"
        )
    print(f"{len(pages_of(options.site))} pages at {len(WIDTHS)} widths, {len(found)} leave theirs")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
