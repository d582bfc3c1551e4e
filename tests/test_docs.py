"""The documentation is true: examples run as printed, quotations and generated pages are current, links resolve."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

import sass
from humming_cutlass import cli, support_matrix
from humming_cutlass.build import ENVIRONMENT

try:
    import tomllib
except ImportError:  # Python 3.10
    tomllib = None

ROOT = pathlib.Path(__file__).parents[1]
README = ROOT / "README.md"
PAGES = [README, ROOT / "CONTRIBUTING.md", ROOT / "bench" / "NOTES.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
QUOTED = re.compile(r"^<!-- from: (\S+) -->\n```\w+\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"python -m humming_cutlass(?: (\w+))?(?: (\w+))?")


def _read(path):
    return path.read_text(encoding="utf-8")


def _examples():
    return [code for language, code in BLOCK.findall(_read(README)) if language == "python"]


def test_readme_says_how_to_start():
    first_screen = _read(README)[:3500]
    assert 'pip install ".[torch]" && python -m humming_cutlass demo' in first_screen
    assert "docs/support_matrix.md" in first_screen
    assert len(_examples()[0].strip().splitlines()) <= 13


@pytest.mark.parametrize("index", range(3))
def test_readme_example_runs_as_printed(index):
    pytest.importorskip("torch")
    done = subprocess.run([sys.executable, "-c", _examples()[index]], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    if index == 0:
        change = float(done.stdout.split()[-1])
        assert 0.005 < change < 0.05, done.stdout


def test_every_readme_example_is_tested():
    assert len(_examples()) == 3


@pytest.mark.slow
def test_readme_demo_runs_as_printed():
    pytest.importorskip("torch")
    done = subprocess.run(
        [sys.executable, "-m", "humming_cutlass", "demo"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "(128, 8192) float16 x (8192, 8192) int6" in done.stdout


@pytest.mark.skipif(tomllib is None, reason="tomllib needs Python 3.11")
def test_extras_of_the_commands_exist():
    extras = set(tomllib.loads(_read(ROOT / "pyproject.toml"))["project"]["optional-dependencies"])
    for page in PAGES:
        for group in re.findall(r'pip install [^\n`]*?"?(?:\.|humming-cutlass)\[([\w,]+)\]', _read(page)):
            assert set(group.split(",")) <= extras, f"{page.name}: [{group}]"


def _group_commands():
    import typer

    commands = typer.main.get_command(cli.app).commands
    return {name: set(getattr(command, "commands", ())) for name, command in commands.items()}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_exist(page):
    known = _group_commands()
    for command, word in COMMAND.findall(_read(page)):
        if command:
            assert command in known, f"{page.name}: python -m humming_cutlass {command}"
            if known[command] and word:
                assert word in known[command], f"{page.name}: python -m humming_cutlass {command} {word}"


def test_readme_lists_every_command():
    assert {command for command, _ in COMMAND.findall(_read(README))} >= set(_group_commands()) - {"emit"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_quotations_are_current(page):
    for path, code in QUOTED.findall(_read(page)):
        assert code in _read(ROOT / path), f"{page.name} quotes what {path} no longer says:\n{code}"


def test_a_recipe_quotes_its_files():
    assert len(QUOTED.findall(_read(ROOT / "docs" / "extending.md"))) >= 6


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_named_files_exist(page):
    text = _read(page)
    for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", text):
        assert (page.parent / target).exists(), f"{page.name}: ({target})"
    # `path/file.ext` is from the repository's root, or from the folder that the page is talking about.
    roots = [ROOT, ROOT / "python" / "humming_cutlass", ROOT / "cpp" / "include" / "humming_cutlass", ROOT / "docs"]
    for name in re.findall(r"`([\w./]+/[\w./]*\.(?:py|hpp|cpp|md|cmake|sh))`", text):
        assert any((root / name).exists() for root in roots), f"{page.name}: `{name}`"


def test_support_matrix_is_current():
    assert _read(ROOT / "docs" / "support_matrix.md") == support_matrix.markdown(), (
        "run: python -m humming_cutlass support --markdown > docs/support_matrix.md"
    )


def test_environment_table_is_current():
    rows = re.findall(r"^\| `(\w+)` \| (.*) \|$", _read(ROOT / "docs" / "environment.md"), re.MULTILINE)
    assert dict(rows) == ENVIRONMENT


def test_every_trait_of_a_kernel_is_explained():
    text = _read(ROOT / "docs" / "embedding.md")
    traits = sass.traits_fields()
    assert len(traits) >= 10
    assert [trait for trait in traits if f"`{trait}`" not in text] == []


def test_architecture_fits_two_pages():
    assert len(_read(ROOT / "docs" / "architecture.md").split()) <= 1200


def test_glossary_terms_are_unique():
    terms = re.findall(r"^\| (.+?) \| .+ \|$", _read(ROOT / "docs" / "glossary.md"), re.MULTILINE)[1:]
    words = [word.strip(" `") for term in terms for word in term.split(",")]
    assert len(words) == len(set(words)) > 25


@pytest.mark.slow
def test_site_builds_strictly(tmp_path):
    pytest.importorskip("mkdocs", reason='pip install ".[docs]"')
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
    )
    assert done.returncode == 0, done.stderr
    home = _read(tmp_path / "site" / "index.html")
    assert "Matrix products with weights of 1 to 8 bits" in home
    assert 'href="architecture.html"' in home
    assert 'href="examples/' not in home


@pytest.mark.skipif(sys.platform == "win32", reason="a shell script")
def test_gpu_script_refuses_an_unknown_section(tmp_path):
    script = ROOT / "bench" / "on_gpu.sh"
    assert subprocess.run(["bash", "-n", str(script)], check=False).returncode == 0
    done = subprocess.run(
        ["bash", str(script), "everything"],
        env=os.environ | {"OUT": str(tmp_path / "out")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "build, test, grid, bench" in done.stderr
    assert not (tmp_path / "out").exists()
