"""Runs a planned pipeline: executor, transports, process groups, gradient reduction, ties, failures.

Read in this order: `stage` (what a stage gives), `executor` (runs a stage's list of actions), `transport` (moves values
between neighbours; `memory_transport` in one process, `p2p_transport` between processes), `process_groups`,
`gradient_reduction` and `tied_parameters` (what happens after a stage's last backward), `failure` (when something goes
wrong).
"""
