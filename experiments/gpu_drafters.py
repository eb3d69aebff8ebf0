"""On a machine with a CUDA GPU: text, full-vocabulary DSpark and DFlash, learning curves and banks, in one go.

Never required: everything here also runs with train_drafter.py and record_banks.py on a CPU, only slower. The amounts
are options, so that the run fits the time there is; each stage prints how long it took, and whatever is done when the
time is up stays in the output folder and is gone on with by the same command. --minutes ends the trainings in time for
the recording, with the learning rate lowered and the confidence head fitted, and records as many prompts as there is
time for (a part of record_banks.py at least; text is made whole). What was left out is printed and noted in the banks.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from dsim.drafter.recipe import load_recipe
from dsim.drafter.targets import pick_device
from experiments import record_banks, train_drafter
from experiments._common import OneLineParser, positive_int, run_main

KINDS = {"dspark": "markov", "dflash": "none"}
#: Shares of --minutes by whose end a training ends; DSpark's has the text in it. The rest is for recording.
SHARES = {"dspark": 1 / 3, "dflash": 7 / 12}


def options() -> argparse.ArgumentParser:
    """Command line of the script."""
    cli = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--recipe", default="gpu", metavar="NAME", help="text and training (default: %(default)s)")
    cli.add_argument("--anchors", type=positive_int, metavar="N", help="a drafter (default: the recipe's)")
    cli.add_argument("--prompts", type=positive_int, default=1792, metavar="N", help="to record (default: %(default)s)")
    cli.add_argument(
        "--calibration", type=positive_int, default=384, metavar="N", help="prompts for STS (default: %(default)s)"
    )
    cli.add_argument(
        "--minutes",
        type=positive_int,
        metavar="M",
        help="of which a third ends the text and DSpark's training, the next quarter DFlash's, the rest the recording "
        "(default: no limit)",
    )
    cli.add_argument("--device", choices=("auto", "cpu", "cuda"), default="cuda", help="default: %(default)s")
    cli.add_argument("--jobs", type=positive_int, default=2, metavar="N", help="on a CPU: processes (default: 2)")
    cli.add_argument(
        "--out", type=Path, default=Path("results/gpu_drafters"), metavar="DIR", help="default: %(default)s"
    )
    return cli


@contextmanager
def _timed(what: str) -> Iterator[None]:
    began = time.perf_counter()
    yield
    print(f"{what}: {time.perf_counter() - began:.0f} s", flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    """Train both drafters, then record both at once."""
    given = options().parse_args(argv)
    device = pick_device(given.device)
    began = time.monotonic()
    files = []
    for kind, head in KINDS.items():
        settings = {"drafter.kind": kind, "drafter.head": head}
        if given.anchors is not None:
            settings["training.anchors"] = given.anchors
        recipe = load_recipe(given.recipe, settings)
        with _timed(f"text and training of {kind}"):
            deadline = None if given.minutes is None else began + 60 * SHARES[kind] * given.minutes
            train_drafter.train(recipe, given.out / kind, jobs=given.jobs, device=device, deadline=deadline)
        files += ["--drafter", f"{kind}={given.out / kind / 'drafter.safetensors'}"]
    text = recipe.text
    with _timed("recording"):
        record_banks.main(
            [
                *files,
                *("--target", recipe.target, "--temperature", str(text.temperature)),
                *("--prompts", str(given.prompts), "--calibration", str(given.calibration)),
                *("--max-new-tokens", str(text.max_new_tokens), "--shard", str(text.shard)),
                *("--taps", ",".join(str(tap) for tap in text.taps)),
                *("--device", given.device, "--jobs", str(given.jobs), "--out", str(given.out / "banks")),
            ],
            deadline=None if given.minutes is None else began + 60 * given.minutes,
        )


if __name__ == "__main__":
    run_main(main)
