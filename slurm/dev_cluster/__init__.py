"""The development cluster; `slurm/dev-cluster` is its command. It needs nothing but Python.

cli ── lifecycle ─┬─ requirements   the packages and privileges that the machine must have
    │             ├─ configuration  the files of Slurm, and the folder that holds everything
    │             ├─ network        the network namespaces of the hosts
    │             └─ daemons        the processes of Slurm; `accounting` starts two of them
    └─ faults                       what can happen to a job: preemption, a lost node

All of these stand on `cluster` (names, addresses, processes), `controller` (what slurmctld says)
and `command` (run a program, wait, the error for the user).
"""
