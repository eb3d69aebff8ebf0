"""Every run of a test is made: a result that lay there already would hide what a test is about."""

import os

os.environ.setdefault("DSIM_STORE", "none")
