from __future__ import annotations

import numpy as np
import pytest

from dsim.errors import InputError
from dsim.policy import make_view
from policies.fixed import Fixed


@pytest.mark.parametrize(("k", "lengths"), [(0, [0, 0, 0]), (2, [2, 1, 0]), (4, [4, 1, 0]), (9, [4, 1, 0])])
def test_k_drafts_within_the_caps(k, lengths):
    view = make_view(np.zeros((3, 4)), np.ones(16), caps=[4, 1, 0])
    assert Fixed(k=k).plan(view).tolist() == lengths


@pytest.mark.parametrize("k", [-1, 1.5, 2.0, True, "3", None, float("nan")])
def test_k_that_is_no_count(k):
    with pytest.raises(InputError, match=r"field 'k'.*expected an integer >= 0"):
        Fixed(k=k)
