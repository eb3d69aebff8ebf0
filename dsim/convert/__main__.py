"""``python -m dsim.convert``."""

import sys

from dsim.convert.command import main

sys.exit(main())
