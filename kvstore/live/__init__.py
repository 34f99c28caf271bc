"""The cluster as it is now, for eyes: what `kvstore top` and `kvstore dashboard` show. Reads only; asks nodes by their control plane and
client processes by their /metrics. collector polls and keeps a bounded history; frame sums up one interval; screen and web show it."""
