"""Take the picture of the board in the documentation: `python .ci/board_picture.py RUN docs/images/board.png`.

It needs the package playwright and Chromium. RUN is the directory of a finished run, such as that of the quick start.
"""

import shutil
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

from titanrl.metrics.report import write_report


def main() -> None:
    """Open the report of the run, which is the same page, and save what a reader sees first."""
    run, picture = Path(sys.argv[1]), Path(sys.argv[2])
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as started:
        copy = Path(folder) / run.resolve().name
        shutil.copytree(run, copy, ignore=shutil.ignore_patterns("checkpoints", "logs"))
        browser = started.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1320, "height": 900}, color_scheme="light")
        page.goto(f"file://{write_report(copy, {})}")
        page.wait_for_selector(".plot path")
        page.wait_for_timeout(500)
        page.screenshot(path=picture)
        browser.close()


if __name__ == "__main__":
    main()
