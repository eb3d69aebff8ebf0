"""Does a policy keep the target's distribution? An exact audit by enumeration over a small vocabulary.

`audit` compares the joint law of all requests' first n output tokens under a policy with the product of the
targets' laws, in one finite `Case`; `examine` does so in many random ones, and `smallest_counterexample` shrinks
what it finds. What that proves and what it does not is in docs/lossless.md.
"""

from dsim.lossless.case import Case, Tables, appendix_a, contexts, distribution, everywhere
from dsim.lossless.cases import random_case
from dsim.lossless.controls import CONTROLS
from dsim.lossless.describe import describe
from dsim.lossless.law import Audit, Decision, World, audit, decisions, output_law, target_law, total_variation
from dsim.lossless.search import Counterexample, examine, numbered_case, smallest_counterexample

__all__ = [
    "CONTROLS",
    "Audit",
    "Case",
    "Counterexample",
    "Decision",
    "Tables",
    "World",
    "appendix_a",
    "audit",
    "contexts",
    "decisions",
    "describe",
    "distribution",
    "everywhere",
    "examine",
    "numbered_case",
    "output_law",
    "random_case",
    "smallest_counterexample",
    "target_law",
    "total_variation",
]
