from __future__ import annotations

import numpy as np

from dsim.policy import make_view
from policies.none import NoSpeculation


def test_no_draft_is_verified():
    lengths = NoSpeculation().plan(make_view(np.ones((3, 4)), np.ones(16)))
    assert lengths.tolist() == [0, 0, 0]
    assert lengths.dtype == np.int64
