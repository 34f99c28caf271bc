"""Host RAM to device memory, layer by layer: one interface, a mover for each way there is on this host."""
