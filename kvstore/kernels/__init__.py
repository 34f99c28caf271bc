"""The native core, its typed face, and a plain Python reference beside each kernel."""
