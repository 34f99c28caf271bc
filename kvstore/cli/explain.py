"""`kvstore explain`: what a code means; where a block is, or why it is not; why two prompts share as little of the cache as they do."""

from __future__ import annotations

import argparse
import json
import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final

import numpy as np

from kvstore.cli.codes import ERRORS, HEALTH, RANGES
from kvstore.cli.explain_key import check_not_almost_a_key, explain_key, is_key
from kvstore.cli.misses import MISSES
from kvstore.cli.output import Output
from kvstore.errors import InputError, KvstoreError, UsageError
from kvstore.keys import BLOCK_TOKENS, KeyChain, Namespace
from kvstore.layout import PRESETS
from kvstore.tomlfile import suggestion
from kvstore.units import format_seconds

INPUT_BYTES_MAX: Final = 256 << 20
_FORM: Final = 'a list of token ids, or {"tokens": [...], "namespace": {"weights": ..., "kv_dtype": ..., "layout": ...}}'


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "explain",
        help="what a code means, where a block is or why it is gone, or where two prompts part",
        description="Explains a health or error code, or a reason of misses; tells where a block's shards are, or what became of it; "
        "or compares two prompts: "
        "what differs first, and what is still shared.",
        epilog=f"""\
examples:
  kvstore explain NODE_DOWN
  kvstore explain E107
  kvstore explain evicted                      a reason of misses, as kvstore report names it
  kvstore explain 3f9c...                      a block key, 64 hexadecimal digits (the first block of an extent)
  kvstore explain monday.json tuesday.json     each: {_FORM}
""",
    )
    parser.add_argument("what", nargs="+", metavar="CODE | KEY | A.json B.json", help="one code or reason, one block key, or two files")


def run(args: argparse.Namespace) -> int:
    if len(args.what) == 1 and is_key(args.what[0]):
        return explain_key(args.what[0], args)
    if len(args.what) == 1:
        check_not_almost_a_key(args.what[0])
        if _is_file(args.what[0]):
            raise UsageError("E140", f"{args.what[0]} alone", "files are compared, two of them", "kvstore explain A.json B.json")
        return _explain_code(args.what[0], args)
    if len(args.what) == 2:
        return _compare(_read(Path(args.what[0])), _read(Path(args.what[1])), args.out)
    raise UsageError("E140", f"{len(args.what)} arguments", fix="give one code or two files")


def _is_file(word: str) -> bool:
    """By its looks, or because it is one: no code and no reason of misses has a dot or a slash."""
    return "/" in word or word.lower().endswith(".json") or Path(word).is_file()


def _explain_code(word: str, args: argparse.Namespace) -> int:
    code, out = word.upper(), args.out
    if health := HEALTH.get(code):
        out.line(f"{code}  {health.severity}", style="bold")
        out.line(f"  meaning   {health.meaning}")
        out.line(f"  measured  {health.measured}")
        if health.for_seconds:
            out.line(f"  counts    once it has lasted {format_seconds(health.for_seconds)}; INFO until then")
        now = _value_now(code, args)
        for at, line in enumerate(["unknown: no cluster that answers"] if now is None else now):
            out.line(f"  {'now' if at == 0 else '':<8}  {line}")
        _causes(health.causes, out)
        out.line(f"  do        {health.fix}")
        _commands(health.commands, out)
        out.result({"code": code, "kind": "health", **{f: getattr(health, f) for f in health.__slots__}, "now": now})
        return 0
    if error := ERRORS.get(code):
        out.line(code, style="bold")
        out.line(f"  meaning   {error.meaning}")
        _causes(error.causes, out)
        out.line(f"  do        {error.fix}")
        out.result({"code": code, "kind": "error", **{f: getattr(error, f) for f in error.__slots__}})
        return 0
    if miss := MISSES.get(reason := code.lower().replace(" ", "_")):
        out.line(reason, style="bold")
        out.line(f"  meaning   {miss.meaning}")
        _causes(miss.causes, out)
        out.line(f"  do        {miss.fix}")
        _commands(miss.commands, out)
        out.result({"code": reason, "kind": "miss", **{f: getattr(miss, f) for f in miss.__slots__}})
        return 0
    if re.fullmatch(r"E\d{3}", code) and (about := RANGES.get(code[:2])):
        out.line(code, style="bold")
        out.line(f"  meaning   {about}")
        out.result({"code": code, "kind": "error", "meaning": about})
        return 0
    raise UsageError("E140", f'no code "{word}"', fix=suggestion(code, [*HEALTH, "E100 to E999", *MISSES]))


