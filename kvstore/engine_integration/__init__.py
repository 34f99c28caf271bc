"""The bundled mixture-of-experts engine: a model whose cache behaves as docs/ENGINE.md says. Import its parts by name; torch comes late."""
