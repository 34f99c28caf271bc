"""Codecs: ISA-L (fast, native) and zfec (portable, and the oracle) behind one interface, parity byte for byte the same."""
