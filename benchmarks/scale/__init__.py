"""What a cluster of a given size and load asks of one daemon, from parameters, real placement and unit costs measured in the same run.

parameters.py   what is assumed: the cluster, its load, the shape of prompts; checked
derive.py       rates per daemon and column, windows, directory: arithmetic alone
placed.py       what follows from where keys lie: messages of a prompt, the busiest daemon; the real placement and planner
costs.py        unit costs of this machine: processor time of real daemons over real sockets, index and filter, rebuilding
show.py         the table, and the same as one object
"""
