"""The rules of docs/CONTRIBUTING.md that a machine can check, over every tracked file."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# Who may import whom: a part imports parts of its own rank and below. The native core is a leaf that imports nothing: all may.
RANKS = {
    "erasure": 1,
    "kernels": 1,
    "server": 2,
    "gc": 2,
    "client": 2,
    "engine_integration": 3,
    "cli": 3,
    "replay": 3,
    "live": 3,
    "plan": 3,
    "observe": 3,
    "report": 3,
    "doctor": 3,
    "__main__": 4,
}
LEAF = "kvstore.kernels"
LINES_MAX = 600
FACE_LINES_MAX = 40
LONG_REASON = re.compile(r"over 600 lines because \S+", re.IGNORECASE)

BANNED_MODULES = {
    "pickle": "struct, json or pyarrow",
    "marshal": "struct or json",
    "shelve": "lmdb",
    "dill": "struct or json",
}
BANNED_CALLS = {
    "eval": "a table of functions",
    "exec": "a table of functions",
    "os.system": "subprocess.run([...])",
    "os.popen": "subprocess.run([...])",
    "yaml.load": "tomllib, or yaml.safe_load",
    "torch.load": "safetensors, or a format of our own",
}
# Written apart so that this file passes its own rule.
MACHINE_WORDS = [
    a + b
    for a, b in [
        ("/wo", "rk/"),
        ("/ro", "ot/"),
        ("/tmp/", "wt"),
        ("/tmp/", "venv"),
        ("pypi", ".org"),
        ("python", "hosted.org"),
        ("deb.", "debian.org"),
        ("npm", "js.org"),
    ]
]
IGNORE_COMMENT = re.compile(r"#\s*(type:\s*ignore|noqa|pragma:)|//\s*NOLINT")
EXPLAINED_IGNORE = re.compile(
    r"(type:\s*ignore\[[\w\-, ]+\]|noqa:\s*[A-Z]+\d+(,\s*[A-Z]+\d+)*|pragma:[\w ]+|NOLINT(\([\w\-., ]+\))?)\s*[#:;,-]*\s*\w+ \w+"
)


@cache
def tracked_files() -> tuple[Path, ...]:
    """Every tracked file, and new ones git does not ignore; generated protobuf files keep their own rules."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    paths = (ROOT / line for line in listed.stdout.splitlines())
    return tuple(p for p in paths if p.is_file() and "_pb2" not in p.name)


def sources(*folders: str, suffixes: tuple[str, ...] = (".py",)) -> Iterator[tuple[Path, str]]:
    for path in tracked_files():
        if path.suffix in suffixes and path.relative_to(ROOT).parts[0] in folders:
            yield path.relative_to(ROOT), path.read_text()


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse((ROOT / path).read_text(), str(path))


def rank_of(module: str) -> int:
    parts = module.split(".")
    return RANKS.get(parts[1], 0) if len(parts) > 1 else 0


def imports_of(path: Path) -> Iterator[tuple[int, str]]:
    package = path.with_suffix("").parts[:-1]
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            for name in node.names:
                yield node.lineno, name.name
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(filter(None, [base, node.module or ""]))
            if module == "kvstore":  # `from kvstore import client` imports a part, too
                yield from ((node.lineno, f"kvstore.{name.name}") for name in node.names)
            else:
                yield node.lineno, module


def call_name(node: ast.Call) -> str:
    return ast.unparse(node.func) if isinstance(node.func, ast.Name | ast.Attribute) else ""


def calls_in(path: Path) -> Iterator[ast.Call]:
    return (node for node in ast.walk(tree_of(path)) if isinstance(node, ast.Call))


def assert_none(findings: list[str]) -> None:
    assert not findings, "\n" + "\n".join(findings)


def test_no_part_imports_a_part_above_it() -> None:
    findings = []
    for path, _ in sources("kvstore"):
        mine = rank_of(".".join(path.with_suffix("").parts))
        for line, module in imports_of(path):
            if module.split(".")[0] == "kvstore" and not module.startswith(LEAF) and rank_of(module) > mine:
                findings.append(f"{path}:{line}: imports {module}, which is above it")
    assert_none(findings)


def test_product_imports_neither_tests_nor_benchmarks() -> None:
    found = [(p, line, m) for p, _ in sources("kvstore") for line, m in imports_of(p) if m.split(".")[0] in ("tests", "benchmarks")]
    assert_none([f"{p}:{line}: imports {m}" for p, line, m in found])


def test_banned_modules_and_calls_are_absent() -> None:
    findings = []
    for path, _ in sources("kvstore", "benchmarks", "tests", "scripts"):
        for line, module in imports_of(path):
            if module.split(".")[0] in BANNED_MODULES:
                findings.append(f"{path}:{line}: {module} is banned: use {BANNED_MODULES[module.split('.')[0]]}")
        for call in calls_in(path):
            name = call_name(call)
            if name in BANNED_CALLS:
                findings.append(f"{path}:{call.lineno}: {name}() is banned: use {BANNED_CALLS[name]}")
            for keyword in call.keywords:
                if keyword.arg in ("shell", "allow_pickle") and not (
                    isinstance(keyword.value, ast.Constant) and keyword.value.value is False
                ):
                    findings.append(f"{path}:{call.lineno}: {keyword.arg} is banned")
    assert_none(findings)


