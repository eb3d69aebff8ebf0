"""A draft source that keeps a confidence log, as an engine would."""

from __future__ import annotations

import json
from pathlib import Path


class LoggedDrafts:
    """Another source, of which it notes what an engine would see: `lines`, in the format of `read_log`."""

    def __init__(self, source):
        self.gamma, self.paired, self.domains, self.label = source.gamma, source.paired, source.domains, source.label
        self.source, self.lines = source, []
        self._domain, self._blocks = {}, {}

    def open(self, request, domain, output_tokens):
        self._domain[request] = self.domains[domain]
        self.source.open(request, domain, output_tokens)

    def draft(self, requests, positions):
        confidence, accepted = self.source.draft(requests, positions)
        self._blocks.update(zip(requests.tolist(), confidence.tolist(), strict=True))
        return confidence, accepted

    def observe(self, requests, positions, verified, accepted):
        """Of one line a request; the number of the line stands for the step."""
        for r, p, v, a in zip(*(x.tolist() for x in (requests, positions, verified, accepted)), strict=True):
            self.lines.append(
                {
                    "request": r,
                    "position": p,
                    "step": len(self.lines),
                    "confidences": self._blocks[r],
                    "verified": v,
                    "accepted": a,
                    "domain": self._domain[r],
                }
            )

    def write(self, path: Path) -> Path:
        path.write_text("".join(json.dumps(line) + "\n" for line in self.lines), encoding="utf-8")
        return path
