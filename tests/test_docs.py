"""Every code block of README.md and docs/ does what the page says; links between the pages lead somewhere."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

import docs_runner
import pytest

pytestmark = pytest.mark.full

REPO = Path(__file__).resolve().parent.parent
PAGES = [
    path
    for path in (REPO / "README.md", *sorted((REPO / "docs").glob("*.md")), *sorted((REPO / "examples").glob("*.md")))
    if path.exists()
]
NOT_RUN = 3  # blocks with `norun: reason` in all pages together; a new one is a decision, so it is counted here


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(REPO).as_posix())
def test_every_block_of_the_page_runs_and_prints_what_is_shown(page: Path) -> None:
    command = [sys.executable, "-W", "error", str(REPO / "tests" / "docs_runner.py"), str(page)]
    # Not pytest's own folder: commands shorten long paths, and pages show them whole.
    with tempfile.TemporaryDirectory(prefix="docs-") as folder:
        Path(folder, "examples").symlink_to(REPO / "examples")  # pages call them by their path in the repository
        result = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=280)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]


def test_the_blocks_that_do_not_run_are_counted() -> None:
    assert REPO / "README.md" in PAGES
    not_run = [
        f"{page.name}:{block.line} {block.note}"
        for page in PAGES
        for block in docs_runner.blocks(page.read_text())
        if block.language in ("python", "console") and not block.runs
    ]
    assert len(not_run) == NOT_RUN, not_run


@pytest.mark.parametrize("page", [*PAGES, REPO / "CONTRIBUTING.md"], ids=lambda p: p.relative_to(REPO).as_posix())
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text())
    assert [t for t in targets if "://" not in t and not (page.parent / t).exists()] == []


# The runner itself can fail


@pytest.mark.parametrize(
    ("shown", "printed"),
    [
        (["step 500  1.2 GB"], "step 1500   33.25 GB\n"),
        (["run 3fa9c2d471b0"], "run 00ffee0012aa\n"),
        (["a", "...", "z"], "a\nb\nc\nz\n"),
        (["a ... z"], "a b c z\n"),
        (["12:30:01 ███▏ 40%"], "09:01:59 █ 7%\n"),
    ],
)
def test_numbers_ids_times_and_bars_may_differ(shown: list[str], printed: str) -> None:
    assert docs_runner.matches(shown, printed)


@pytest.mark.parametrize(
    ("shown", "printed"),
    [
        (["step 500"], "stop 500\n"),
        (["step 500"], "step 500\nand more\n"),
        (["step 500", "and more"], "step 500\n"),
        (["kept (best)"], "kept (last)\n"),
        (["a", "...", "z"], "a\nb\n"),
    ],
)
def test_other_words_or_lines_are_a_difference(shown: list[str], printed: str) -> None:
    assert not docs_runner.matches(shown, printed)


@pytest.mark.parametrize(
    "page",
    [
        "```python\nx = 1\n```\n```python\nassert x == 2\n```\n",
        "```console\n$ echo one\ntwo\n```\n",
        "```console\n$ false\n```\n",
        "```console\necho no dollar\n```\n",
        "```bash\ntrue\n```\n",
        "```\ntrue\n```\n",
        "```python norun\nx\n```\n",
        "```python\nnever closed\n",
    ],
)
def test_a_page_that_lies_is_caught(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "page.md").write_text(page)
    with pytest.raises(AssertionError):
        docs_runner.run_file(tmp_path / "page.md")


def test_a_page_that_is_right_runs_and_says_what_it_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    page = (
        "```python\nfrom pathlib import Path\nx = Path('made').write_text('7')\n```\n"
        "- item\n  ```console\n  $ cat made && \\\n  echo\n  8\n  ```\n"
        "```python norun: needs two machines\nraise SystemExit\n```\n```text\nfree text\n```\n"
    )
    (tmp_path / "page.md").write_text(page)
    assert docs_runner.run_file(tmp_path / "page.md") == 1
