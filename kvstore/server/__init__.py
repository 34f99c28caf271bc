"""The storage daemon: one process per SSD."""