def test_nothing_in_tests_sleeps() -> None:
    """Wait on an event or a condition with a deadline; asyncio.sleep(0) only yields and is fine."""
    findings = []
    for path, _ in sources("tests"):
        for call in calls_in(path):
            zero = bool(call.args) and isinstance(call.args[0], ast.Constant) and call.args[0].value == 0
            if call_name(call) in ("time.sleep", "sleep") or (call_name(call) == "asyncio.sleep" and not zero):
                findings.append(f"{path}:{call.lineno}: sleeps; wait on an event with a deadline")
    assert_none(findings)


def test_builtin_hash_names_nothing() -> None:
    """hash() differs between processes; identity is BLAKE2b, placement and checksums are xxh3. Inside __hash__ it is at home."""
    findings = []
    for path, _ in sources("kvstore", "benchmarks"):
        homes = [node for node in ast.walk(tree_of(path)) if isinstance(node, ast.FunctionDef) and node.name == "__hash__"]
        at_home = {id(inner) for home in homes for inner in ast.walk(home)}
        findings += [f"{path}:{c.lineno}: hash()" for c in calls_in(path) if call_name(c) == "hash" and id(c) not in at_home]
    assert_none(findings)


def _names_bound(target: ast.expr) -> Iterator[str]:
    if isinstance(target, ast.Name):
        yield target.id
    elif isinstance(target, ast.Tuple | ast.List):
        for element in target.elts:
            yield from _names_bound(element)


def public_names(path: Path) -> tuple[set[str], set[str] | None]:
    """Names a module gives (a face gives what it imports) and its __all__, None where it has none."""
    given: set[str] = set()
    exported: set[str] | None = None
    for node in tree_of(path).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            given.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            names = [n for t in (node.targets if isinstance(node, ast.Assign) else [node.target]) for n in _names_bound(t)]
            if "__all__" in names:
                exported = set(ast.literal_eval(node.value)) if node.value else set()
            given.update(names)
        elif isinstance(node, ast.ImportFrom) and path.name == "__init__.py" and node.module != "__future__":
            given.update(name.asname or name.name for name in node.names)
    return {n for n in given if not n.startswith("_")}, exported


def test_all_lists_exactly_the_public_names() -> None:
    findings = []
    for path, _ in sources("kvstore"):
        given, exported = public_names(path)
        if exported is None:
            continue
        exported = {n for n in exported if not n.startswith("__")}
        for name in sorted(given ^ exported):
            findings.append(f"{path}: {name} is {'public but not in' if name in given else 'not public but in'} __all__")
    assert_none(findings)


def test_long_files_say_why_and_faces_are_short() -> None:
    findings = []
    for path, text in sources("kvstore", "kernels", suffixes=(".py", ".pyi", ".cpp", ".hpp")):
        lines = text.splitlines()
        if len(lines) > LINES_MAX and not LONG_REASON.search("\n".join(lines[:40])):
            findings.append(f"{path}: {len(lines)} lines; split it, or say in its opening: over 600 lines because ...")
        if path.name == "__init__.py" and len(lines) >= FACE_LINES_MAX:
            findings.append(f"{path}: {len(lines)} lines; a face has fewer than {FACE_LINES_MAX}")
    assert_none(findings)


def test_no_file_names_this_machine_or_a_package_host() -> None:
    findings = []
    for path in tracked_files():
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue  # golden and packed files
        for number, line in enumerate(text.splitlines(), 1):
            findings += [f"{path.relative_to(ROOT)}:{number}: {word}" for word in MACHINE_WORDS if word in line]
    assert_none(findings)


def test_every_ignore_is_explained_where_it_stands() -> None:
    findings = []
    for path, text in sources("kvstore", "kernels", "benchmarks", "tests", "scripts", suffixes=(".py", ".pyi", ".cpp", ".hpp")):
        before = ""
        for number, line in enumerate(text.splitlines(), 1):
            explained = EXPLAINED_IGNORE.search(line) or before.lstrip().startswith(("#", "//"))
            if IGNORE_COMMENT.search(line) and not explained and path.name != Path(__file__).name:
                findings.append(f"{path}:{number}: {line.strip()}")
            before = line
    assert_none(findings)


def _typed_names() -> dict[str, set[str]]:
    """Public names in _native.pyi: of the module under "", of each class under its name."""
    typed: dict[str, set[str]] = {"": set()}

    def collect(body: list[ast.stmt], owner: str) -> None:
        for node in body:
            if isinstance(node, ast.FunctionDef):
                typed[owner].add(node.name)
            elif isinstance(node, ast.AnnAssign):
                typed[owner].update(_names_bound(node.target))
            elif isinstance(node, ast.Assign):
                typed[owner].update(n for t in node.targets for n in _names_bound(t))
            elif isinstance(node, ast.ClassDef):
                typed[owner].add(node.name)
                if not owner:
                    typed[node.name] = set()
                    collect(node.body, node.name)

    collect(ast.parse((ROOT / "kvstore/kernels/_native.pyi").read_text()).body, "")
    return {owner: {n for n in names if not n.startswith("_")} for owner, names in typed.items()}


def test_every_native_binding_has_its_types_and_every_type_its_binding() -> None:
    from kvstore.kernels import _native

    bound = {"": {n for n in dir(_native) if not n.startswith("_")}}
    for name in bound[""]:
        if isinstance(getattr(_native, name), type):
            bound[name] = {n for n in vars(getattr(_native, name)) if not n.startswith("_")}
    typed = _typed_names()
    findings = []
    for owner in sorted(bound.keys() | typed.keys()):
        for name in sorted(bound.get(owner, set()) ^ typed.get(owner, set())):
            findings.append(f"{owner or '_native'}.{name} is only {'bound' if name in bound.get(owner, ()) else 'in _native.pyi'}")
    assert_none(findings)