def _value_now(code: str, args: argparse.Namespace) -> list[str] | None:
    """What the check sees in the cluster that is known here; None where there is none, or it does not answer."""
    from kvstore.cli.cluster import ask_nodes, find_map, require_some
    from kvstore.cli.health_values import values_now

    try:
        cluster_map = find_map(args)
        reports = ask_nodes(cluster_map, args.settings["timeout"])
        require_some(reports, cluster_map)
    except KvstoreError:
        return None
    return values_now(code, cluster_map, reports)


def _causes(causes: tuple[str, ...], out: Output) -> None:
    for at, cause in enumerate(causes):
        out.line(f"  {'causes' if at == 0 else '':<8}  {at + 1}. {cause}")


def _commands(commands: tuple[str, ...], out: Output) -> None:
    for at, command in enumerate(commands):
        out.line(f"  {'commands' if at == 0 else '':<8}  {command}")


@dataclass(frozen=True)
class _Prompt:
    name: str
    tokens: np.ndarray[Any, np.dtype[np.uint32]] | None
    namespace: Namespace | None


def _read(path: Path) -> _Prompt:
    try:
        if path.stat().st_size > INPUT_BYTES_MAX:
            raise InputError("E142", str(path), f"larger than {INPUT_BYTES_MAX >> 20} MiB", "give one prompt a file")
        given = json.loads(path.read_bytes())
    except OSError as error:
        raise InputError("E142", f"cannot read {path}", (error.strerror or "").lower(), "check the path") from None
    except RecursionError:
        raise InputError("E142", f"{path} is not JSON", "nested too deep", f"give {_FORM}") from None
    except ValueError as error:
        raise InputError("E142", f"{path} is not JSON", str(error).lower(), f"give {_FORM}") from None
    if isinstance(given, list):
        given = {"tokens": given}
    names = {"tokens", "namespace"}
    if isinstance(given, dict) and "tokens" not in given and "weights" in given:
        given = {"namespace": given}
    if not isinstance(given, dict) or not given or set(given) - names:
        raise InputError("E142", f"{path} is neither a prompt nor a namespace", fix=f"give {_FORM}")
    tokens = namespace = None
    if "tokens" in given:
        ids = given["tokens"]
        if not isinstance(ids, list) or not all(type(t) is int and 0 <= t < 1 << 32 for t in ids):
            raise InputError("E142", f'{path}: "tokens" is not a list of token ids', fix="write whole numbers from 0 to 4294967295")
        tokens = np.array(ids, np.uint32)
    if "namespace" in given:
        namespace = _namespace(given["namespace"], path)
    return _Prompt(str(path), tokens, namespace)


def _namespace(given: Any, path: Path) -> Namespace:
    known = [field.name for field in fields(Namespace)] + ["layout"]
    if not isinstance(given, dict):
        raise InputError("E142", f'{path}: "namespace" is not an object', fix=f"give {_FORM}")
    for key in given:
        if key not in known:
            raise InputError("E142", f'{path}: unknown field "{key}" of the namespace', fix=suggestion(key, known))
    values = dict(given)
    layout = values.pop("layout", None)
    if layout is not None:
        if not isinstance(layout, str) or layout not in PRESETS:
            raise InputError("E142", f'{path}: no layout "{layout}"', fix=suggestion(str(layout), PRESETS))
        values["layout_digest"] = PRESETS[layout].digest()
    elif isinstance(values.get("layout_digest"), str):
        try:
            values["layout_digest"] = bytes.fromhex(values["layout_digest"])
        except ValueError:
            raise InputError("E142", f'{path}: "layout_digest" is not hexadecimal', fix="write 64 hexadecimal digits") from None
    try:
        return Namespace(**values)
    except TypeError as error:
        raise InputError("E142", f"{path}: namespace", str(error).partition(") ")[2].lower(), f"give {_FORM}") from None
    except KvstoreError as error:
        raise InputError("E142", f"{path}: {error.what}", error.cause, error.fix) from None


