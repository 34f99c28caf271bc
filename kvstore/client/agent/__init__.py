"""What an inference host runs beside, or in, its engine: RAM tier, windows, the agent process. docs/AGENT.md tells how it behaves."""
