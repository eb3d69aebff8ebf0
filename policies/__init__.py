"""Scheduling policies, one a file. They decide verify lengths and know nothing of the simulator."""
