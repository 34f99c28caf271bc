"""kvstore: an open KV prompt cache. Vocabulary at the top, parts in the subpackages; see docs/ARCHITECTURE.md."""
