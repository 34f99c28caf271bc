"""From a trace or an access log to decisions: hit rate by capacity, policy and retention, and what to buy."""
