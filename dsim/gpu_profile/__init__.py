"""Timing a decoder and a DSpark drafter of a given shape on this machine, as a `dsim.profile.Profile` (needs torch).

Random weights and a random KV cache: what a pass costs depends on the shapes, on which experts the tokens hit, and not
on what the numbers mean. `docs/profile-gpu.md` says what is timed and how; `experiments/profile_gpu.py` runs it.

`shapes` has the models, `grid` what is timed in which order and what of it fits into memory, `decoder` and `drafter`
the passes, `timers` the clocks (all that is CUDA-only is there), `measure` the run and the profile that comes out.
"""
