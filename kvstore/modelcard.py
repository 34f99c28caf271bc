"""A model card: what a process must know of a model to name its blocks, without its weights. Routers and lookup services read one.

    name = "mini"                       # for people
    block_tokens = 128
    recompute_tokens = 134              # at a prompt's end, that the engine computes in any case
    weights = "9c4f..."                 # the namespace's fields (docs/KEYS.md): bytes in hex, texts as they are
    kv_dtype = "mini.v41"
    [[sections]]                        # the layout: sections of a block in their order
    name = "source.1.main"
    bytes = 2304

Written by whoever runs the engine (`ModelCard.to_toml`). Engine and readers of the card must agree in all of it: it decides every key.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvstore.errors import ConfigError, KvstoreError
from kvstore.keys import BLOCK_TOKENS, Namespace
from kvstore.layout import Layout, Section
from kvstore.tomlfile import TomlFile

_BYTES_FIELDS: Final = ("weights", "adapter", "kv_scales")
_TEXT_FIELDS: Final = ("kv_dtype", "rope")
_NUMBER_FIELDS: Final = ("kv_group", "rank", "rank_count")
_HEX: Final = r"([0-9a-f]{2}){0,128}"


@dataclass(frozen=True, kw_only=True)
class ModelCard:
    """See above. `namespace.layout_digest` is the layout's."""

    name: str
    layout: Layout
    namespace: Namespace
    block_tokens: int = BLOCK_TOKENS
    recompute_tokens: int = 0

    def __post_init__(self) -> None:
        if self.namespace.layout_digest != self.layout.digest():
            raise ConfigError("E197", f"model {self.name!r}", "its namespace is of another layout", "make both from one layout")

    @classmethod
    def load(cls, path: str | Path) -> ModelCard:
        """Raises ConfigError, which names the line."""
        file = TomlFile.load(path)
        table = file.table()
        sections = []
        for row in table.tables("sections"):
            sections.append(Section(row.text("name"), row.integer("bytes", 1, 64 << 20)))
            row.done()
        fields = {name: bytes.fromhex(table.text(name, "", pattern=_HEX, form="hex digits")) for name in _BYTES_FIELDS}
        texts = {name: table.text(name, "") for name in _TEXT_FIELDS}
        numbers = {name: table.integer(name, 0, (1 << 32) - 1, int(name == "rank_count")) for name in _NUMBER_FIELDS}
        name = table.text("name")
        block_tokens = table.integer("block_tokens", 1, 1 << 20, BLOCK_TOKENS)
        recompute_tokens = table.integer("recompute_tokens", 0, 1 << 20, 0)
        table.done()
        try:
            layout = Layout(tuple(sections))
            space = Namespace(
                weights=fields["weights"], adapter=fields["adapter"], kv_scales=fields["kv_scales"], kv_dtype=texts["kv_dtype"],
                rope=texts["rope"], layout_digest=layout.digest(), **numbers,
            )  # fmt: skip
        except KvstoreError as error:
            raise ConfigError("E197", f"{path}: {error.what}", error.cause, error.fix or "correct the card") from None
        return cls(name=name, layout=layout, namespace=space, block_tokens=block_tokens, recompute_tokens=recompute_tokens)

    def to_toml(self) -> str:
        """What `load` reads."""
        space = self.namespace
        lines = [f"name = {json.dumps(self.name)}", f"block_tokens = {self.block_tokens}", f"recompute_tokens = {self.recompute_tokens}"]
        for name in _BYTES_FIELDS:
            value = getattr(space, name)
            lines.append(f'{name} = "{(value.encode() if isinstance(value, str) else value).hex()}"')
        for name in _TEXT_FIELDS:
            value = getattr(space, name)
            lines.append(f"{name} = {json.dumps(value.decode() if isinstance(value, bytes) else value)}")
        lines += [f"{name} = {getattr(space, name)}" for name in _NUMBER_FIELDS]
        for section in self.layout.sections:
            lines += ["[[sections]]", f"name = {json.dumps(section.name)}", f"bytes = {section.bytes}"]
        return "\n".join(lines) + "\n"