def _compare(a: _Prompt, b: _Prompt, out: Output) -> int:
    differing = _differing_fields(a, b)
    data: dict[str, Any] = {"a": _facts(a), "b": _facts(b), "namespace_fields_differing": differing}
    for letter, prompt in (("A", a), ("B", b)):
        count = 0 if prompt.tokens is None else len(prompt.tokens)
        size = "namespace only" if prompt.tokens is None else f"{count:,} tokens = {count // BLOCK_TOKENS} blocks + {count % BLOCK_TOKENS}"
        out.line(f"{letter}          {prompt.name}  {size}")
    if a.namespace is None or b.namespace is None:
        out.line("namespace  not given in both: taken as equal")
    elif not differing:
        out.line("namespace  equal")
    for field in differing or ():
        out.line(f"namespace  {field['field']} differs: {field['a']} against {field['b']}", style="bold")
    if a.tokens is not None and b.tokens is not None:
        data |= _compare_tokens(a.tokens, b.tokens, bool(differing), out)
    elif differing:
        out.line("shared     nothing: no block of one can be used by the other")
    out.result(data)
    return 0


def _differing_fields(a: _Prompt, b: _Prompt) -> list[dict[str, str]] | None:
    if a.namespace is None or b.namespace is None:
        return None
    pairs = zip(a.namespace.fields(), b.namespace.fields(), strict=True)
    return [{"field": name, "a": _shown(a.namespace, name), "b": _shown(b.namespace, name)} for (name, x), (_, y) in pairs if x != y]


def _compare_tokens(a: Any, b: Any, namespaces_differ: bool, out: Output) -> dict[str, Any]:
    shorter = min(len(a), len(b))
    unequal = np.flatnonzero(a[:shorter] != b[:shorter])
    first = int(unequal[0]) if len(unequal) else None
    if first is not None:
        where = f"token {first:,} (block {first // BLOCK_TOKENS}, position {first % BLOCK_TOKENS})"
        out.line(f"tokens     first difference at {where}: {a[first]} against {b[first]}", style="bold")
    elif len(a) == len(b):
        out.line("tokens     equal")
    else:
        out.line(f"tokens     equal up to token {shorter:,}, where the shorter ends")
    # The keys decide, not the comparison above: both must tell the same.
    keys_a, keys_b = _keys(a), _keys(b)
    blocks = min(len(keys_a), len(keys_b))
    same = int((keys_a[:blocks] == keys_b[:blocks]).all(axis=1).sum())
    shared = 0 if namespaces_differ else same
    if namespaces_differ:
        out.line("shared     nothing: the namespaces differ, so no block of one can be used by the other")
    else:
        share = 100 * shared * BLOCK_TOKENS / max(len(b), 1)
        out.line(f"shared     {shared} block{'s' if shared != 1 else ''} = {shared * BLOCK_TOKENS:,} tokens, {share:.1f} % of B")
        if first is not None and blocks > same:
            new = len(keys_b) - same
            out.line(f"           what follows cannot be shared: a block's key names its whole prefix, so {new} of B must be stored anew")
    return {
        "first_differing_token": first,
        "first_differing_block": None if first is None else first // BLOCK_TOKENS,
        "shared_blocks": shared,
        "shared_tokens": shared * BLOCK_TOKENS,
    }


def _keys(tokens: Any) -> Any:
    chain = KeyChain(Namespace(weights="explain", kv_dtype="any", layout_digest=bytes(32)))
    chain.extend(tokens)
    return chain.keys


def _facts(prompt: _Prompt) -> dict[str, Any]:
    count = None if prompt.tokens is None else len(prompt.tokens)
    return {"file": prompt.name, "tokens": count, "blocks": None if count is None else count // BLOCK_TOKENS}


def _shown(namespace: Namespace, name: str) -> str:
    value = getattr(namespace, name)
    if isinstance(value, bytes):
        value = value.hex()
    return json.dumps(value)
