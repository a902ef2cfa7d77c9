"""Take the screenshots of the guides with a headless Chromium: python docs/site/screenshots.py [RUN of the quickstart]

Without a run the quickstart is run first, with one seed, in about three minutes.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from posttrain.report.browse import write_page
from posttrain.report.page import write_report
from posttrain.report.run_view import open_runs

IMAGES = Path(__file__).resolve().parents[1] / "images"
LARGEST = 150_000  # bytes of an image
WIDTH, HEIGHTS = 1100, {"report": 900, "browse": 620}
NAMES = ("chromium", "chromium-browser", "google-chrome")


def find_browser() -> str:
    """The program to take screenshots with. Raises SystemExit that says how to get one."""
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        raise SystemExit(
            f"no browser for screenshots: none of {', '.join(NAMES)} is installed (Debian: apt-get install chromium); "
            "the images in docs/images stay as they are"
        )
    return found


def take_screenshot(browser: str, page: Path, image: Path, width: int, height: int) -> None:
    """The top of a local page as PNG. Raises SystemExit if the browser fails or the image is too large."""
    with tempfile.TemporaryDirectory() as profile:
        done = subprocess.run(
            [
                browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run",
                f"--user-data-dir={profile}", f"--window-size={width},{height}", "--virtual-time-budget=5000",
                f"--screenshot={image}", page.as_uri(),
            ],
            capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
    if done.returncode != 0 or not image.is_file():
        raise SystemExit(f"{browser} took no screenshot of {page}:\n{done.stderr}")
    if image.stat().st_size > LARGEST:
        raise SystemExit(f"{image} has {image.stat().st_size} bytes, more than {LARGEST}")


def take_all(run: Path, images: Path, browser: str) -> list[Path]:
    """The images of the guides from a run of the quickstart; returns their paths."""
    seed = run if (run / "rl").is_dir() else run / "seed-0"
    images.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        pages = {"report": Path(folder) / "report.html", "browse": Path(folder) / "browse.html"}
        write_report(open_runs([seed / "rl"]), pages["report"])
        write_page([seed / "acc-sft", seed / "acc-rl"], pages["browse"])
        for name, page in pages.items():
            take_screenshot(browser, page, images / f"{name}.png", WIDTH, HEIGHTS[name])
    return [images / f"{name}.png" for name in pages]


def main() -> None:
    browser = find_browser()
    with tempfile.TemporaryDirectory() as folder:
        run = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(folder) / "quickstart"
        if not run.exists():
            command = [sys.executable, "-m", "posttrain", "run", "quickstart", "seeds=[0]", "--output", str(run)]
            subprocess.run(command, check=True)
        for image in take_all(run, IMAGES, browser):
            print(f"{image}  {image.stat().st_size // 1000} kB")


if __name__ == "__main__":
    main()
