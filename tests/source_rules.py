"""What test_project.py asks of source files, as pure functions over text, so that each rule can be shown to fail."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

FILE_LINES = 350
FUNCTION_LINES = 70
SURFACE = ""  # ckpt/__init__.py, which only names what others define

RAW_IO = frozenset(
    {"open", "io.open", "pathlib.Path.open"}
    | {
        f"os.{name}"
        for name in (
            "open fdopen read pread preadv write pwrite pwritev writev sendfile copy_file_range fsync fdatasync "
            "truncate ftruncate posix_fallocate rename renames replace unlink remove rmdir removedirs mkdir makedirs "
            "link symlink mknod mkfifo chmod chown listdir scandir walk"
        ).split()
    }
)
RAW_IO_MODULES = ("shutil", "tempfile")
RAW_IO_METHODS = frozenset({"write_text", "write_bytes", "read_text", "read_bytes"})
RUNS_CODE = frozenset({"pickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve"})
RNG_READS = frozenset({"random.Random", "random.SystemRandom", "random.getstate", "random.setstate"})
RNG_DRAWS = frozenset(
    {
        f"numpy.random.{name}"
        for name in "seed rand randn randint random shuffle permutation choice normal uniform".split()
    }
    | {f"torch.{name}" for name in "seed manual_seed rand randn randint randperm normal bernoulli multinomial".split()}
)


@dataclass(frozen=True)
class Row:
    name: str
    rooms: tuple[str, ...]
    torch: bool  # may import torch and numpy when it is itself imported


@dataclass(frozen=True)
class Import:
    line: int
    module: str  # as written, absolute
    at_import: bool  # runs when the file is imported, not when a function is called


@dataclass(frozen=True)
class Call:
    line: int
    name: str  # dotted, import aliases resolved; ".name" for a method of some value
    node: ast.Call


def parse_layers(text: str) -> list[Row]:
    """The table with the header `| row | rooms | says |`, from the ground up. "(torch)" after a row's name marks it."""
    rows: list[Row] = []
    lines = iter(text.splitlines())
    for line in lines:
        if re.fullmatch(r"\|\s*row\s*\|\s*rooms\s*\|\s*says\s*\|\s*", line):
            break
    else:
        raise ValueError("no table with the header `| row | rooms | says |`")
    for line in lines:
        if not line.startswith("|"):
            break
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if set(cells[0]) <= set("-: "):
            continue
        rooms = tuple(room.strip().strip("`") for room in cells[1].split(","))
        rows.append(Row(cells[0].split("(")[0].strip(), rooms, "(torch)" in cells[0]))
    return rows


def modules(package: Path) -> dict[str, Path]:
    """Every module below `package` by its dotted name relative to it; the package itself is ""."""
    found = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def row_of(module: str, rows: list[Row]) -> int | None:
    """Index of the row that names `module` or the nearest package above it. The surface counts as the last row."""
    if module == SURFACE:
        return len(rows) - 1
    parts = module.split(".")
    for end in range(len(parts), 0, -1):
        prefix = ".".join(parts[:end])
        for index, row in enumerate(rows):
            if prefix in row.rooms:
                return index
    return None


def imports(source: str, module: str, is_package: bool) -> Iterator[Import]:
    """All imports of one file, those inside functions too, those for type checkers not."""
    own = ("ckpt." + module).rstrip(".").split(".")
    package = own if is_package else own[:-1]

    def walk(node: ast.AST, at_import: bool) -> Iterator[Import]:
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            for child in node.orelse:
                yield from walk(child, at_import)
            return
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(node.lineno, alias.name, at_import)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            stem = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                yield Import(node.lineno, f"{stem}.{alias.name}", at_import)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("import_module", "__import__"):
            literal = node.args[0] if node.args else None
            given = [literal.value] if isinstance(literal, ast.Constant) else tables
            for name in given or ["?"]:
                yield Import(node.lineno, str(name), at_import)
        inner = at_import and not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            yield from walk(child, inner)

    tree = ast.parse(source)
    # What a name worked out at run time can be: the modules that this file writes down as texts.
    texts = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    tables = sorted({text for text in texts if re.fullmatch(r"ckpt(\.[a-z_]+)+", text)})
    yield from walk(tree, True)


def calls(source: str) -> Iterator[Call]:
    tree = ast.parse(source)
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                names[alias.asname or alias.name.split(".")[0]] = (
                    alias.name if alias.asname else alias.name.split(".")[0]
                )
        elif isinstance(node, ast.ImportFrom) and not node.level:
            for alias in node.names:
                names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        parts: list[str] = []
        target: ast.expr = node.func
        while isinstance(target, ast.Attribute):
            parts.insert(0, target.attr)
            target = target.value
        if isinstance(target, ast.Name) and (target.id in names or not parts):
            yield Call(node.lineno, ".".join([names.get(target.id, target.id), *parts]), node)
        elif parts:
            yield Call(node.lineno, "." + parts[-1], node)


def raw_io(source: str) -> list[Call]:
    """Calls that touch a file system without going through the storage seam."""
    return [
        call
        for call in calls(source)
        if call.name in RAW_IO or call.name.split(".")[0] in RAW_IO_MODULES or call.name[1:] in RAW_IO_METHODS
    ]


def forbidden_calls(source: str) -> list[str]:
    """Calls that no file of the library may make: what runs code from data, warns, or draws from a shared stream."""
    found = []
    for call in calls(source):
        draws = call.name.startswith("random.") and call.name not in RNG_READS
        draws |= call.name in RNG_DRAWS and not any(k.arg == "generator" for k in call.node.keywords)
        runs = call.name in ("eval", "exec") or (call.name == "torch.load" and not _weights_only(call.node))
        if draws or runs or call.name == "warnings.warn":
            found.append(f"line {call.line}: {call.name}")
    return found


def _weights_only(node: ast.Call) -> bool:
    return any(
        k.arg == "weights_only" and isinstance(k.value, ast.Constant) and k.value.value is True for k in node.keywords
    )


def long_functions(source: str, limit: int = FUNCTION_LINES) -> list[str]:
    return [
        f"{node.name}: {length} lines"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (length := (node.end_lineno or node.lineno) - node.lineno + 1) >= limit
    ]


def swallowed(source: str) -> list[str]:
    """Handlers of everything that neither raise nor hand the exception on. A log line is no way to hand it on (I9)."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.ExceptHandler):
            continue
        caught = [ast.unparse(node.type)] if node.type is not None else ["BaseException"]
        if isinstance(node.type, ast.Tuple):
            caught = [ast.unparse(item) for item in node.type.elts]
        if not {"Exception", "BaseException"} & set(caught) or _passes_on(node.body, node.name):
            continue
        found.append(f"line {node.lineno}: except {', '.join(caught)}")
    return found


def _passes_on(body: list[ast.stmt], name: str | None) -> bool:
    def used(node: ast.AST) -> bool:
        if isinstance(node, ast.Raise) or (isinstance(node, ast.Name) and node.id == name):
            return True
        if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[0] in ("log", "logger", "logging", "print"):
            return False
        return any(used(child) for child in ast.iter_child_nodes(node))

    return any(used(statement) for statement in body)
