"""From engine files, profiles and confidence logs to one another. See `docs/engine-files.md`.

``python -m dsim.convert IN OUT`` is the command. `to_profile` and `from_profile` are its two halves; both return what
they made and a list of sentences that say what was lost or assumed.
"""

from dsim.convert.command import convert, main
from dsim.convert.from_profile import from_profile, steps_per_second
from dsim.convert.to_profile import to_profile

__all__ = ["convert", "from_profile", "main", "steps_per_second", "to_profile"]
