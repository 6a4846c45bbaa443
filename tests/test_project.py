"""The project's own rules: layers, the public surface, sizes, and what no file may contain."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import source_rules as rules

pytestmark = pytest.mark.quick

REPO = Path(__file__).resolve().parent.parent
PACKAGE = REPO / "ckpt"
MODULES = rules.modules(PACKAGE)
PURE_ROWS = ("ground", "format", "storage", "plan")  # torch is not even imported inside a function there

# Rooms besides storage that touch files themselves, each with its reason.
RAW_IO_ALLOWED = {
    "chaos": "its own work folder and what its children print; the training's roots stay behind the seam",
    "commit.lock": "the lock file is made here, as the lock's own way of making it ignores the umask",
}
# Rooms that move a shared stream of random numbers, each with its reason.
SEEDING_ALLOWED = {
    "chaos.demo_train": "the script of a training, with a model and augmentation that draw as a user's do",
    "data.seeding": "a dataset's own augmentation draws from the global streams, seeded per sample and put back",
}
# Rooms with a handler of every exception that ends there, each with its reason.
SWALLOWS_ALLOWED = {
    "chaos.launch": "the top of a forked trainer, in place of the interpreter: it prints the traceback and ends",
    "manager.session": "a failed removal of old steps never fails a durable save (I5)",
}
# Files over the limit of lines, functions over theirs: none.
SIZE_ALLOWED: dict[str, str] = {}


def layers() -> list[rules.Row]:
    return rules.parse_layers((REPO / "docs" / "design.md").read_text())


def own_imports(module: str) -> list[tuple[rules.Import, str]]:
    """What `module` imports of this package, as relative names of modules that exist."""
    path = MODULES[module]
    found = []
    for item in rules.imports(path.read_text(), module, path.name == "__init__.py"):
        if item.module == "?":
            found.append((item, "?"))
        elif item.module == "ckpt" or item.module.startswith("ckpt."):
            name = item.module.removeprefix("ckpt").removeprefix(".")
            while name not in MODULES:  # `from ckpt.errors import X` names a thing inside the module
                name = name.rpartition(".")[0]
            found.append((item, name))
    return found


def run(*command: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *command], cwd=cwd, capture_output=True, text=True, timeout=120)


# Layers


def test_every_module_stands_in_exactly_one_row_of_the_table() -> None:
    rows = layers()
    rooms = [room for row in rows for room in row.rooms]
    assert len(rooms) == len(set(rooms)), "a room is named twice"
    assert [room for room in rooms if room not in MODULES] == [], "rooms that do not exist"
    assert [module for module in MODULES if rules.row_of(module, rows) is None] == [], "modules in no row"


def test_a_room_imports_only_from_its_own_row_and_the_rows_above_it() -> None:
    rows = layers()
    found = []
    for module, path in MODULES.items():
        own = rules.row_of(module, rows)
        for item, target in [] if module == rules.SURFACE else own_imports(module):
            row = None if target == "?" else rules.row_of(target, rows)
            if own is None or row is None or row > own:
                found.append(f"{path}:{item.line}: {item.module}")
    assert found == []


def test_torch_and_numpy_are_imported_at_import_time_only_where_the_table_says_torch() -> None:
    rows = layers()
    found = []
    for module, path in MODULES.items():
        index = rules.row_of(module, rows)
        row = rows[index] if index is not None else rules.Row(module, (), False)
        for item in rules.imports(path.read_text(), module, path.name == "__init__.py"):
            package = item.module.split(".")[0]
            never = package == "torch" and row.name in PURE_ROWS
            if never or (package in ("torch", "numpy") and item.at_import and not row.torch):
                found.append(f"{path}:{item.line}: {package} in {row.name}")
    assert found == []


def imported_by(*command: str, cwd: Path | None = None) -> set[str]:
    result = run("-X", "importtime", *command, cwd=cwd)
    assert result.returncode == 0, result.stderr[-2000:]
    return set(re.findall(r"^import time:[^|]*\|[^|]*\|\s*(\S+)$", result.stderr, flags=re.MULTILINE))


def test_importing_the_package_or_its_command_line_imports_nothing_heavy() -> None:
    heavy = {"torch", "numpy", "fsspec", "filelock", "xxhash", "rich"}
    assert imported_by("-c", "import ckpt") & (heavy | {"click"}) == set()
    assert imported_by("-c", "import ckpt.cli") & heavy == set()
    assert imported_by("-m", "ckpt", "--version") & heavy == set()


def test_ls_and_inspect_answer_without_torch(tmp_path: Path) -> None:
    make = "import ckpt; m = ckpt.CheckpointManager('run', {'s': ckpt.StateDict(a=1)}); m.save(5); m.close()"
    result = run("-c", make, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    for command in (("ls", "run"), ("ls", "run", "--json"), ("inspect", "run"), ("inspect", "run", "--json")):
        assert not {name for name in imported_by("-m", "ckpt", *command, cwd=tmp_path) if name.split(".")[0] == "torch"}


# The public surface


def test_what_is_visible_on_the_package_is_what_all_names() -> None:
    show = "import ckpt, json; print(json.dumps([dir(ckpt), list(ckpt.__all__)]))"
    visible, declared = json.loads(run("-c", show).stdout)
    assert sorted(name for name in visible if not name.startswith("_")) == sorted(set(declared) - {"__version__"})
    assert len(declared) == len(set(declared))


def test_every_public_name_resolves_also_after_every_module_was_imported() -> None:
    import ckpt

    for module in MODULES:
        if module not in (rules.SURFACE, "__main__"):
            importlib.import_module(f"ckpt.{module}")
    for name in ckpt.__all__:
        assert not isinstance(getattr(ckpt, name), ModuleType), f"ckpt.{name} is hidden by a module of that name"
    with pytest.raises(AttributeError, match="no_such_name"):
        ckpt.no_such_name  # noqa: B018  (the attribute access is what is tested)


def test_every_public_name_is_in_the_readme() -> None:
    import ckpt

    readme = (REPO / "README.md").read_text()
    assert [name for name in ckpt.__all__ if name[0] != "_" and not re.search(rf"\b{name}\b", readme)] == []


# Sizes


def python_files() -> list[Path]:
    return [
        path for folder in ("ckpt", "tests", "examples", "benchmarks") for path in sorted((REPO / folder).rglob("*.py"))
    ]


def test_files_and_functions_stay_within_their_sizes() -> None:
    over = []
    for path in python_files():
        source = path.read_text()
        name = path.relative_to(REPO).as_posix()
        lines = source.count("\n")
        over += [f"{name}: {lines} lines"] if lines > rules.FILE_LINES else []
        over += [f"{name}: {text}" for text in rules.long_functions(source)]
    assert [text for text in over if text.split(":")[0] not in SIZE_ALLOWED] == []
    assert SIZE_ALLOWED == {}


# What no file may contain


def test_only_the_storage_rooms_touch_files() -> None:
    found: dict[str, list[str]] = {}
    for module, path in MODULES.items():
        room = next((m for m in (module, module.split(".")[0]) if m in RAW_IO_ALLOWED or m == "storage"), module)
        for call in rules.raw_io(path.read_text()):
            found.setdefault(room, []).append(f"{path}:{call.line}: {call.name}")
    found.pop("storage", None)
    assert [text for room, texts in found.items() if room not in RAW_IO_ALLOWED for text in texts] == []
    assert sorted(set(RAW_IO_ALLOWED) - set(found)) == [], "exemptions that nothing needs"


def test_only_the_commands_print() -> None:
    found = [
        f"{path}:{call.line}"
        for module, path in MODULES.items()
        if module.split(".")[0] not in ("cli", "chaos")
        for call in rules.calls(path.read_text())
        if call.name in ("print", "sys.stdout.write", "sys.stderr.write")
    ]
    assert found == []


def test_nothing_runs_code_from_data_or_warns_or_draws_from_a_shared_stream() -> None:
    found = []
    for module, path in MODULES.items():
        source = path.read_text()
        if module not in SEEDING_ALLOWED:
            found += [f"{path}: {text}" for text in rules.forbidden_calls(source)]
        for item in rules.imports(source, module, path.name == "__init__.py"):
            if item.module.split(".")[0] in rules.RUNS_CODE:
                found.append(f"{path}:{item.line}: {item.module}")
    assert found == []
    assert all(rules.forbidden_calls(MODULES[module].read_text()) for module in SEEDING_ALLOWED)


def test_no_handler_of_every_exception_swallows_it() -> None:
    found = {module: rules.swallowed(path.read_text()) for module, path in MODULES.items()}
    assert {m: texts for m, texts in found.items() if texts and m not in SWALLOWS_ALLOWED} == {}
    assert [module for module in SWALLOWS_ALLOWED if not found[module]] == [], "exemptions that nothing needs"


def test_no_file_names_a_folder_of_one_machine_or_a_package_index() -> None:
    # Put together from pieces, so that this file does not contain what it looks for.
    folders = "|".join(["home", "root", "work", "Users", "mnt", "farm"])
    hosts = "|".join(["pypi" + r"\.", "python" + "hosted", "npm" + "js", "conda" + r"\.anaconda", "extra" + "-index"])
    pattern = re.compile(rf"(?<![\w.~*}}>)\]/-])/(?:{folders})/(?!someone\b)|(?:{hosts})", re.IGNORECASE)
    assert pattern.search("see /" + "home/her/x") and not pattern.search("runs/" + "work/x")
    found = []
    for folder in (".", ".ci", "ckpt", "tests", "examples", "benchmarks", "docs", "scripts"):
        for path in sorted((REPO / folder).glob("*") if folder == "." else (REPO / folder).rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts and path.name != "LICENSE":
                text = path.read_bytes().decode("utf-8", errors="ignore")
                found += [f"{path}:{n}" for n, line in enumerate(text.splitlines(), 1) if pattern.search(line)]
    assert found == []


# The rules themselves can fail


def test_the_layer_table_is_read_in_order_with_its_torch_marks() -> None:
    table = "x\n| row | rooms | says |\n| --- | --- | --- |\n| ground | `errors`, geometry | a |\n"
    table += "| top (torch) | m.n | b |\n\n| z |"
    assert rules.parse_layers(table) == [
        rules.Row("ground", ("errors", "geometry"), False),
        rules.Row("top", ("m.n",), True),
    ]
    assert rules.row_of("m.n.o", rules.parse_layers(table)) == 1
    assert rules.row_of("m", rules.parse_layers(table)) is None


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import torch", [("torch", True)]),
        ("def f():\n    from ckpt.manager import x", [("ckpt.manager.x", False)]),
        ("from . import values", [("ckpt.format.values", True)]),
        ("from ..storage.base import Store", [("ckpt.storage.base.Store", True)]),
        ("if TYPE_CHECKING:\n    import torch\nelse:\n    import json", [("json", True)]),
        ("try:\n    import numpy\nfinally:\n    pass", [("numpy", True)]),
        ("import importlib\nf = lambda: importlib.import_module('torch')", [("importlib", True), ("torch", False)]),
        ("T = {'a': 'ckpt.cli.x'}\ndef f(n):\n    import_module(T[n])", [("ckpt.cli.x", False)]),
        ("def f(n):\n    import_module(n)", [("?", False)]),
    ],
)
def test_imports_are_found_wherever_they_stand(source: str, expected: list[tuple[str, bool]]) -> None:
    found = [(item.module, item.at_import) for item in rules.imports(source, "format.manifest", False)]
    assert found == expected


@pytest.mark.parametrize(
    "source",
    [
        "open('x')",
        "import os as _os\n_os.replace(a, b)",
        "from os import unlink as gone\ngone(a)",
        "import shutil\nshutil.rmtree(a)",
        "from pathlib import Path\nPath('x').write_text('y')",
        "import tempfile\nwith tempfile.TemporaryDirectory():\n    pass",
    ],
)
def test_raw_file_access_is_found_under_any_name(source: str) -> None:
    assert len(rules.raw_io(source)) == 1


def test_calls_of_the_storage_seam_are_no_raw_access() -> None:
    assert rules.raw_io("import os\nstore.open('x')\nstore.replace(a)\nos.path.join(a, b)\ntext.replace(a, b)") == []


@pytest.mark.parametrize(
    "source",
    [
        "import random\nrandom.random()",
        "import numpy as np\nnp.random.seed(1)",
        "import torch\ntorch.randperm(3)",
        "import warnings\nwarnings.warn('x')",
        "import torch\ntorch.load(f)",
        "exec(text)",
    ],
)
def test_calls_that_no_file_may_make_are_found(source: str) -> None:
    assert len(rules.forbidden_calls(source)) == 1
    assert rules.forbidden_calls("import torch\ntorch.randperm(3, generator=g)\ntorch.load(f, weights_only=True)") == []


@pytest.mark.parametrize(
    ("handler", "count"),
    [
        ("except:\n    pass", 1),
        ("except Exception as e:\n    log.error('%s', e)", 1),
        ("except (OSError, BaseException):\n    x = None", 1),
        ("except Exception as e:\n    failed.append(e)", 0),
        ("except BaseException:\n    undo()\n    raise", 0),
        ("except OSError:\n    pass", 0),
    ],
)
def test_a_swallowed_exception_is_found(handler: str, count: int) -> None:
    assert len(rules.swallowed(f"try:\n    f()\n{handler}")) == count


def test_a_function_of_seventy_lines_is_too_long() -> None:
    body = "def f():\n" + "    x = 1\n"
    assert rules.long_functions(body * 1) == []
    assert rules.long_functions("def f():\n" + "    x = 1\n" * 68) == []
    assert rules.long_functions("def f():\n" + "    x = 1\n" * 69) == ["f: 70 lines"]
